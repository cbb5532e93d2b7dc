"""The shipped round under a grammar that begins behind thinking: exact distributions, and identical texts.

The definition (`tests.support.thinking`) searches the whole text at every step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from tests.support import distributions
from tests.support.forking import Case, outputs_of
from tests.support.harness import DRAFTERS, make_engine, request, run
from tests.support.tabular import Table
from tests.support.thinking import Thought

END = 7
TEXTS = (b"1", b"<", b"/>", b"/>\n", b"/>1", b"\n", b"<1", b"")
V = len(TEXTS)
WORLD = (Table(V, 31), Table(V, 32))
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
LENGTH = {name: 4 if thought.begun else 5 for name, thought in THOUGHTS.items()}


def check_distribution(name: str) -> None:
    thought, length = replace(THOUGHTS[name]), LENGTH[name]
    options = {"top_k": 2, "logit_bias": LIKELY, "max_new_tokens": length, "acceptance": "speculative"}
    cases = [
        Case(
            str(drafter),
            SamplingParams(**options),
            drafters=(drafter,) if drafter else (),
            eos=thought.ends,
            constraint=thought.shipped,
        )
        for drafter in (None, "draft-model", "script")
    ]
    found = outputs_of(lambda noise: make_engine(*WORLD, Fixed(3), rows=48, noise=noise), cases)
    for case, got in zip(cases, found, strict=True):
        want = distributions.outputs(
            WORLD[0].after, list(case.prompt), case.params, eos=case.eos, constraint=thought.defined()
        )
        assert any(thought.content_of(list(output)) for output in want), "no text has a content"
        assert sum(got.distribution.values()) == pytest.approx(1, abs=1e-9), case.name
        assert set(got.distribution) <= set(want), f"{case.name}: an impossible output"
        for output, chance in want.items():
            assert got.distribution.get(output, 0.0) == pytest.approx(chance, abs=1e-5), (case.name, output)


@pytest.mark.parametrize("name", THOUGHTS)
def test_the_output_has_the_distribution_of_the_definition(name: str) -> None:
    check_distribution(name)


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"acceptance": "coupled"}], ids=["greedy", "coupled"]
)
def test_the_text_is_that_of_plain_decoding(name: str, options: dict[str, Any]) -> None:
    thought = THOUGHTS[name]

    def texts(drafter: str | None) -> list[list[int]]:
        sequences = [
            request(
                (0, 1 + seed % 3), drafter, seed=seed, eos=thought.ends, constraint=thought.shipped(),
                max_new_tokens=16, logit_bias=LIKELY, **options,
            )
            for seed in range(6)
        ]  # fmt: skip
        return run(make_engine(*WORLD, Fixed(3)), sequences)

    plain = texts(None)
    for drafter in DRAFTERS[1:]:
        assert texts(drafter) == plain, drafter
    assert all(thought.is_legal(tokens) for tokens in plain)


def check_rewinds(name: str, seed: int) -> None:
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
        allowed = [id for id in range(V) if ended or want[id]]
        if not allowed or choices.random() < 0.3:
            del tokens[choices.randrange(len(tokens) + 1) :]
            constraint.rewind(len(tokens))
        else:
            tokens.append(choices.choice([*allowed, *(id for id in (1, 2) if id in allowed)]))
            assert constraint.advance(tokens[-1]) == len(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", THOUGHTS)
def test_a_rewound_constraint_is_that_of_the_text_that_is_left(name: str, seed: int) -> None:
    check_rewinds(name, seed)


def test_drafts_go_on_in_the_thinking_and_in_the_content() -> None:
    """With a draft model that is the target, every round keeps its whole draft, across the marker, too."""
    sequences = [
        request(
            (0, 1), "draft-model", seed=seed, eos=BEGUN.ends, constraint=BEGUN.shipped(), max_new_tokens=40,
            logit_bias=LIKELY, acceptance="speculative",
        )
        for seed in range(8)
    ]  # fmt: skip
    run(make_engine(WORLD[0], WORLD[0], Fixed(3)), sequences)
    assert any(BEGUN.content_of(sequence.new_ids) for sequence in sequences), "no thinking ended"
    for sequence in sequences:
        assert len(sequence.rounds) <= -(-len(sequence.new_ids) // 4) + 1
