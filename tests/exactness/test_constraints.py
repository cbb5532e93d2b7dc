"""The shipped round under shipped constraints: exact distributions, and identical texts with and without drafts.

The definition of a ban (`tests.support.bans`) searches the whole text at every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.constraint import Constraint
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.round_trace import RoundTrace
from tests.support import distributions
from tests.support.bans import Ban
from tests.support.forking import Case, outputs_of
from tests.support.harness import DRAFTERS, make_engine, request, run
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


def ban_of(name: str, mode: str) -> Ban:
    return Ban(**{**BANS[name].__dict__, **MODES[mode], "last": LENGTH[mode]})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BANS)
def test_the_output_has_the_distribution_of_the_definition(name: str, mode: str) -> None:
    ban = ban_of(name, mode)
    cases = [
        Case(
            f"{transform}, {drafter}",
            SamplingParams(max_new_tokens=LENGTH[mode], acceptance="speculative", **options),
            drafters=(drafter,) if drafter else (),
            eos=ban.ends,
            constraint=ban.shipped,
        )
        for transform, options in TRANSFORMS.items()
        for drafter in ((None, "draft-model", "script", "tapping") if transform == "as it is" else ("draft-model",))
    ]  # fmt: skip
    found = outputs_of(lambda noise: make_engine(*WORLD, Fixed(3), rows=48, noise=noise), cases)
    for case, got in zip(cases, found, strict=True):
        want = distributions.outputs(
            WORLD[0].after, list(case.prompt), case.params, eos=case.eos, constraint=ban.defined()
        )
        assert sum(got.distribution.values()) == pytest.approx(1, abs=1e-9), case.name
        assert set(got.distribution) <= set(want), f"{case.name}: an impossible output"
        for output, chance in want.items():
            assert got.distribution.get(output, 0.0) == pytest.approx(chance, abs=1e-5), (case.name, output)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BANS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"acceptance": "coupled"}], ids=["greedy", "coupled"]
)
def test_the_text_is_that_of_plain_decoding(name: str, mode: str, options: dict[str, Any]) -> None:
    ban = Ban(**{**BANS[name].__dict__, **MODES[mode], "rollbacks": 20, "last": 12})

    def texts(drafter: str | None) -> list[list[int]]:
        sequences = [
            request((0, 1 + seed % 3), drafter, seed=seed, eos=ban.ends, constraint=ban.shipped(), max_new_tokens=12, **options)
            for seed in range(6)
        ]  # fmt: skip
        return run(make_engine(*WORLD, Fixed(3)), sequences)

    plain = texts(None)
    for drafter in DRAFTERS[1:]:
        assert texts(drafter) == plain, drafter
    if name != "from the prompt on":
        for tokens in plain:
            assert not ban.matches(tokens)


def test_what_is_settled_stays_while_the_batch_changes() -> None:
    """A stream shows what is settled; rows come and leave meanwhile."""
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
    """Cancelled after every number of steps: what was settled stays, and the end completes no word."""
    ban = replace(BANS["whole words"], mode=mode, rollbacks=1000)
    cut = 0
    for seed, steps in itertools.product(range(8), range(1, 12)):
        sequence = request(
            (0,), "draft-model", seed=seed, eos=ban.ends, constraint=ban.shipped(), max_new_tokens=40
        )
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


class Alternating(Constraint):
    """Allows even tokens alone at every other length."""

    narrow = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def mask(self) -> Tensor | None:
        return torch.arange(V) % 2 == 0 if self.length % 2 else None

    def advance(self, token: int) -> int:
        self.tokens.append(token)
        return self.length

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


FAULTS = {"sound": None, "NaN": float("nan"), "no allowed logit": float("-inf")}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperatures", [(0.7, 1.0), (0, 0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("name", "mode"), [*itertools.product(BANS, MODES), ("alternating", "mask")])
def test_fused_drafts_are_those_of_the_loop(
    name: str, mode: str, temperatures: tuple[float, float], fault: str
) -> None:
    """The same draws by the same noise: texts, drafts, p and q; rows without a constraint beside."""
    constraint: Callable[[], Constraint] = Alternating
    if name in BANS:
        constraint = Ban(**{**BANS[name].__dict__, **MODES[mode], "rollbacks": 20, "last": 12}).shipped

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
