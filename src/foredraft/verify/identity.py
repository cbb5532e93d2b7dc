"""Token identity: every output must equal plain decoding of the same prompt alone.

At temperature 0 the tokens are a function of the prompt. Under the `coupled` rule they are a function of
prompt and seed at any temperature, so a seeded text is compared in the same way. The runs of `text_runs` are
compared with plain decoding of one prompt at a time. A divergence is reported with the target's margin
between its two most likely tokens at that position, and is a failure however small the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from foredraft.decode.params import SamplingParams
from foredraft.decode.scores import likeliest
from foredraft.llm import LLM, Output
from foredraft.verify.always import drafting_always
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.sampling_settings import Setting
from foredraft.verify.verify_records import Divergence, Identity, TextRun

__all__ = ["TextCheck", "compare_tokens", "text_runs"]


@dataclass(frozen=True, slots=True)
class TextCheck:
    """The texts of one comparison.

    Attributes:
        prompts: Token ids of each prompt.
        setting: Sampling parameters.
        seeds: A seed for each prompt; None at temperature 0.
        tokens: Maximum number of new tokens per prompt.
    """

    prompts: Sequence[list[int]]
    setting: Setting
    seeds: Sequence[int] | None
    tokens: int

    def params(self, drafter: str) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        params = SamplingParams(**self.setting.options, max_new_tokens=self.tokens, drafter=drafter)
        if self.seeds is None:
            return [params] * len(self.prompts)
        return [params.replace(seed=seed, acceptance="coupled") for seed in self.seeds]


def text_runs(drafter: str, *, chooses: bool) -> tuple[TextRun, ...]:
    """Return the runs that are compared with plain decoding of one prompt at a time.

    The drafter runs on one prompt at a time and in a batch, and plain decoding in a batch. A policy that
    drafts only where it pays may hardly draft, so under it the drafter runs again, drafting in every round.

    Args:
        drafter: Its name.
        chooses: The policy is such a policy.
    """
    always = [TextRun(drafter, batched, always=True) for batched in (False, True)]
    own = (TextRun(drafter, False), TextRun("none", True), TextRun(drafter, True))
    return (*own, *always) if chooses else own


def compare_tokens(
    llm: LLM, plain: PlainTarget, check: TextCheck, drafter: str, progress: Callable[[int, int], None]
) -> Identity:
    """Compare outputs with plain decoding's.

    Args:
        llm: The loaded models.
        plain: Computes the target's logits where an output diverges.
        check: The texts.
        drafter: Name of the drafter.
        progress: Called as (outputs done, outputs in all).
    """
    runs = text_runs(drafter, chooses=llm.loaded.engine.policy.uses_costs)
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
    at = _first_difference(want.token_ids, got.token_ids)
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


def _first_difference(expected: list[int], found: list[int]) -> int:
    """Return the first position at which the tokens differ, or the length of the shorter list."""
    shorter = min(len(expected), len(found))
    return next((i for i in range(shorter) if expected[i] != found[i]), shorter)
