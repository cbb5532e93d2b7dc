"""What a verification runs: the target alone, the sampler of continuations, and engines with planted defects.

`PlainTarget` has a cache of its own, and no drafter, acceptance rule or batch. For the samples of a stand-in,
the engine gets one drafter more: the target itself. At temperature 0 the tokens are a function of the prompt,
under the `coupled` rule of prompt and seed. A divergence is reported with the target's margin between its two
most likely tokens there, and fails however small it is.

The decisions of `auto` never change the distribution of a text, so under `drafting_always` all drafters that
it may choose take turns. Every greedy test without penalties passes with the planted defects, and so does
every test whose drafter is the target: a verification that cannot find them proves nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.settings import DEFECTS, Setting
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter
from foredraft.decode.engine import Engine
from foredraft.decode.noise import RESIDUAL, DrawKeys, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import PLAIN, Candidates, Decision, Policy
from foredraft.decode.round_draft import AcceptResult, Draft, RoundInputs
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.decode.scores import likeliest
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.plan_files import Skips
from foredraft.errors import RequestError
from foredraft.llm import LLM, Output
from foredraft.llm.loaded import Loaded
from foredraft.model.memory import release_freed, upload
from foredraft.model.runner import next_chunk
from foredraft.profiling.timing import replaced
from foredraft.verify.chi_square import NextToken
from foredraft.verify.verify_records import Divergence, Identity, TextRun


class DraftsAlways(Policy):
    """Drafts in every round that has a candidate; the candidates of a row take turns."""

    uses_costs = True  # so a request may have several drafters, which read and propose as under `auto`

    def __init__(self, loaded: Policy) -> None:
        self.name, self.max_draft = loaded.name, loaded.max_draft

    def decide(self, rows: Sequence[Candidates]) -> list[Decision]:
        decisions = []
        for row in rows:
            # Samples of a prompt begin with different drafters, so that each meets every position of a text.
            turn, names = row.sequence.sample + row.sequence.round_count, list(row.limits)
            name = names[turn % len(names)] if names else ""
            decisions.append(Decision(name, min(self.max_draft, row.limits[name])) if names else PLAIN)
        return decisions


@contextmanager
def drafting_always(engine: Engine) -> Iterator[None]:
    """Let every round draft within the context, under policies that else would only where it pays."""
    loaded = engine.policy
    with replaced(engine, "policy", DraftsAlways(loaded) if loaded.uses_costs else loaded):
        yield


@contextmanager
def planted(engine: Engine, name: str | None) -> Iterator[None]:
    """Plant a defect in the rounds of this engine within the context."""
    if name is None:
        yield
        return
    point, mutate = _INJECTION_POINTS[name]
    with replaced(engine, point, mutate(getattr(engine, point))):
        yield


def _mutated_corrections(
    accept: Callable[..., AcceptResult], correction: Callable[[Draft, Distribution, Tensor], Distribution]
) -> Callable[..., AcceptResult]:
    """Return an acceptance rule that draws the token after the accepted ones once more, from `correction`.

    Rows under the `coupled` rule are unchanged: that rule has no residual.
    """

    def defective(
        draft: Draft,
        p: Distribution,
        keys: DrawKeys | None,
        noise: Noise,
        rules: list[str],
        *others: Any,
    ) -> AcceptResult:
        verdict = accept(draft, p, keys, noise, rules, *others)
        if not draft.tokens.shape[1]:
            return verdict

        def pick(weights: Tensor) -> Tensor:
            assert keys is not None
            return noise.pick(weights, keys.columns(verdict.accepted), RESIDUAL)

        drawn = correction(draft, p, verdict.accepted).draw(pick)[:, 0]
        unchanged = upload([rule == "coupled" for rule in rules], drawn.device)
        return replace(verdict, next_token=torch.where(unchanged, verdict.next_token, drawn))

    return defective


def _residual_of_the_position_before(draft: Draft, p: Distribution, accepted: Tensor) -> Distribution:
    q = draft.q.position((accepted - 1).clamp_min(0))
    return p.position(accepted).minus(q, accepted < draft.lengths)


class _SharedCoin(Noise):
    """Noise whose coins are those of the first position."""

    def __init__(self, sound: Noise) -> None:
        self._sound, self.uses_gumbel_argmax = sound, sound.uses_gumbel_argmax

    def coin(self, keys: DrawKeys, purpose: int) -> Tensor:
        coins = self._sound.coin(keys, purpose)
        return coins[:, :1].expand_as(coins)

    def pick(self, weights: Tensor, keys: DrawKeys, purpose: int) -> Tensor:
        return self._sound.pick(weights, keys, purpose)


class _RoundKeys(NoiseKeys):
    """Keys that hold the round for every purpose."""

    def _hash(self, purpose: int) -> Tensor:
        return self.vocab_ops.hash_keys(self.base, self.round, self.position, self.attempt, purpose)


class _KeyedByRound(RoundInputs):
    @cached_property
    def noise(self) -> NoiseKeys:
        sound = super().noise
        return _RoundKeys(
            sound.base, sound.position, sound.attempt, sound.round, sound.vocab_ops, sound.coupled
        )


class _CommittedContext(PenaltyContext):
    """A context that every column of a pass shares: that of the committed tokens."""

    __slots__ = ()

    def along(self, drafted: Tensor, ahead: int | Tensor = 0) -> PenaltyContext:
        return self


class _PenaltiesNotAlong(RoundInputs):
    @cached_property
    def penalty_context(self) -> PenaltyContext | None:
        sound = super().penalty_context
        if sound is None or sound.ids is None:
            return sound
        return _CommittedContext(**{each.name: getattr(sound, each.name) for each in fields(sound)})


# Name of a defect -> the engine's attribute that it replaces, and a function from the sound attribute to the
# defective one.
_INJECTION_POINTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "residual": (
        "accept",
        lambda sound: _mutated_corrections(sound, lambda draft, p, accepted: p.position(accepted)),
    ),
    "position": ("accept", lambda sound: _mutated_corrections(sound, _residual_of_the_position_before)),
    "coin": ("noise", _SharedCoin),
    "round-noise": ("round_inputs", lambda sound: _KeyedByRound),
    "penalties": ("round_inputs", lambda sound: _PenaltiesNotAlong),
}
assert _INJECTION_POINTS.keys() == DEFECTS.keys()


class PlainTarget:
    """Computes the target's logits after a prompt and a continuation."""

    def __init__(self, loaded: Loaded, positions: int) -> None:
        self.runner = loaded.runner
        self.cache = loaded.runner.new_cache(1, positions)
        self._prompt: list[int] = []
        self._cached: list[int] = []  # the tokens whose keys and values the cache holds

    def logits(self, prompt: list[int], new: list[int]) -> Tensor:
        """Return the logits of the token after prompt + new, [V] float32."""
        if prompt != self._prompt:
            start, stop = 0, len(prompt) - 1  # the last token stays pending
            while start < stop:
                end = next_chunk(start, stop, self.runner.chunk)
                self.runner.prefill(self.cache, 0, prompt[start:end], start)
                start = end
            self._prompt, self._cached = prompt, prompt[:-1]
        tokens = [*prompt, *new]
        start = len(prompt) - 1
        while start < min(len(self._cached), len(tokens) - 1) and self._cached[start] == tokens[start]:
            start += 1
        logits = None
        for position in range(start, len(tokens)):
            token = torch.tensor([[tokens[position]]])
            logits = self.runner.forward(self.cache, token, [position]).logits
        self._cached = tokens
        assert logits is not None
        return logits[0, 0]

    def next_token(self, prompt: list[int], params: SamplingParams) -> NextToken:
        """Return prefix of the output -> the next token's distribution, after all sampling transforms."""

        def distribution(prefix: tuple[int, ...]) -> Tensor:
            logits = self.logits(prompt, list(prefix))
            # As plain decoding has it: the output so far is committed, and there is no draft.
            context = PenaltyContext.after(prompt, list(prefix), logits.device) if params.penalised else None
            transformed, finite = distribution_of(
                logits[None, None], SamplingTable.of([params], logits.device), None, context
            )
            if not finite.item():
                problem = "the target's logits are not finite, so there is no distribution to sample from"
                raise RequestError(problem, remedy="give another model or dtype")
            weights = transformed.dense(logits.shape[0])[0, 0].to("cpu", torch.float64)
            return weights / weights.sum()

        return distribution


# Separate tokens at each position of a sample (`cells`). More cells need more samples: these widths make 9
# cells; two tokens at each position make 31, and need 1.5 times the samples for the same distance. Four
# tokens leave room for drafts of three, and so for corrections at a second and a third position.
WIDTHS = (2, 1, 1, 1)
# The same for tests by draft position, which compare tokens given the text before them. They tell more texts
# apart, so that more of the tokens at later positions count.
TREE_WIDTHS = (3, 2, 1, 1)
TARGET = "target"  # name of the target as its own drafter
BATCH = 128  # samples per `generate` call: its memory is freed, and the seed changes, between calls


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """The samples of one test: a prompt, sampling parameters, and how the drafter is changed."""

    number: int  # number of the prompt
    prompt: list[int]  # token ids of the prompt
    params: SamplingParams  # sampling parameters, drafter and acceptance rule included
    draft_temperature: float = 1.0  # divides the drafter's logits; less than 1 sharpens q


class Sampler:
    """Draws continuations of `len(WIDTHS)` tokens."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm  # the loaded models
        self._seeds: Iterator[int] = itertools.count(seed)
        self._drawn, self._seconds = 0, 0.0

    @property
    def seconds_per_sample(self) -> float:
        """Mean time of the samples that were drawn so far."""
        return self._seconds / max(1, self._drawn)

    def next_seed(self) -> int:
        """Return a seed that no other call takes."""
        return next(self._seeds)

    def draws(self, params: SamplingParams) -> bool:
        """Return whether a drafter of these samples draws from a q, which a draft temperature changes."""
        engine = self.llm.loaded.engine
        if engine.greedy_drafts:
            return False
        if params.drafter == TARGET:
            return True
        return any(
            isinstance(engine.drafters[name], AutoregressiveDrafter)
            for name in self.llm.requests.drafters(params)
        )

    def draw(self, case: SamplingCase, count: int, *, trace: bool = False) -> Iterator[list[Output]]:
        """Yield `count` samples, up to `BATCH` at a time; `trace` records their rounds."""
        while count > 0:
            size = min(count, BATCH)
            params = replace(case.params, max_new_tokens=len(WIDTHS), seed=self.next_seed(), ignore_eos=True)
            engine, drafters = self.llm.loaded.engine, dict(self.llm.loaded.engine.drafters)
            if params.drafter == TARGET:  # only then: "auto" stands for all drafters that the engine has
                drafters[TARGET] = LayerSkip(self.llm.loaded.runner, engine.cache, Skips())
            changed = replaced(engine, "draft_temperature", case.draft_temperature)
            start = time.perf_counter()
            with changed, replaced(engine, "drafters", drafters):
                outputs = self.llm.generate([case.prompt], params, n=size, trace=trace)
            self._drawn, self._seconds = self._drawn + size, self._seconds + time.perf_counter() - start
            yield outputs
            release_freed()
            count -= size


@dataclass(frozen=True, slots=True)
class TextCheck:
    """The texts of one comparison."""

    prompts: Sequence[list[int]]  # token ids of each prompt
    setting: Setting  # sampling parameters
    seeds: Sequence[int] | None  # a seed for each prompt; None at temperature 0
    tokens: int  # maximum number of new tokens per prompt

    def params(self, drafter: str) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        params = SamplingParams(**self.setting.options, max_new_tokens=self.tokens, drafter=drafter)
        if self.seeds is None:
            return [params] * len(self.prompts)
        return [params.replace(seed=seed, acceptance="coupled") for seed in self.seeds]


def compare_tokens(
    llm: LLM, plain: PlainTarget, check: TextCheck, drafter: str, progress: Callable[[int, int], None]
) -> Identity:
    """Compare outputs with plain decoding's of one prompt at a time."""
    runs: tuple[TextRun, ...] = (TextRun(drafter, False), TextRun("none", True), TextRun(drafter, True))
    if llm.loaded.engine.policy.uses_costs:  # it may hardly draft, so the drafter runs again in every round
        runs += (TextRun(drafter, False, always=True), TextRun(drafter, True, always=True))
    done, total = 0, len(check.prompts) * (1 + len(runs))

    def generate(run: TextRun) -> list[Output]:
        nonlocal done
        requests = list(zip(check.prompts, check.params(run.drafter), strict=True))
        outputs: list[Output] = []
        for group in [requests] if run.batched else [[request] for request in requests]:
            # A single prompt runs beside a copy of itself, so that the batch has two rows.
            rows = [*group, *group] if run.batched and len(group) == 1 else group
            outputs += llm.generate([prompt for prompt, _ in rows], [own for _, own in rows])[: len(group)]
            done += len(group)
            progress(done, total)
        return outputs

    expected = generate(TextRun("none", False))
    divergences: list[Divergence] = []
    errors = [f"prompt {i}: {output.error}" for i, output in enumerate(expected) if output.error]
    drafted = 0
    for run in runs:
        with drafting_always(llm.loaded.engine) if run.always else nullcontext():
            outputs = generate(run)
        for i, (want, got) in enumerate(zip(expected, outputs, strict=True)):
            drafted += got.stats.drafted
            if got.error:
                errors.append(f"prompt {i}, {run.drafter}: {got.error}")
            elif not want.error and got.token_ids != want.token_ids:
                divergences.append(_divergence(plain, check, i, run, want, got))
    return Identity(
        setting=check.setting,
        acceptance=None if check.seeds is None else "coupled",
        prompts=len(check.prompts),
        tokens=sum(len(output.token_ids) for output in expected),
        runs=runs,
        drafted=drafted,
        divergences=tuple(divergences),
        errors=tuple(errors),
    )


def _divergence(
    plain: PlainTarget, check: TextCheck, i: int, run: TextRun, want: Output, got: Output
) -> Divergence:
    """Return the first difference of a run's output of prompt `i` from the expected one."""
    pairs = enumerate(zip(want.token_ids, got.token_ids, strict=False))
    ends = min(len(want.token_ids), len(got.token_ids))
    at = next((i for i, (one, other) in pairs if one != other), ends)
    logits = plain.logits(check.prompts[i], want.token_ids[:at])
    first, second = likeliest(logits, 2).tolist()
    return Divergence(
        prompt=i,
        run=run,
        seed=None if check.seeds is None else check.seeds[i],
        position=at,
        expected=want.token_ids[at] if at < len(want.token_ids) else None,
        found=got.token_ids[at] if at < len(got.token_ids) else None,
        best=(first, second),
        logits=(float(logits[first]), float(logits[second])),
    )
