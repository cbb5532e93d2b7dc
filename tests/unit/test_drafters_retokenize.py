"""Retokenize: text drafted with another tokenizer is proposed to the target byte by byte, and accepted."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.decode.sequence import Sequence
from foredraft.drafters.retokenize import Retokenize, Translation
from foredraft.model.byte_codec import ByteCodec, characters
from tests.support import alphabets
from tests.support.mutation import Mutation, assert_caught, defect, replaced
from tests.support.mutations import around, before, holding, instead
from tests.support.panics import panic, raising
from tests.support.prophet import TRUTH, Prophet, sequence_of

Function = Callable[..., Any]
TOKENIZERS = {name: alphabets.make(name) for name in alphabets.KINDS}
SPELLINGS = {name: ByteCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PAIRS = [pair for pair in itertools.product(SPELLINGS, SPELLINGS) if pair[0] != pair[1]]
BUDGET = 4
PAIR = "byte-level", "sentencepiece"


def drafter_of(pair: tuple[str, str], rows: int = 2, positions: int = 10_000, **more: Any) -> Retokenize:
    prophet: Any = Prophet(SPELLINGS[pair[1]], **more)
    return Retokenize(prophet, rows, positions, TOKENIZERS[pair[0]], TOKENIZERS[pair[1]])


def joined(tokens: list[int]) -> tuple[Retokenize, Sequence]:
    drafter, sequence = drafter_of(PAIR), sequence_of(1, tokens)
    drafter.join(sequence)
    return drafter, sequence


def ask(drafter: Retokenize, sequence: Sequence, budget: int = BUDGET) -> list[int]:
    (guess,) = drafter.propose([(sequence, budget)])
    return guess


def follow(drafter: Retokenize, sequence: Sequence, ids: list[int]) -> tuple[int, int]:
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
    source, reader = (SPELLINGS[name].encode(TRUTH) for name in pair)
    drafter, sequence = drafter_of(pair), sequence_of(1, [1, *source[:8]])
    drafter.join(sequence)
    drafted, _ = follow(drafter, sequence, [1, *source])
    prophet: Any = drafter.draft_pass.runner
    passes: int = prophet.passes
    return passes / (drafted * len(reader) / len(source))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "coarse" not in "".join(pair)], ids="-".join)
def test_a_round_takes_few_more_draft_steps_than_its_tokens_need(pair: tuple[str, str]) -> None:
    assert steps_per_token(pair) < 1.25


TAILS = st.lists(st.integers(0, 383), max_size=12)
SAID = st.text(st.sampled_from("ab \nwölf🙂<s>い"), max_size=12).map(str.encode) | st.binary(max_size=8)


def byte_exact(name: str, tail: list[int], said: bytes) -> None:
    drafter = drafter_of((name, "byte-level"))
    guess = drafter._spelled([1, *tail], said)
    assert said.startswith(SPELLINGS[name].join(guess))
    assert all(SPELLINGS[name].of(id) is not None for id in guess), "a special token is not text"


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=60)
@given(tail=TAILS, said=SAID)
def test_proposals_spell_only_drafted_bytes(name: str, tail: list[int], said: bytes) -> None:
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
            drafter, sequence = drafter_of(PAIR, truth=truth), sequence_of(1, tokens)
            drafter.join(sequence)
            guess = ask(drafter, sequence, 6)
            if right:
                assert guess == ids[len(tokens) :][: len(guess)]
                assert guess
            elif not truth.encode().startswith(spelling.join(tokens[1:])):
                assert guess == []


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
def test_a_rolled_back_drafter_proposes_what_a_fresh_one_does(pair: tuple[str, str]) -> None:
    dice = random.Random(5)
    ids = [1, *SPELLINGS[pair[0]].encode(TRUTH)]
    drafter, sequence = drafter_of(pair), sequence_of(1, ids[:5])
    drafter.join(sequence)
    for place in range(6, 90):
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
    ids = [1, *SPELLINGS[PAIR[0]].encode(TRUTH)]
    drafter, sequence = joined(ids[:100])
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
    second = sequence_of(2, ids[:100])
    drafter.join(second)
    prophet.forwarded = 0
    assert ask(drafter, second) == ids[100 : 100 + BUDGET]
    assert prophet.forwarded < 25


def test_a_text_beyond_its_positions_gets_no_drafts() -> None:
    ids = [1, *SPELLINGS[PAIR[0]].encode(TRUTH)]
    trained: Any = Prophet(SPELLINGS[PAIR[1]], positions=60)
    of_it = Retokenize(trained, 2, 500, TOKENIZERS[PAIR[0]], TOKENIZERS[PAIR[1]])
    for drafter in (drafter_of(PAIR, positions=60), of_it):
        assert drafter.positions == 60
        sequence = sequence_of(1, ids[:9])
        drafter.join(sequence)
        follow(drafter, sequence, ids)
        assert ask(drafter, sequence) == []
        assert 50 < len(drafter._rows[0]) <= 60


def test_nonfinite_drafts_are_not_proposed(caplog: pytest.LogCaptureFixture) -> None:
    ids = [1, *SPELLINGS[PAIR[0]].encode(TRUTH)]
    drafter, sequence = joined(ids[:20])
    prophet: Any = drafter.draft_pass.runner
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


CALLS = {  # a codec and its method
    "the text so far": ("_draft", "encode"),
    "the drafted tokens": ("_draft", "join"),
    "the drafted text": ("_target", "spell"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_panic_ends_the_drafts_of_its_sequence(call: str, caplog: pytest.LogCaptureFixture) -> None:
    codec, method = CALLS[call]
    ids = [1, *SPELLINGS[PAIR[0]].encode(TRUTH)]
    (drafter, ill), well = joined(ids[:20]), sequence_of(2, ids[:20])
    drafter.join(well)
    want = ask(drafter, well)
    assert want
    with replaced(getattr(drafter, codec), method, raising(panic())):
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
    drafter, sequence = joined([1, 50, 60])
    with replaced(drafter._draft, "encode", raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
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


def take_for_the_text(drafter: Retokenize, row: int, tokens: list[int], closed: int) -> None:
    shared = min(len(drafter._rows[row]), len(tokens))
    drafter._rows[row][:shared] = tokens[:shared]


@around
def rolled_back_too_little(
    catch_up: Function, drafter: Retokenize, row: int, tokens: list[int], closed: int
) -> int:
    held = len(drafter._rows[row])
    start: int = catch_up(drafter, row, tokens, closed)
    return min(start + (start < held), len(tokens) - 1)


@around
def across_the_boundary(spelled: Function, drafter: Retokenize, tokens: list[int], said: bytes) -> list[int]:
    window = drafter._window(tokens)
    ids = drafter._target.spell(characters(window + said))
    ends = itertools.accumulate((len(drafter._target.join([id])) for id in ids), initial=0)
    at = next((at for at, end in enumerate(ends) if end >= len(window)), None)
    guess: list[int] = spelled(drafter, tokens, said) if at is None else ids[at:]
    return guess


window_proposed = instead(lambda own, tokens, said: own._target.spell(characters(own._window(tokens) + said)))


def held_bytes_again(drafter: Retokenize, turn: Any, ids: list[int]) -> tuple[Any, ...]:
    held, spelled = turn.seat.translation.held, drafter._spelled
    return drafter, "_spelled", lambda tokens, said: spelled(tokens, held + said)


def held_bytes_taken_for_right(drafter: Retokenize, turn: Any, ids: list[int]) -> tuple[Any, ...]:
    held, join = turn.seat.translation.held, drafter._draft.join
    return drafter._draft, "join", lambda ids: held + join(ids)[len(held) :]


@around
def last_token_read(go_on: Function, drafter: Retokenize, turns: Any) -> dict[int, list[int]]:
    said: dict[int, list[int]] = go_on(drafter, turns)
    for row, ids in said.items():
        drafter._rows[row].append(ids[-1])
    return said


DEFECTS: list[tuple[str, Any, Mutation]] = [
    ("the draft's row is not rolled back", Retokenize._catch_up, before(take_for_the_text)),
    ("rolled back one too little", Retokenize._catch_up, rolled_back_too_little),
    ("the text is not rolled back", Translation.keep, lambda _: lambda translation, count: None),
    ("a joined token is proposed", Retokenize._spelled, across_the_boundary),
    ("the boundary one off", Retokenize._spelled, lambda spelled: lambda *args: spelled(*args)[1:]),
    ("the window again", Retokenize._spelled, window_proposed),
    ("held bytes proposed again", Retokenize._guess, holding(held_bytes_again)),
    ("held bytes are not checked", Retokenize._guess, holding(held_bytes_taken_for_right)),
    ("any bytes", ByteCodec._agreeing, lambda _: lambda codec, ids, data: ids),
    ("an unread token counts as read", Retokenize._continue, last_token_read),
    (
        "a NaN row is passed on",
        Retokenize.leave,
        holding(lambda own, *_: (own, "_empty", lambda row: None)),
    ),
    ("a draft step too many", Retokenize._steps, lambda steps: lambda *args: steps(*args) + 1),
    ("no end of positions", Retokenize._turn, holding(lambda own, *_: (own, "positions", 10**6))),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "point", "mutation"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_defects_are_caught(
    name: str, point: Any, mutation: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        test_proposals_continue_the_held_bytes()
        test_nonfinite_drafts_are_not_proposed(caplog)
        test_a_text_beyond_its_positions_gets_no_drafts()
        assert steps_per_token(PAIR) < 1.25
        for spelling in SPELLINGS:
            test_drafted_bytes_survive_a_cut_inside_a_token(spelling)
            for tail, said in (([50, 60], b"lo"), ([], b" a<s>b"), ([300, 301], "い".encode())):
                byte_exact(spelling, tail, said)
        for pair in PAIRS[::4]:
            test_a_rolled_back_drafter_proposes_what_a_fresh_one_does(pair)
            assert accepted_in(pair) > 0.85

    assert_caught(defect(name, point, mutation, check), monkeypatch)
