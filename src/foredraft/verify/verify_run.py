"""The whole verification: runs every check and returns the report."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

import foredraft
from foredraft.bench.settings import (
    DISTANCES,
    GREEDY,
    GREEDY_PENALISED,
    PENALISED,
    SETTINGS,
    VerifySettings,
    no_drafter,
)
from foredraft.decode.params import SamplingParams
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError
from foredraft.llm import LLM, Prompts
from foredraft.model.memory import collect_the_new, dtype_name
from foredraft.verify.chi_square import most_cells, samples_needed
from foredraft.verify.distribution_tests import (
    POWER,
    DistributionCheck,
    choose_cases,
    choose_stand_in,
    run_test,
)
from foredraft.verify.sampler import (
    WIDTHS,
    PlainTarget,
    Sampler,
    SamplingCase,
    TextCheck,
    compare_tokens,
    drafting_always,
    planted,
)
from foredraft.verify.verify_records import DistributionTest, Identity, VerifyReport

FAMILY_LEVEL = 1e-3  # of all chi-square tests together; each has an equal share (Bonferroni)
DEFAULTS = VerifySettings()
# Tests that are not full have 1 / REDUCED_SHARE of the samples. Controls check the method, and plain steps
# are slow. Under `coupled`, texts are compared token for token with plain decoding's, which finds far smaller
# differences.
REDUCED_SHARE = 16
SECONDS = 180.0  # of all chi-square tests, where the user does not say which distance they must detect
TEXTS = 8  # prompts of each comparison of texts beside the first one, which takes all of them


def verify(
    llm: LLM,
    prompts: Prompts,
    options: VerifySettings = DEFAULTS,
    *,
    truncate: Literal["left"] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> VerifyReport:
    """Compare `llm` with its default drafter against plain decoding of its target.

    New tokens at temperature 0, and under `coupled` with a seed, must be those of plain decoding of the
    prompt alone. At temperatures above 0, samples of four tokens must follow the target's exact joint
    distribution, by chi-square tests under each lossless rule and three settings, and under `speculative` the
    tokens of each draft position too. Under a policy that drafts only where it pays, every drafter also
    drafts in turn.
    """
    drafter = llm.default_drafter
    if drafter is None:
        raise no_drafter()
    encoded = llm.encode(prompts)
    if not encoded or not all(encoded):
        raise ConfigError("a prompt is empty, or there are none", remedy="give at least one token")
    new_tokens = max_new_tokens(options)
    encoded = [llm.requests.truncated(ids, new_tokens, truncate) for ids in encoded]
    seed = secrets.randbits(53) if options.seed is None else options.seed
    plain = PlainTarget(llm.loaded, max(map(len, encoded)) + new_tokens)
    task = _Task(Sampler(llm, seed), plain, encoded, drafter, options, progress)
    with collect_the_new(), planted(llm.loaded.engine, options.self_test):
        identities = _compare_texts(task)
        with drafting_always(llm.loaded.engine):
            tests, detect = _run_tests(task)
    return VerifyReport(
        about=_about(llm, drafter),
        seed=seed,
        identities=tuple(identities),
        tests=tuple(tests),
        detect=detect,
        power=POWER,
        family_level=FAMILY_LEVEL,
        planted=options.self_test,
    )


def max_new_tokens(options: VerifySettings) -> int:
    """Return the new tokens of the longest continuation that a verification generates."""
    return max(options.tokens, len(WIDTHS))


@dataclass(frozen=True, slots=True)
class _Task:
    """What all checks of a verification share."""

    sampler: Sampler  # decodes with the drafter
    plain: PlainTarget  # the target's exact distributions, and plain decoding
    prompts: Sequence[list[int]]  # as token ids
    drafter: str  # the drafter that is verified
    options: VerifySettings  # options of the verification
    progress: Callable[[str, int, int], None]  # called as (stage, done, total)


def _compare_texts(task: _Task) -> list[Identity]:
    """Compare texts token for token: greedy ones, and seeded ones where the `coupled` rule is tested."""
    prompts, tokens = task.prompts, task.options.tokens
    few = prompts[:TEXTS]
    checks = [TextCheck(prompts, GREEDY, None, tokens), TextCheck(few, GREEDY_PENALISED, None, tokens)]
    if "coupled" in task.options.rules:
        for setting in (SETTINGS[0], PENALISED):
            checks.append(TextCheck(few, setting, [task.sampler.next_seed() for _ in few], tokens))
    found = []
    for number, check in enumerate(checks, start=1):
        progress = partial(task.progress, f"Texts {number} of {len(checks)}")
        found.append(compare_tokens(task.sampler.llm, task.plain, check, task.drafter, progress))
    return found


def _run_tests(task: _Task) -> tuple[list[DistributionTest], float]:
    """Run a test for each rule and setting, and a control for each setting."""
    options = task.options
    checks = _checks(_choose(task), task.drafter, options)
    detect = options.detect
    if detect is None:  # the user's own number of samples says nothing of what they are to detect
        given = options.samples is not None
        detect = DISTANCES[0] if given else _affordable(checks, task.sampler.seconds_per_sample)
    tests = []
    for number, check in enumerate(checks, start=1):
        progress = partial(task.progress, f"Chi-square test {number} of {len(checks)}")
        count = partial(_sample_count, options.samples, detect, check)
        tests.append(run_test(task.sampler, task.plain, check, count, progress))
    return tests, detect


def _choose(task: _Task) -> list[SamplingCase]:
    """Return a case for each setting; the last one has a stand-in where a draft is judged by its q."""
    rules, chosen = task.options.rules, (task.sampler, task.plain, task.prompts)
    first, *_, last = [
        SamplingParams(**setting.options, acceptance=rules[0], drafter=task.drafter) for setting in SETTINGS
    ]
    found = choose_cases(*chosen, first, len(SETTINGS), partial(task.progress, "Choosing prompts"))
    cases = [found[number % len(found)] for number in range(len(SETTINGS))]
    if set(rules) != {"coupled"}:
        cases[-1] = choose_stand_in(*chosen, last) or cases[-1]
    return cases


def _checks(cases: Sequence[SamplingCase], drafter: str, options: VerifySettings) -> list[DistributionCheck]:
    """Return the chi-square tests: one for each rule and setting, and a control for each setting."""
    kinds = [*((rule, False) for rule in options.rules), (options.rules[0], True)]
    positions = len(SETTINGS) * len(WIDTHS) if "speculative" in options.rules else 0
    level = FAMILY_LEVEL / (len(kinds) * len(SETTINGS) + positions)
    checks: list[DistributionCheck] = []
    for rule, is_control in kinds:
        judged = rule != "coupled" and not is_control
        full = rule == (options.acceptance or "speculative") and not is_control
        for case, setting in zip(cases, SETTINGS, strict=True):
            # Where q has no part, there is no stand-in.
            name = "none" if is_control else case.params.drafter if judged else drafter
            params = SamplingParams(**setting.options, acceptance=rule, drafter=name)
            own = replace(case, params=params, draft_temperature=case.draft_temperature if judged else 1.0)
            by_position = judged and rule == "speculative"
            checks.append(
                DistributionCheck(own, rule, setting, full=full, by_position=by_position, level=level)
            )
    return checks


def _affordable(checks: Sequence[DistributionCheck], seconds_per_sample: float) -> float:
    """Return the smallest distance whose samples take `SECONDS` at most, or else the largest."""

    def seconds(detect: float) -> float:
        cells = most_cells(WIDTHS)
        return seconds_per_sample * sum(_sample_count(None, detect, check, cells) for check in checks)

    return next((detect for detect in DISTANCES if seconds(detect) <= SECONDS), DISTANCES[-1])


def _sample_count(samples: int | None, detect: float, check: DistributionCheck, cells: int) -> int:
    """Return the samples of a test; samples: those that the user asks for in a full one."""
    share = 1 if check.full else REDUCED_SHARE
    if samples is not None:
        return max(1, samples // share)
    return -(-samples_needed(detect, cells - 1, check.level, POWER) // share)


def _about(llm: LLM, drafter: str) -> dict[str, Any]:
    """Return what is tested, and on which machine."""
    engine = llm.loaded.engine
    drafters = llm.requests.drafters(SamplingParams(drafter=drafter))
    own = [engine.drafters[name] for name in drafters]
    return {
        "drafter": drafter,
        "drafters": list(drafters),
        "plan": next((str(each.skips) for each in own if isinstance(each, LayerSkip)), None),
        "policy": engine.policy.name,
        "greedy_drafts": engine.greedy_drafts,
        "dtype": dtype_name(engine.cache.dtype),
        "weights": llm.weights,
        "lora": [*llm.lora],
        "device": str(engine.device),
        "deterministic": llm.deterministic,
        "max_batch": engine.cache.rows,
        "threads": torch.get_num_threads(),
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
