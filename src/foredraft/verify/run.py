"""The whole verification: which runs and tests there are, and the record of what was tested."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

import foredraft
from foredraft.decode.params import SamplingParams
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError
from foredraft.llm import LLM, Prompts
from foredraft.model.device import dtype_name
from foredraft.verify.chi_square import samples_for
from foredraft.verify.defect import without_residual
from foredraft.verify.identity import compare_tokens
from foredraft.verify.joint import POWER, WIDTHS, Distribution, Sampler, choose_prompts, run_test
from foredraft.verify.options import RULES, Options
from foredraft.verify.plain import PlainTarget
from foredraft.verify.report import LawTest, Report

__all__ = ["room", "verify"]

FAMILY_LEVEL = 1e-3  # of all tests together, by Bonferroni's inequality
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
)
DEFAULTS = Options()
CONTROL_SHARE = 8  # a control gets one of so many samples: it looks at the method, and its steps are slow


def verify(
    llm: LLM,
    prompts: Prompts,
    options: Options = DEFAULTS,
    *,
    truncate: Literal["left"] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Hold `llm` with its default drafter against its target alone.

    prompts: as `LLM.generate` takes them; the tests of the sampled law choose among the first 40.
    truncate: "left" drops the oldest tokens of a prompt that is too long. progress: (stage, done, total).
    Raises ConfigError or RequestError before anything is tested, and RequestError of a target whose logits
    are not finite.
    """
    drafter = llm.default_drafter
    if drafter is None:
        raise ConfigError("nothing drafts, so there is nothing to verify; give draft=, or drafter='lookup'")
    encoded = llm.encode(prompts)
    if not all(encoded):
        raise ConfigError("a prompt is empty, or there are none; give at least one token")
    longest = room(options)
    encoded = [llm.fitting(ids, longest, truncate) for ids in encoded]
    seed = secrets.randbits(53) if options.seed is None else options.seed
    plain = PlainTarget(llm, max(map(len, encoded)) + longest)
    with without_residual(llm.engine) if options.self_test else nullcontext():
        identity = compare_tokens(
            llm, plain, encoded, drafter, options.tokens, lambda *at: progress("Temperature 0", *at)
        )
        tests = _sampled_tests(Sampler(llm, seed), plain, encoded, drafter, options, progress)
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


def room(options: Options) -> int:
    """New tokens of the longest continuation."""
    return max(options.tokens, len(WIDTHS))


def _sampled_tests(
    sampler: Sampler,
    plain: PlainTarget,
    prompts: Sequence[list[int]],
    drafter: str,
    options: Options,
    progress: Callable[[str, int, int], None],
) -> list[LawTest]:
    """Each rule at each setting, on prompts that take turns, and each setting without a drafter."""
    rules = RULES if options.rule is None else (options.rule,)
    first = SamplingParams(**SETTINGS[0], acceptance=rules[0], drafter=drafter)
    count = len(rules) * len(SETTINGS)
    chosen = choose_prompts(
        sampler, plain, prompts, first, count, lambda *at: progress("Choosing prompts", *at)
    )
    plans = [(drafter, rule, setting) for rule in rules for setting in SETTINGS]
    plans += [("none", rules[0], setting) for setting in SETTINGS]
    level = FAMILY_LEVEL / len(plans)
    tests: list[LawTest] = []
    for number, (name, rule, setting) in enumerate(plans):
        prompt = chosen[number % count % len(chosen)]  # a control has the prompt of its setting's first test
        share = CONTROL_SHARE if name == "none" else 1

        def samples(cells: int, share: int = share) -> int:
            if options.samples is not None:
                return max(1, options.samples // share)
            return -(-samples_for(options.detect, cells - 1, level, POWER) // share)

        stage = f"Sampled law {number + 1} of {len(plans)}"
        law = Distribution(prompt, prompts[prompt], SamplingParams(**setting, acceptance=rule, drafter=name))
        tests.append(
            run_test(
                sampler,
                plain,
                law,
                level=level,
                samples=samples,
                progress=lambda done, total, stage=stage: progress(stage, done, total),  # type: ignore[misc]
            )
        )
    return tests


def _about(llm: LLM, drafter: str) -> dict[str, Any]:
    engine = llm.engine
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
