"""Siblings of drafted tokens: the text of plain decoding, the law of every rule, and a token more where one is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, kernels
from foredraft.decode.constraint import Constraint
from foredraft.decode.policy import Auto, Confidence, Fixed, Policy
from foredraft.decode.sequence import Finish, Origin, Sequence
from tests.exactness import test_bits as bits
from tests.exactness import test_coupled as coupled
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_identity as identity
from tests.support.forking import Case, outputs_of
from tests.support.harness import DRAFTERS, make_engine, request, run
from tests.support.loaded import engine_of
from tests.support.parts import LateBan, NoRepeat, RandomBudgets, StopUnsure
from tests.support.simulation import flat
from tests.support.tabular import Table, Tabular

V = identity.V
# drafters that give logits, so that their drafts have siblings
STEPPERS = ("draft-model", "looping", "tapping", "mapped", "layer-skip", "early-exit", "low-bit")
SHAPES = [Fixed(1, siblings=1), Fixed(3, siblings=2), Fixed(3, siblings=5), Fixed(2, siblings=8)]


def written(sequences: list[Sequence]) -> int:
    """Return how many siblings were written."""
    return sum(turn.sibling for sequence in sequences for turn in sequence.rounds)


def shape_of(policy: Fixed) -> str:
    return f"{policy.max_draft}+{policy.siblings}"


@pytest.mark.parametrize("policy", SHAPES, ids=shape_of)
@pytest.mark.parametrize("rows", [1, 8])
def test_tokens_are_those_of_plain_decoding(policy: Fixed, rows: int) -> None:
    """Rows of all drafters share a batch, those whose drafts have no siblings among them."""
    sequences = [identity.greedy(prompt, drafter) for drafter in DRAFTERS for prompt in identity.PROMPTS]
    engine = make_engine(identity.TARGET, identity.DRAFT, policy, rows=rows)
    assert run(engine, sequences) == [identity.reference(s.prompt) for s in sequences]
    for drafter in STEPPERS:
        assert written([s for s in sequences if drafter in s.drafters])
    assert not written([s for s in sequences if not set(STEPPERS) & set(s.drafters)])


def test_a_policy_that_compares_costs_takes_siblings() -> None:
    """Where rows cost next to nothing; and texts that may have none say what they would."""
    engine = make_engine(identity.TARGET, identity.DRAFT, Auto(4, flat(0.1, drafters=STEPPERS)), rows=8)
    sequences = [identity.greedy(prompt, "draft-model") for prompt in identity.PROMPTS * 4]
    assert run(engine, sequences) == [identity.reference(s.prompt) for s in sequences]
    assert written(sequences)
    sampled = [coupled.requests("draft-model"), coupled.requests(None)]
    engine = make_engine(coupled.TARGET, coupled.DRAFT, Auto(4, flat(0.1, drafters=STEPPERS)), rows=5)
    assert run(engine, sampled[0]) == run(make_engine(coupled.TARGET, rows=1), sampled[1])


def test_a_round_with_a_sibling_emits_one_token_more() -> None:
    sequences = [identity.greedy(prompt, "draft-model") for prompt in identity.PROMPTS]
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4)), sequences)
    for sequence in sequences:
        at = 0
        for turn in sequence.rounds:
            if turn.sibling:
                assert turn.emitted == turn.accepted + 2 or sequence.finish is Finish.LENGTH
                origins = sequence.origins[at + turn.accepted : at + turn.emitted]
                assert origins == [Origin.DRAFTER, Origin.BONUS][: len(origins)]
            else:
                assert turn.emitted <= turn.accepted + 1
            at += turn.emitted


@pytest.mark.parametrize("place", range(9))
def test_the_text_may_end_with_a_sibling_or_after_it(place: int) -> None:
    for prompt in identity.PROMPTS:
        whole = identity.reference(prompt)
        want = whole[: whole.index(whole[place]) + 1]
        ended = [identity.greedy(prompt, drafter, eos=frozenset({whole[place]})) for drafter in STEPPERS]
        cut = [identity.greedy(prompt, drafter, max_new_tokens=place + 1) for drafter in STEPPERS]
        for sequences, text in ((ended, want), (cut, whole[: place + 1])):
            engine = make_engine(identity.TARGET, identity.DRAFT, Fixed(2, siblings=6), rows=8)
            assert run(engine, sequences) == [text] * len(sequences)
            assert all(sum(turn.emitted for turn in s.rounds) == len(text) for s in sequences)


@pytest.mark.parametrize("policy", SHAPES, ids=shape_of)
@pytest.mark.parametrize("drafter", STEPPERS)
def test_the_coupled_text_is_a_function_of_the_seed(drafter: str, policy: Fixed) -> None:
    wishes, alone = coupled.requests(drafter), coupled.requests(None)
    plain = run(make_engine(coupled.TARGET, rows=1), alone)
    assert run(make_engine(coupled.TARGET, coupled.DRAFT, policy, rows=5), wishes) == plain
    assert written(wishes)


def test_rows_of_another_rule_do_not_change_the_coupled_text() -> None:
    wishes, alone = coupled.requests("draft-model"), coupled.requests(None)
    others = [
        request((1, 2), drafter, acceptance=rule, max_new_tokens=8)
        for drafter in STEPPERS
        for rule in ("speculative", "block")
    ]
    mixed = [s for pair in zip(wishes, others * 3, strict=False) for s in pair]
    mixed += wishes[len(mixed) // 2 :]
    run(make_engine(coupled.TARGET, coupled.DRAFT, Fixed(3, siblings=4), rows=6), [*dict.fromkeys(mixed)])
    assert [s.new_ids for s in wishes] == run(make_engine(coupled.TARGET, rows=1), alone)


def test_scores_are_those_of_plain_decoding() -> None:
    """Of greedy and of coupled rows, with alternatives; a token after a sibling has those of the sibling's row."""

    def wishes(drafter: str | None) -> list[Sequence]:
        several = [{"temperature": 0}, {"seed": 3, "acceptance": "coupled", "top_p": 0.9, "temperature": 0.8}]
        return [
            request(prompt, drafter, logprobs=2, max_new_tokens=12, **more)
            for prompt in identity.PROMPTS
            for more in several
        ]

    plain, combs = wishes(None), wishes("draft-model")
    run(make_engine(identity.TARGET, rows=1), plain)
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4), rows=5), combs)
    assert written(combs)
    assert [s.scores for s in combs] == [s.scores for s in plain]


RULES = ("speculative", "block", "bild")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("siblings", [1, 3])
def test_the_law_of_every_rule(rule: str, siblings: int) -> None:
    """The lossy rule drafts chains, so its law is its own without siblings."""
    params = SamplingParams(max_new_tokens=3, acceptance=rule, rollback=0.7 if rule == "bild" else None)
    cases = [Case(d, params, drafters=(d,)) for d in ("draft-model", "tapping", "early-exit")]
    target, draft = enumeration.WORLDS["plain"]

    def found(policy: Fixed) -> Any:
        return outputs_of(lambda noise: make_engine(target, draft, policy, rows=48, noise=noise), cases)

    got = found(Fixed(2, siblings=siblings))
    chains = found(Fixed(2)) if rule == "bild" else None
    for at, one in enumerate(cases):
        law = enumeration.law_of(one, target.after) if chains is None else chains[at].distribution
        enumeration.assert_law(one.name, got[at], law)


@pytest.mark.parametrize(
    "transform",
    ["cold top-k", "hot top-p", "bias", "repetition", "presence", "frequency", "late end", "greedy"],
)
def test_the_law_under_transforms(transform: str) -> None:
    """A sibling's row has the penalties of its own text."""
    end = frozenset({2})
    cases = [enumeration.case(transform, drafter, eos=end) for drafter in ("draft-model", "low-bit")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2, siblings=2))


@pytest.mark.parametrize("policy", [StopUnsure(3, least=0.98), Confidence(3, 0.98), RandomBudgets(3)])
@pytest.mark.parametrize("rows", [1, 24])
def test_the_law_of_drafts_that_end_early(policy: Policy, rows: int) -> None:
    """No sibling lies beyond the end of a draft, though other drafts of the batch go on."""
    several = replace(policy)  # type: ignore[type-var]
    object.__setattr__(several, "siblings", 2)  # some policies are frozen
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, lambda: several, rows=rows)


@pytest.mark.parametrize("world", ["impossible tokens", "ties"])
def test_the_law_with_ties_and_impossible_tokens(world: str) -> None:
    cases = [enumeration.case(t, "draft-model") for t in ("as it is", "top-k", "greedy")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2, siblings=3), world)


@pytest.mark.parametrize("constraint", ["no repeat", "late ban"])
def test_constraints_keep_the_output(constraint: str) -> None:
    cases = [enumeration.case(t, "draft-model", constraint) for t in ("as it is", "greedy")]
    cases += [enumeration.case("as it is", "tapping")]  # a free row beside them
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2, siblings=2))


class DeadAfter(NoRepeat):
    """No token may follow some token, and none follows itself."""

    def __init__(self, token: int) -> None:
        super().__init__(V)
        self.token = token

    def mask(self) -> torch.Tensor | None:
        mask = super().mask()
        return mask if mask is None or self.tokens[-1] != self.token else torch.zeros_like(mask)


@pytest.mark.parametrize("token", range(V))
def test_constrained_texts_are_those_of_plain_decoding(token: int) -> None:
    """Their siblings are written too, and no text goes on where nothing may follow."""

    def requests(drafter: str | None) -> list[Sequence]:
        kinds: list[Callable[[], Constraint]] = [
            lambda: NoRepeat(V), lambda: DeadAfter(token), lambda: LateBan(V, (token, (token + 1) % V)),
        ]  # fmt: skip
        rules: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3, "acceptance": "coupled"}]
        return [
            request(prompt, drafter, constraint=kind(), max_new_tokens=20, **rule)
            for prompt in identity.PROMPTS
            for rule in rules
            for kind in kinds
        ]

    plain, combs = requests(None), requests("draft-model")
    run(make_engine(identity.TARGET, rows=8), plain)
    run(make_engine(identity.TARGET, identity.DRAFT, Fixed(3, siblings=4), rows=8), combs)
    assert [(s.new_ids, s.finish) for s in combs] == [(s.new_ids, s.finish) for s in plain]
    assert written(combs)


def test_a_sibling_that_makes_the_target_fail_harms_no_text() -> None:
    """The target gives NaN to whatever follows token 4, which is often a sibling, and no text has it."""
    table = Table(V, 41)
    table.logits[..., 4] = -50.0
    prompts = [prompt for prompt in identity.PROMPTS if 4 not in prompt]
    sequences = [identity.greedy(prompt, "draft-model") for prompt in prompts]
    model = Tabular(table, venom=4)
    engine = make_engine(model, Table(V, 42), Fixed(2, siblings=6))
    assert run(engine, sequences) == [identity.reference(s.prompt, target=table) for s in sequences]
    assert written(sequences)


# --- real models ----------------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma2", "gemma4", "qwen3", "phi")
needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, draft = bits.save_pair(tmp_path_factory.mktemp(request.param), request.param)
    return foredraft.load(
        target, draft=draft, draft_weights="int4", plan="skip:attn=1/mlp=1", dtype="bfloat16", device="cpu",
        max_batch=8, max_length=512, policy="fixed", drafter="draft-model",
    )  # fmt: skip


@needs_kernels
def test_greedy_and_seeded_ids_of_real_models(llm: LLM) -> None:
    """Alone and in a batch of all drafters, whose rows have combs and chains."""
    kinds = ("draft-model", "low-bit", "layer-skip", "lookup", "none")
    for more in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9, "acceptance": "coupled"}):
        params = SamplingParams(max_new_tokens=48, ignore_eos=True, **more)  # type: ignore[arg-type]
        engine_of(llm).policy = Fixed(3, siblings=4)
        plain = [llm.generate([p], replace(params, drafter="none"))[0].token_ids for p in bits.PROMPTS]
        for shift in range(3):
            mixed = [kinds[(at + shift) % len(kinds)] for at in range(len(bits.PROMPTS))]
            bits.assert_same(llm, mixed, plain, params=params)
        for kind in kinds[:3]:
            bits.assert_same(llm, [kind], plain[4:5], bits.PROMPTS[4:5], params)


@needs_kernels
@pytest.mark.parametrize("prompt", [bits.PROMPTS[1], bits.PROMPTS[4], bits.PROMPTS[7]], ids=len)
def test_the_cache_after_siblings(llm: LLM, prompt: list[int]) -> None:
    """The very bits that plain decoding leaves behind, at the places of siblings too."""
    engine_of(llm).policy = Fixed(4, siblings=6)
    count = 40
    length = len(prompt) + count - 1
    for sequence in bits.steps_of(llm, prompt, "draft-model", count):
        tokens, cached = list(sequence.tokens), bits.row_of(llm, sequence, length)
        assert written([sequence])
    for sequence in bits.steps_of(llm, prompt, None, count):
        assert sequence.tokens[: length + 1] == tokens[: length + 1]
        assert torch.equal(bits.row_of(llm, sequence, length), cached)


def test_operators_take_no_siblings(tmp_path: Path) -> None:
    target, draft = bits.save_pair(tmp_path, "llama")
    options: dict[str, Any] = {"draft": draft, "dtype": "float32", "device": "cpu", "kernels": False}
    with pytest.raises(foredraft.ConfigError, match="siblings"):
        foredraft.load(target, policy="fixed", policy_options={"siblings": 2}, **options)
    llm = foredraft.load(target, policy="fixed", **options)
    engine_of(llm).policy = Fixed(3, siblings=2)
    [output] = llm.generate([bits.PROMPTS[4]], replace(bits.GREEDY, drafter="draft-model"))
    plain = llm.generate([bits.PROMPTS[4]], replace(bits.GREEDY, drafter="none"))[0]
    assert output.token_ids == plain.token_ids
    assert output.stats.drafted
