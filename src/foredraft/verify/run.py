"""The whole verification: runs every check and returns the report."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

import foredraft
from foredraft.decode.params import SamplingParams
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError
from foredraft.llm import LLM, Prompts
from foredraft.model.device import dtype_name
from foredraft.verify.chi_square import samples_needed
from foredraft.verify.defect import without_residual
from foredraft.verify.distribution_tests import (
    POWER,
    WIDTHS,
    Sampler,
    SamplingCase,
    choose_prompts,
    run_test,
)
from foredraft.verify.identity import compare_tokens
from foredraft.verify.options import RULES, Options, no_drafter
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.report import DistributionTest, Report

__all__ = ["max_new_tokens", "verify"]

# Probability that any of the chi-square tests rejects a lossless set-up. Each test gets an equal share of
# it, by Bonferroni's inequality.
FAMILY_LEVEL = 1e-3
# Sampling parameters that are tested: the full distribution, and a truncated one.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
)
DEFAULTS = Options()
# A control has 1 / CONTROL_SHARE of the drafter's samples: it checks the method, and plain steps are slow.
CONTROL_SHARE = 8


def verify(
    llm: LLM,
    prompts: Prompts,
    options: Options = DEFAULTS,
    *,
    truncate: Literal["left"] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Compare `llm` with its default drafter against plain decoding of its target.

    Two things are checked. At temperature 0, the new tokens of every prompt must be those of plain decoding
    of that prompt alone: with the drafter on one prompt at a time, plainly in a batch, and with the drafter
    in a batch. At temperatures above 0, samples of three tokens must follow the target's exact joint
    distribution, by chi-square tests under each lossless acceptance rule and two settings; the same tests
    of plain decoding are the controls.

    Args:
        llm: The loaded models. The default drafter is verified.
        prompts: Prompts as `LLM.generate` takes them. The chi-square tests choose among the first 40.
        options: Options of the verification.
        truncate: "left" drops the oldest tokens of a prompt that is too long.
        progress: Called as (stage, done, total).

    Raises:
        ConfigError: There is no drafter, or a prompt is empty.
        RequestError: A prompt does not fit or is invalid, or the target's logits are not finite.
    """
    drafter = llm.default_drafter
    if drafter is None:
        raise no_drafter()
    encoded = llm.encode(prompts)
    if not all(encoded):
        raise ConfigError("a prompt is empty, or there are none", remedy="give at least one token")
    new_tokens = max_new_tokens(options)
    encoded = [llm._fitting(ids, new_tokens, truncate) for ids in encoded]
    seed = secrets.randbits(53) if options.seed is None else options.seed
    plain = PlainTarget(llm, max(map(len, encoded)) + new_tokens)
    with without_residual(llm._engine) if options.self_test else nullcontext():
        identity = compare_tokens(
            llm, plain, encoded, drafter, options.tokens, partial(progress, "Temperature 0")
        )
        tests = _run_tests(Sampler(llm, seed), plain, encoded, drafter, options, progress)
    return Report(
        about=_about(llm, drafter),
        seed=seed,
        identity=identity,
        tests=tuple(tests),
        detect=options.detect,
        power=POWER,
        family_level=FAMILY_LEVEL,
        planted="no residual" if options.self_test else None,
    )


def max_new_tokens(options: Options) -> int:
    """Return the new tokens of the longest continuation that a verification generates."""
    return max(options.tokens, len(WIDTHS))


def _run_tests(
    sampler: Sampler,
    plain: PlainTarget,
    prompts: Sequence[list[int]],
    drafter: str,
    options: Options,
    progress: Callable[[str, int, int], None],
) -> list[DistributionTest]:
    """Run a test for each rule and setting on prompts that take turns, and a control for each setting."""
    rules = RULES if options.acceptance is None else (options.acceptance,)
    drafted = [
        SamplingParams(**setting, acceptance=rule, drafter=drafter) for rule in rules for setting in SETTINGS
    ]
    controls = [replace(params, drafter="none") for params in drafted[: len(SETTINGS)]]
    chosen = choose_prompts(
        sampler, plain, prompts, drafted[0], len(drafted), partial(progress, "Choosing prompts")
    )
    total = len(drafted) + len(controls)
    level = FAMILY_LEVEL / total
    tests: list[DistributionTest] = []
    for number, params in enumerate([*drafted, *controls]):
        # A control has the prompt of the first test of its setting.
        prompt = chosen[number % len(drafted) % len(chosen)]
        tests.append(
            run_test(
                sampler,
                plain,
                SamplingCase(prompt, prompts[prompt], params),
                level=level,
                sample_count=partial(_sample_count, options, level, params.drafter == "none"),
                progress=partial(progress, f"Chi-square test {number + 1} of {total}"),
            )
        )
    return tests


def _sample_count(options: Options, level: float, is_control: bool, cells: int) -> int:
    share = CONTROL_SHARE if is_control else 1
    if options.samples is not None:
        return max(1, options.samples // share)
    return -(-samples_needed(options.detect, cells - 1, level, POWER) // share)


def _about(llm: LLM, drafter: str) -> dict[str, Any]:
    """Return what is tested, and on which machine."""
    engine = llm._engine
    drafting = engine.drafters[drafter]
    return {
        "drafter": drafter,
        "plan": str(drafting.skips) if isinstance(drafting, LayerSkip) else None,
        "policy": engine.policy.name,
        "greedy_drafts": engine.greedy_drafts,
        "dtype": dtype_name(engine.cache.dtype),
        "device": str(engine.device),
        "deterministic": llm.deterministic,
        "max_batch": engine.cache.rows,
        "threads": torch.get_num_threads(),
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
