"""The whole verification: which runs and tests there are, and the record of what was tested."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

import foredraft
from foredraft.decode.params import SamplingParams
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError
from foredraft.llm import LLM, Prompts
from foredraft.verify.chi_square import samples_for
from foredraft.verify.defect import without_residual
from foredraft.verify.identity import compare_tokens
from foredraft.verify.joint import POWER, WIDTHS, Law, Sampler, choose_prompts, run_test
from foredraft.verify.plain import PlainTarget
from foredraft.verify.report import LawTest, Report

__all__ = ["Options", "verify"]

Rule: TypeAlias = Literal["speculative", "coupled"]

FAMILY_LEVEL = 1e-3  # of all tests together, by Bonferroni's inequality
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
)
RULES: tuple[Rule, ...] = ("speculative", "coupled")
CONTROL_SHARE = 8  # a control gets one of so many samples: it looks at the method, and its steps are slow


@dataclass(frozen=True, slots=True)
class Options:
    """tokens: of each prompt at temperature 0, at most. samples: of each sampled test; None = as many as
    `detect`, a total variation, needs. seed: of the samples; None draws one. rule: None = both.
    self_test: plant the missing residual, which must then be found.

    Raises ConfigError that names a value out of range.
    """

    tokens: int = 32
    samples: int | None = None
    detect: float = 0.03
    seed: int | None = None
    rule: Rule | None = None
    self_test: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens is {self.tokens}; give 1 or more")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"samples is {self.samples}; give 1 or more")
        if not 0 < self.detect < 1:
            raise ConfigError(f"detect is {self.detect}; give a total variation between 0 and 1")
        if self.seed is not None and not 0 <= self.seed < 2**53:
            raise ConfigError(f"seed is {self.seed}; give a whole number from 0 to 2**53 - 1")
        if self.self_test and self.rule == "coupled":
            raise ConfigError(
                "self_test removes the residual, and acceptance='coupled' has none; leave one out"
            )

    @property
    def longest(self) -> int:
        """New tokens of the longest continuation."""
        return max(self.tokens, len(WIDTHS))


def verify(
    llm: LLM,
    prompts: Prompts,
    options: Options = Options(),
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
    encoded = [llm.fitting(ids, options.longest, truncate) for ids in encoded]
    seed = secrets.randbits(53) if options.seed is None else options.seed
    plain = PlainTarget(llm, max(map(len, encoded)) + options.longest)
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
    first = SamplingParams(**SETTINGS[0], acceptance=rules[0], speculation=drafter)
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
        law = Law(prompt, prompts[prompt], SamplingParams(**setting, acceptance=rule, speculation=name))
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
        "dtype": str(engine.cache.data.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "deterministic": llm.deterministic,
        "max_batch": engine.cache.rows,
        "threads": torch.get_num_threads(),
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
