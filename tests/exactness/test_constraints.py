"""The shipped round under shipped constraints, against definitions that search the whole text at every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.constraint import Constraint
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import RoundTrace
from tests.exactness.test_enumeration import compare
from tests.support.bans import Ban, Thought
from tests.support.forking import Case, Found, outputs_of
from tests.support.harness import DRAFTERS, make_engine, request, run
from tests.support.parts import NoRepeat
from tests.support.tabular import Table

V = 5
LENGTH = {"mask": 3, "rollback": 2}  # a rollback multiplies the branches
WORLD = (Table(V, 21), Table(V, 22))
BANS = {
    "overlapping tokens": Ban((b"a", b"ab", b"b", b"ba", b""), ("bab", "aa")),
    "within a token": Ban((b"a", b"abab", b"b", b"c", b""), ("ba",)),
    "bytes of a character": Ban((b"\xc3", b"\xa9", b"a", b"\xc3\xa9a", b""), ("\u00e9a", "a\u00e9")),
    "whole words": Ban((b"a", b"b", b" ", b"a ", b""), ("a", "bb"), whole_words=True, ends=frozenset({4})),
    "an open character": Ban((b"a", b"\xe2\x80", b"\x93", b"b", b""), ("a",), whole_words=True, ends=frozenset({4})),
    "no text but the end": Ban((b"a", b"b", b"ab", b"", b""), ("a", "b"), ends=frozenset({4})),
    "from the prompt on": Ban((b"a", b"ab", b"b", b"ba", b""), ("aba", "aab"), prompt=(0,)),
    "one token is left": Ban((b"a", b"b", b"ab", b"ba", b"c"), ("a", "b")),
    "no token is left": Ban((b"a", b"b", b"ab", b"ba", b"bb"), ("aa", "ab", "ba", "bb")),
}  # fmt: skip
MODES = {"mask": {"mode": "mask"}, "rollback": {"mode": "rollback", "rollbacks": 1}}
TRANSFORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 2},
    "frequency": {"frequency_penalty": 0.8},
    "greedy": {"temperature": 0},
}

reproducible = pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"acceptance": "coupled"}], ids=["greedy", "coupled"]
)


def ban_of(name: str, mode: str, **more: Any) -> Ban:
    return replace(BANS[name], **{**MODES[mode], **more})


def check_cases(
    rule: Ban | Thought, world: Any, length: int, transforms: dict[str, Any], drafters: tuple[str | None, ...]
) -> list[Found]:
    """Compare with the law of a rule's definition: all drafters without a transform, one under any."""
    cases = [
        Case(
            f"{name}, {drafter}",
            SamplingParams(max_new_tokens=length, acceptance="speculative", **options),
            drafters=(drafter,) if drafter else (),
            eos=rule.ends,
            constraint=rule.shipped,
        )
        for name, options in transforms.items()
        for drafter in (drafters if name == "as it is" else ("draft-model",))
    ]
    found = outputs_of(lambda noise: make_engine(*world, Fixed(3), rows=48, noise=noise), cases)
    compare(cases, found, world[0].after, rule.defined)
    return found


def check_law(name: str, mode: str, transforms: Iterable[str] = TRANSFORMS) -> None:
    ban, several = ban_of(name, mode, last=LENGTH[mode]), {each: TRANSFORMS[each] for each in transforms}
    check_cases(ban, WORLD, LENGTH[mode], several, (None, "draft-model", "script", "aux-states"))


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BANS)
def test_the_output_has_the_distribution_of_the_definition(name: str, mode: str) -> None:
    check_law(name, mode)


def requests_under(
    rule: Ban | Thought, drafter: str | None, count: int = 6, **options: Any
) -> list[Sequence]:
    return [
        request((0, 1 + seed % 3), drafter, seed=seed, eos=rule.ends, constraint=rule.shipped(), **options)
        for seed in range(count)
    ]


def checked_texts(rule: Ban | Thought, world: Any, **options: Any) -> list[list[int]]:
    """Check that texts under every drafter are those of plain decoding, and return them."""
    plain, *drafted = (
        run(make_engine(*world, Fixed(3)), requests_under(rule, drafter, **options)) for drafter in DRAFTERS
    )
    assert [name for name, texts in zip(DRAFTERS[1:], drafted, strict=True) if texts != plain] == []
    return plain


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BANS)
@reproducible
def test_the_text_is_that_of_plain_decoding(name: str, mode: str, options: dict[str, Any]) -> None:
    ban = ban_of(name, mode, rollbacks=20, last=12)
    plain = checked_texts(ban, WORLD, max_new_tokens=12, **options)
    assert name == "from the prompt on" or not any(map(ban.matches, plain))


def test_what_is_settled_stays_while_the_batch_changes() -> None:
    ban = Ban((b"a", b"ab", b"b", b"ba", b""), ("abab", "baab"), mode="rollback", rollbacks=1000)
    sequences = [
        request((0,), "draft-model", seed=seed, eos=frozenset({4}), constraint=ban.shipped(), max_new_tokens=6 + 5 * seed)
        for seed in range(12)
    ]  # fmt: skip
    engine = make_engine(*WORLD, Fixed(3), rows=3)
    for sequence in sequences:
        engine.submit(sequence)
    shown: dict[int, list[int]] = {}
    while not engine.scheduler.idle:
        engine.step()
        for sequence in sequences:
            before, now = shown.get(sequence.id, []), sequence.new_ids[: sequence.settled]
            assert now[: len(before)] == before
            shown[sequence.id] = now
    assert any(sequence.attempts for sequence in sequences), "nothing was rolled back"
    assert all(shown[sequence.id] == sequence.new_ids for sequence in sequences)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_text_does_not_end_with_a_banned_word(mode: str) -> None:
    ban = replace(BANS["whole words"], mode=mode, rollbacks=1000)
    cut = 0
    for seed, steps in itertools.product(range(8), range(1, 12)):
        under: Any = {"eos": ban.ends, "constraint": ban.shipped()}
        sequence = request((0,), "draft-model", seed=seed, max_new_tokens=40, **under)
        engine = make_engine(*WORLD, Fixed(2))
        engine.submit(sequence)
        for _ in range(steps):
            engine.step()
        settled, drawn = sequence.new_ids[: sequence.settled], len(sequence.new_ids)
        engine.cancel(sequence)
        assert sequence.new_ids[: len(settled)] == settled
        assert not replace(ban, last=len(sequence.new_ids)).matches(sequence.new_ids)
        cut += len(sequence.new_ids) < drawn
    assert cut, "no text was cut within a word"


class Alternating(NoRepeat):
    narrow = False

    def mask(self) -> Tensor | None:
        return torch.arange(V) % 2 == 0 if self.length % 2 else None


FAULTS = {"sound": None, "NaN": float("nan"), "no allowed logit": float("-inf")}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperatures", [(0.7, 1.0), (0, 0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("name", "mode"), [*itertools.product(BANS, MODES), ("alternating", "mask")])
def test_fused_drafts_are_those_of_the_loop(name: str, mode: str, temperatures: Any, fault: str) -> None:
    constraint: Callable[[], Constraint] = partial(Alternating, V)
    if name in BANS:
        constraint = ban_of(name, mode, rollbacks=20, last=12).shipped

    def rounds(drafter: str) -> list[RoundTrace]:
        sequences = [
            request(
                (0, 1 + seed % 3), drafter, seed=seed, eos=frozenset({4}), max_new_tokens=12,
                constraint=constraint() if seed % 3 else None,
                acceptance="speculative", temperature=temperatures[seed % 2], top_p=0.9,
            )
            for seed in range(8)
        ]  # fmt: skip
        for sequence in sequences:
            sequence.traced = True
        engine = make_engine(*WORLD, Fixed(3))
        if (value := FAULTS[fault]) is not None:
            spoil(engine.drafters[drafter], value)
        run(engine, sequences)
        return [r for s in sequences for r in s.trace]

    for one, other in zip(rounds("looping"), rounds("draft-model"), strict=True):
        assert (one.draft, one.emitted, one.legal) == (other.draft, other.emitted, other.legal)
        assert one.p == pytest.approx(other.p, abs=1e-6) and one.q == pytest.approx(other.q, abs=1e-6)


def spoil(drafter: Any, value: float) -> None:
    """Make the logits of all tokens but 0 this value where a draft model has read a token of every third id."""
    runner, forward = drafter.draft_pass.runner, drafter.draft_pass.runner.forward

    def spoilt(cache: Any, tokens: Tensor, *args: Any, at: Tensor | None = None, **more: Any) -> Any:
        found = forward(cache, tokens, *args, at=at, **more)
        last = tokens[:, -1] if at is None else tokens.gather(1, at[:, None])[:, 0]
        found.logits[last % 3 == 2, -1, 1:] = value
        return found

    runner.forward = spoilt


END = 7
TEXTS = (b"1", b"<", b"/>", b"/>\n", b"/>1", b"\n", b"<1", b"")
THINKER = (Table(len(TEXTS), 31), Table(len(TEXTS), 32))
SCHEMA = ("json_schema", '{"enum": [1, 11]}')
BEGUN = Thought(TEXTS, "<1", "</>", True, SCHEMA, (b"1", b"11"), frozenset({END}))
THOUGHTS = {
    "begun by the prompt": BEGUN,
    "the model may begin it": replace(BEGUN, begun=False),
    "the content may begin as the marker does": replace(
        BEGUN, begun=False, grammar=("regex", "11?|<<"), accepted=(b"1", b"11", b"<<")
    ),
    "a marker that begins again within itself": replace(
        BEGUN, closes="<</>", grammar=("regex", "1"), accepted=(b"1",)
    ),
}
# Biases towards the markers, so that few branches lead through the whole text; lengths.
LIKELY = {1: 3.0, 2: 2.0, 3: 2.0, 5: 1.0}
SHORT = {name: 4 if thought.begun else 5 for name, thought in THOUGHTS.items()}


@pytest.mark.heavy
@pytest.mark.parametrize("name", THOUGHTS)
def test_thinking_and_content_have_the_distribution_of_the_definition(name: str) -> None:
    thought, transforms = replace(THOUGHTS[name]), {"as it is": {"top_k": 2, "logit_bias": LIKELY}}
    found = check_cases(thought, THINKER, SHORT[name], transforms, (None, "draft-model", "script"))
    assert any(thought.content_of(list(output)) for output in found[0].distribution), "no text has a content"


@pytest.mark.parametrize("name", THOUGHTS)
@reproducible
def test_thinking_and_content_are_those_of_plain_decoding(name: str, options: dict[str, Any]) -> None:
    thought = THOUGHTS[name]
    plain = checked_texts(thought, THINKER, max_new_tokens=16, logit_bias=LIKELY, **options)
    assert all(thought.is_legal(tokens) for tokens in plain)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", THOUGHTS)
def test_a_rewound_constraint_is_that_of_the_text_that_is_left(name: str, seed: int) -> None:
    """Walk at random, rewind at random, and compare every mask with that of the definition."""
    thought, choices = replace(THOUGHTS[name]), random.Random(seed)
    constraint, tokens = thought.shipped(), list[int]()
    for _ in range(120):
        defined = thought.defined()
        for token in tokens:
            defined.advance(token)
        mask, want, ended = constraint.mask(), defined.mask(), END in tokens
        assert want is not None and (mask is None) == ended and constraint.length == len(tokens)
        assert mask is None or mask.tolist() == want.tolist(), tokens
        # a draft may go on behind the end
        allowed = [id for id in range(len(TEXTS)) if ended or want[id]]
        if not allowed or choices.random() < 0.3:
            del tokens[choices.randrange(len(tokens) + 1) :]
            constraint.rewind(len(tokens))
        else:
            tokens.append(choices.choice([*allowed, *(id for id in (1, 2) if id in allowed)]))
            assert constraint.advance(tokens[-1]) == len(tokens)


def test_drafts_go_on_in_the_thinking_and_in_the_content() -> None:
    """With a draft model that is the target, every round keeps its whole draft, across the marker, too."""
    options: Any = {"max_new_tokens": 40, "logit_bias": LIKELY, "acceptance": "speculative"}
    sequences = requests_under(BEGUN, "draft-model", 8, **options)
    run(make_engine(THINKER[0], THINKER[0], Fixed(3)), sequences)
    assert any(BEGUN.content_of(sequence.new_ids) for sequence in sequences), "no thinking ended"
    for sequence in sequences:
        assert len(sequence.rounds) <= -(-len(sequence.new_ids) // 4) + 1
