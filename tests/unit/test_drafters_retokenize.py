"""Retokenize: text drafted with another tokenizer is proposed to the target byte by byte, and accepted."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import foredraft
from foredraft import SamplingParams
from foredraft.decode.sequence import Sequence
from foredraft.drafters.retokenize import Retokenize
from foredraft.drafters.translation import Translation
from foredraft.model.byte_codec import ByteCodec, characters
from tests.support import alphabets, checkpoints
from tests.support.loaded import engine_of
from tests.support.planting import Spoiler, assert_caught, defect, replaced
from tests.support.prophet import TRUTH, Prophet

Function = Callable[..., Any]
TOKENIZERS = {name: alphabets.make(name) for name in alphabets.KINDS}
SPELLINGS = {name: ByteCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PAIRS = [pair for pair in itertools.product(SPELLINGS, SPELLINGS) if pair[0] != pair[1]]
BUDGET = 4


def drafter_of(pair: tuple[str, str], rows: int = 2, positions: int = 10_000, **more: Any) -> Retokenize:
    prophet: Any = Prophet(SPELLINGS[pair[1]], **more)
    return Retokenize(prophet, rows, positions, TOKENIZERS[pair[0]], TOKENIZERS[pair[1]])


def sequence_of(id: int, tokens: list[int]) -> Sequence:
    made = Sequence(id, list(tokens), SamplingParams(max_new_tokens=999), seed=1, drafters=("retokenize",))
    made.cache_finite = True
    return made


def ask(drafter: Retokenize, sequence: Sequence, budget: int = BUDGET) -> list[int]:
    """Return the proposal for one sequence alone."""
    (guess,) = drafter.propose([(sequence, budget)])
    return guess


def follow(drafter: Retokenize, sequence: Sequence, ids: list[int]) -> tuple[int, int]:
    """Run rounds of a target whose text is `ids`; return the tokens drafted and accepted."""
    drafted = accepted = 0
    while len(sequence.tokens) < len(ids):
        rest = ids[len(sequence.tokens) :]
        guess = ask(drafter, sequence, min(BUDGET, len(rest)))
        assert len(guess) <= BUDGET
        right = next((at for at, (a, b) in enumerate(zip(guess, rest, strict=False)) if a != b), len(guess))
        drafted, accepted = drafted + len(guess), accepted + right
        sequence.tokens += rest[: right + 1]
        drafter.rewind(sequence)
    return drafted, accepted


def accepted_in(pair: tuple[str, str]) -> float:
    ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    drafter, sequence = drafter_of(pair), sequence_of(1, ids[:9])
    drafter.join(sequence)
    drafted, accepted = follow(drafter, sequence, ids)
    assert drafted > 0.7 * (len(ids) - 9) * BUDGET / (BUDGET + 1)
    return accepted / drafted


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_drafts_of_the_same_text_are_accepted(pair: tuple[str, str]) -> None:
    assert accepted_in(pair) > 0.85


def steps_per_token(pair: tuple[str, str]) -> float:
    """Return the draft steps for each token proposed, in tokens of the draft, along a whole text."""
    source, reader = (SPELLINGS[name].encode(TRUTH) for name in pair)
    drafter, sequence = drafter_of(pair), sequence_of(1, [1, *source[:8]])
    drafter.join(sequence)
    drafted, _ = follow(drafter, sequence, [1, *source])
    prophet: Any = drafter.draft_pass.runner
    passes: int = prophet.passes
    return passes / (drafted * len(reader) / len(source))


@pytest.mark.parametrize(
    "pair", [p for p in PAIRS if not any(name.startswith("coarse") for name in p)], ids="-".join
)
def test_a_round_takes_few_more_draft_steps_than_its_tokens_need(pair: tuple[str, str]) -> None:
    assert steps_per_token(pair) < 1.25


def test_the_tokens_before_a_text_take_no_draft_steps() -> None:
    """A text of two tokens in both vocabularies, behind the draft's BOS alone."""
    drafter = drafter_of(("byte-level", "sentencepiece"))
    drafter._target.prefix, drafter._draft.prefix = [], [1]
    assert drafter._steps(5, [7, 8], [1, 9, 10]) == 5
    assert drafter._steps(5, [7], [1]) == drafter._steps(1, [], []) == 1


TAILS = st.lists(st.integers(0, 383), max_size=12)
SAID = st.one_of(
    st.text(st.sampled_from("ab \nwölf🙂<s>い"), max_size=12).map(str.encode), st.binary(max_size=8)
)


def byte_exact(name: str, tail: list[int], said: bytes) -> None:
    drafter = drafter_of((name, "byte-level"))
    guess = drafter._spelled([1, *tail], said)
    assert said.startswith(SPELLINGS[name].join(guess))
    assert all(SPELLINGS[name].of(id) is not None for id in guess), "a special token is not text"


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=60)
@given(tail=TAILS, said=SAID)
def test_proposals_spell_only_drafted_bytes(name: str, tail: list[int], said: bytes) -> None:
    """After any text, for any drafted bytes."""
    byte_exact(name, tail, said)


@pytest.mark.parametrize("name", SPELLINGS)
def test_drafted_bytes_survive_a_cut_inside_a_token(name: str) -> None:
    """The text is cut anywhere, also inside a word or a character, where a tokenizer never cuts."""
    spelling = SPELLINGS[name]
    drafter = drafter_of((name, "byte-level"))
    joined = 0
    text = " the target checks all of them, Deich"
    for cut in range(1, len(text)):
        before = [1, *spelling.spell(text[:cut])]
        said = text[cut:].encode()
        guess = drafter._spelled(before, said)
        assert spelling.join(guess) == said, "no byte is lost"
        whole = spelling.spell(text)
        joined += [*before[1:], *guess] != whole
        if before[1:] == whole[: len(before) - 1]:
            assert before[1:] + guess == whole, "as the tokenizer itself continues"
    assert joined > 5
    cut_off = spelling.spell("🙃")[:-1]
    rest = "🙃 and".encode()[len(spelling.join(cut_off)) :]
    assert spelling.join(drafter._spelled([1, *cut_off], rest)) == rest


def test_proposals_continue_the_held_bytes() -> None:
    """The target emitted half a character: a draft that does not complete it is dropped."""
    spelling = SPELLINGS["byte-level"]
    ids = [1, *spelling.encode("a third: 🙃 and")]
    held = next(at for at in range(len(ids)) if b"\xf0" in (spelling.of(ids[at]) or b"")) + 1
    for truth, right in (("a third: 🙃 and", True), ("a third: 🙂 and", False), ("a third: then", False)):
        for tokens in (ids[:held], ids[: held + 1]):
            drafter, sequence = (
                drafter_of(("byte-level", "sentencepiece"), truth=truth),
                sequence_of(1, tokens),
            )
            drafter.join(sequence)
            guess = ask(drafter, sequence, 6)
            if right:
                assert guess == ids[len(tokens) :][: len(guess)]
                assert guess
            elif not truth.encode().startswith(spelling.join(tokens[1:])):
                assert guess == []


def test_a_rolled_back_drafter_proposes_what_a_fresh_one_does() -> None:
    """After rejections and rollbacks of any depth."""
    for pair in PAIRS[::3]:
        no_trace(pair)


def no_trace(pair: tuple[str, str]) -> None:
    dice = random.Random(5)
    ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    drafter, sequence = drafter_of(pair), sequence_of(1, ids[:5])
    drafter.join(sequence)
    for place in range(6, 120):
        ask(drafter, sequence)
        sequence.tokens[:] = ids[:place]
        if dice.random() < 0.3:  # another token, taken back by a rollback
            sequence.tokens[-1:] = [40, 41]
            drafter.rewind(sequence)
            ask(drafter, sequence)
            sequence.tokens[:] = ids[: place - dice.randrange(3)]
        drafter.rewind(sequence)
        other, fresh = drafter_of(pair), sequence_of(2, sequence.tokens)
        other.join(fresh)
        assert ask(drafter, sequence) == ask(other, fresh)


def test_each_token_is_read_once() -> None:
    pair = "byte-level", "sentencepiece"
    ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    drafter, sequence = drafter_of(pair), sequence_of(1, ids[:100])
    drafter.join(sequence)
    prophet: Any = drafter.draft_pass.runner
    ask(drafter, sequence)
    read = len(drafter._seats[1].translation.tokens())
    assert prophet.forwarded < read + 4 * BUDGET
    prophet.forwarded = 0
    sequence.tokens = ids[:103]
    drafter.rewind(sequence)
    ask(drafter, sequence)
    assert prophet.forwarded < 25
    # the next sequence begins with the same text, which the row still holds
    drafter.leave(sequence)
    sibling = sequence_of(2, ids[:100])
    drafter.join(sibling)
    prophet.forwarded = 0
    assert ask(drafter, sibling) == ids[100 : 100 + BUDGET]
    assert prophet.forwarded < 25


def test_a_text_beyond_its_positions_gets_no_drafts() -> None:
    pair = "byte-level", "sentencepiece"
    for limit in ({"positions": 60}, {"trained": 60}):
        drafter = drafter_of(pair, positions=limit.get("positions", 500))
        if "trained" in limit:
            prophet: Any = Prophet(SPELLINGS[pair[1]], positions=60)
            drafter = Retokenize(prophet, 2, 500, TOKENIZERS[pair[0]], TOKENIZERS[pair[1]])
        assert drafter.positions == 60
        ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
        sequence = sequence_of(1, ids[:9])
        drafter.join(sequence)
        follow(drafter, sequence, ids)
        assert ask(drafter, sequence) == []
        assert 50 < len(drafter._rows[0]) <= 60


def test_nonfinite_drafts_are_not_proposed(caplog: pytest.LogCaptureFixture) -> None:
    pair = "byte-level", "sentencepiece"
    ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    drafter, sequence = drafter_of(pair), sequence_of(1, ids[:20])
    prophet: Any = drafter.draft_pass.runner
    drafter.join(sequence)
    row = drafter._seats[1].row
    for fault in (1, 2):
        assert ask(drafter, sequence) != []
        prophet.broken[row] = 2
        assert ask(drafter, sequence) == []
        prophet.broken.clear()
        assert (prophet.zeroed, prophet.rows[row]) == ([row] * fault, [])
    assert ask(drafter, sequence) == [], "the second fault ends its drafts"
    assert "request 1 continues without retokenize" in caplog.text
    drafter.leave(sequence)
    heir = sequence_of(2, ids[:20])
    drafter.join(heir)
    assert ask(drafter, heir) != []
    # a pass that broke off may have left anything
    heir.cache_finite = False
    drafter.leave(heir)
    assert prophet.zeroed == [row] * 4
    assert prophet.rows[row] == []


def panicking() -> tokenizers.Tokenizer:
    """Return a tokenizer of which each encoding is a panic of the library: its template wants a second text."""
    content = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    single = [{"Sequence": {"id": "B", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {},
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def fails_on(part: str, call: Function) -> Function:
    """Return a call that panics on texts that have a part."""
    return lambda text: panicking().encode("a") if part in text else call(text)


CALLS = {  # a codec and its method
    "the text so far": ("_draft", "encode"),
    "the drafted tokens": ("_draft", "join"),
    "the drafted text": ("_target", "spell"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_panic_of_a_tokenizer_ends_the_drafts_of_its_sequence_alone(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    codec, method = CALLS[call]
    pair = "byte-level", "sentencepiece"
    drafter, ids = drafter_of(pair), [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    ill, well = sequence_of(1, ids[:20]), sequence_of(2, ids[:20])
    for each in (ill, well):
        drafter.join(each)
    want = ask(drafter, well)
    assert want
    with replaced(getattr(drafter, codec), method, lambda _: panicking().encode("a")):
        assert ask(drafter, ill) == []
    assert re.search(r"request 1 continues without retokenize: .*PanicException", caplog.text)
    for _ in range(2):
        assert drafter.propose([(ill, BUDGET), (well, BUDGET)]) == [[], want]
        ill.tokens += ids[len(ill.tokens) :][:2]
        drafter.rewind(ill)
    del ill.tokens[15:]
    drafter.rewind(ill)
    drafter.leave(ill)
    drafter.join(heir := sequence_of(3, ids[:20]))
    assert ask(drafter, heir) == want


def test_what_is_no_fault_of_a_tokenizer_passes_through() -> None:
    drafter, sequence = drafter_of(PAIRS[0]), sequence_of(1, [1, 50, 60])
    drafter.join(sequence)

    def interrupted(_: str) -> list[int]:
        raise KeyboardInterrupt

    with replaced(drafter._draft, "encode", interrupted), pytest.raises(KeyboardInterrupt):
        ask(drafter, sequence)


def test_a_prompt_without_text_is_no_error() -> None:
    """The prompt is special tokens alone, or has no BOS: the proposal is empty or begins a text."""
    for pair in PAIRS:
        drafter = drafter_of(pair)
        for id, tokens in enumerate(([1], [2], [1, 0, 2], [383])):
            sequence = sequence_of(id, tokens)
            drafter.join(sequence)
            assert len(ask(drafter, sequence)) <= BUDGET
            drafter.leave(sequence)


# --- whole models ---------------------------------------------------------------------------------------

PROMPTS = ["def accept(draft, p, q):", "Zwölf Boxkämpfer jagen", "🙂👍🏽 Съешь", "the <s> target"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, make) in enumerate(alphabets.KINDS.items()):
        inner = make()
        made = checkpoints.save_checkpoint(
            folder / name, seed=seed, num_hidden_layers=2, vocab_size=inner.get_vocab_size()
        )
        alphabets.save(inner, made)
    return folder


@pytest.mark.parametrize("pair", [PAIRS[1], PAIRS[7], PAIRS[9]], ids="-".join)
def test_the_output_is_plain_decodings(models: Path, pair: tuple[str, str]) -> None:
    alone = foredraft.load(models / pair[0], device="cpu", max_batch=3)
    llm = foredraft.load(models / pair[0], draft=models / pair[1], device="cpu", max_batch=3, policy="fixed")
    assert llm.default_drafter == "retokenize"
    params = [
        SamplingParams(temperature=0, max_new_tokens=40),
        SamplingParams(max_new_tokens=30, seed=4),
        SamplingParams(temperature=0, max_new_tokens=40, drafter="lookup"),
        SamplingParams(temperature=0, max_new_tokens=40),
    ]
    plain = alone.generate(
        PROMPTS, [SamplingParams(**{**_fields(p), "drafter": "none"}) for p in params], n=2
    )
    drafted = llm.generate(PROMPTS, params, n=2)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.stats.drafted for output in drafted) > 50
    assert all(output.lossless for output in drafted)
    drafter: Any = engine_of(llm).drafters["retokenize"]
    assert sorted(drafter._free) == [0, 1, 2]


def test_a_panic_of_a_tokenizer_fails_no_request(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = foredraft.load(
        models / "byte-level", draft=models / "sentencepiece", device="cpu", max_batch=2, policy="fixed"
    )
    params = SamplingParams(temperature=0, max_new_tokens=20)
    plain = llm.generate(PROMPTS[:2], params.replace(drafter="none"))
    drafter: Any = engine_of(llm).drafters["retokenize"]
    failing = fails_on("Zw", drafter._draft.encode)
    with replaced(drafter._draft, "encode", failing):
        drafted = llm.generate(PROMPTS[:2], params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.error for output in drafted] == [None, None]
    assert drafted[0].stats.drafted > 0 == drafted[1].stats.drafted
    assert caplog.text.count("continues without retokenize") == 1
    assert sorted(drafter._free) == [0, 1]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def row_taken_for_the_text(catch_up: Function) -> Function:
    def spoilt(drafter: Retokenize, row: int, tokens: list[int]) -> int:
        shared = min(len(drafter._rows[row]), len(tokens))
        drafter._rows[row][:shared] = tokens[:shared]
        start: int = catch_up(drafter, row, tokens)
        return start

    return spoilt


def rolled_back_too_little(catch_up: Function) -> Function:
    def spoilt(drafter: Retokenize, row: int, tokens: list[int]) -> int:
        held = len(drafter._rows[row])
        start: int = catch_up(drafter, row, tokens)
        return min(start + (start < held), len(tokens) - 1)

    return spoilt


def token_across_the_boundary(spelled: Function) -> Function:
    """Propose what follows a token that spans committed text and the draft."""

    def spoilt(drafter: Retokenize, tokens: list[int], said: bytes) -> list[int]:
        window = drafter._window(tokens)
        ids = drafter._target.spell(characters(window + said))
        ends = itertools.accumulate((len(drafter._target.join([id])) for id in ids), initial=0)
        at = next((at for at, end in enumerate(ends) if end >= len(window)), None)
        guess: list[int] = spelled(drafter, tokens, said) if at is None else ids[at:]
        return guess

    return spoilt


def window_proposed(_: Function) -> Function:
    return lambda drafter, tokens, said: drafter._target.spell(characters(drafter._window(tokens) + said))


def held_bytes_again(guess: Function) -> Function:
    def spoilt(drafter: Retokenize, turn: Any, ids: list[int]) -> list[int]:
        held, spelled = turn.seat.translation.held, drafter._spelled
        with replaced(drafter, "_spelled", lambda tokens, said: spelled(tokens, held + said)):
            made: list[int] = guess(drafter, turn, ids)
        return made

    return spoilt


def held_bytes_taken_for_right(guess: Function) -> Function:
    def spoilt(drafter: Retokenize, turn: Any, ids: list[int]) -> list[int]:
        held, join = turn.seat.translation.held, drafter._draft.join
        with replaced(drafter._draft, "join", lambda ids: held + join(ids)[len(held) :]):
            made: list[int] = guess(drafter, turn, ids)
        return made

    return spoilt


def last_token_read(go_on: Function) -> Function:
    def spoilt(drafter: Retokenize, turns: Any) -> dict[int, list[int]]:
        said: dict[int, list[int]] = go_on(drafter, turns)
        for row, ids in said.items():
            drafter._rows[row].append(ids[-1])
        return said

    return spoilt


def row_not_emptied(leave: Function) -> Function:
    def spoilt(drafter: Retokenize, sequence: Sequence) -> None:
        with replaced(drafter, "_empty", lambda row: None):
            leave(drafter, sequence)

    return spoilt


def endless_positions(turn: Function) -> Function:
    def spoilt(drafter: Retokenize, *rest: Any) -> Any:
        with replaced(drafter, "positions", 10**6):
            return turn(drafter, *rest)

    return spoilt


DEFECTS: list[tuple[str, Any, Spoiler]] = [
    ("the draft's row is not rolled back", Retokenize._catch_up, row_taken_for_the_text),
    ("rolled back one too little", Retokenize._catch_up, rolled_back_too_little),
    ("the text is not rolled back", Translation.keep, lambda _: lambda translation, count: None),
    ("a joined token is proposed", Retokenize._spelled, token_across_the_boundary),
    ("the boundary one off", Retokenize._spelled, lambda spelled: lambda *args: spelled(*args)[1:]),
    ("the window again", Retokenize._spelled, window_proposed),
    ("held bytes proposed again", Retokenize._guess, held_bytes_again),
    ("held bytes are not checked", Retokenize._guess, held_bytes_taken_for_right),
    ("any bytes", ByteCodec._agreeing, lambda _: lambda codec, ids, data: ids),
    ("an unread token counts as read", Retokenize._continue, last_token_read),
    ("a non-finite row is passed on", Retokenize.leave, row_not_emptied),
    ("a draft step too many", Retokenize._steps, lambda steps: lambda *args: steps(*args) + 1),
    ("no end of positions", Retokenize._turn, endless_positions),
]


@pytest.mark.parametrize(("name", "seam", "spoiler"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_defects_are_caught(
    name: str, seam: Any, spoiler: Spoiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        for spelling in SPELLINGS:
            test_drafted_bytes_survive_a_cut_inside_a_token(spelling)
            for tail, said in (([50, 60], b"lo"), ([], b" a<s>b"), ([300, 301], "い".encode())):
                byte_exact(spelling, tail, said)
        for pair in PAIRS[::4]:
            no_trace(pair)
            assert accepted_in(pair) > 0.85
        assert steps_per_token(("byte-level", "sentencepiece")) < 1.25
        test_proposals_continue_the_held_bytes()
        test_nonfinite_drafts_are_not_proposed(caplog)
        test_a_text_beyond_its_positions_gets_no_drafts()

    assert_caught(defect(name, seam, spoiler, check), monkeypatch)
