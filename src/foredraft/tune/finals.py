"""Finals: the best plans in real decoding of held-out prompts, in turns with plain decoding.

Every finalist decodes each prompt in each repeat. A speed-up is the median of the ratios within a prompt's
repeats, and then over the prompts; it stands beside the flag that says whether all tokens equal plain
decoding's. At a temperature above 0 a plan then decodes on, untimed, until its τ is accurate enough to be
compared with the predicted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from foredraft.bench.bench_records import Spread
from foredraft.bench.bench_settings import MAX_REPEATED
from foredraft.bench.contender import Timing
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.bench.forward_costs import measure_costs
from foredraft.bench.schedule import turns
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.low_bit import LowBit
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM
from foredraft.model.runner import Runner
from foredraft.ngrams import repeated
from foredraft.profiling.timing import replaced
from foredraft.tune.agreement import Agreement
from foredraft.tune.calibration import CalibrationText
from foredraft.tune.progress import Progress
from foredraft.tune.tune_records import TAU_TOLERANCE, Finalist, Trial
from foredraft.tune.tune_settings import TuneSettings

__all__ = ["decode_finalists"]

MAX_PROMPTS = 16  # held-out prompts to decode; at 16, 13 wins are significant (`records.sign_test`)
MAX_TURNS = 24  # runs over all prompts until τ must be accurate enough
PLAIN = "none"

Runs = list[list[Timing]]  # by prompt, then by repeat


@dataclass(frozen=True, slots=True)
class _Contest:
    """Everything that all finalists share: the model, the runner of drafts, the prompts, and the options."""

    llm: LLM
    drafting: Runner | None
    prompts: list[list[int]]
    options: TuneSettings

    @property
    def runner(self) -> Runner:
        return self.llm.loaded.runner

    def contender(self, name: str, draft_length: int) -> ForedraftContender:
        temperature = self.options.temperature
        return ForedraftContender(name, self.llm, name, temperature=temperature, policy=Fixed(draft_length))


def decode_finalists(
    llm: LLM,
    trials: Sequence[Trial],
    prompts: Sequence[list[int]],
    options: TuneSettings,
    progress: Progress,
    drafting: Runner | None = None,
) -> list[Finalist]:
    """Decode held-out prompts with each plan, and return what was measured, in the order of `trials`.

    Args:
        llm: The model.
        trials: The trials of the plans, the best first.
        prompts: Token ids of the held-out prompts.
        options: The options of the search.
        progress: Reports the prompts.
        drafting: Runs the drafts: the target's copy in few bits. None is the target itself.
    """
    plain = _Contest(llm, None, [], options).contender(PLAIN, 0)
    contest = _Contest(llm, drafting, _without_loops(plain, prompts, options), options)
    names = {f"{place}. {trial.skips}": trial for place, trial in enumerate(trials, start=1)}
    with _added_drafters(contest, {name: Skips.parse(trial.skips) for name, trial in names.items()}):
        contenders = {name: contest.contender(name, trial.draft) for name, trial in names.items()}
        runs = _run_in_turns(contest, [plain, *contenders.values()], progress)
        context = int(median(map(len, contest.prompts))) + options.new_tokens // 2
        costs = measure_costs(llm.loaded, 1, context, max(trial.draft for trial in trials)).drafting
        agreements = {
            name: _measure_agreement(contest, trial, contenders[name], runs[name])
            for name, trial in names.items()
        }
    return [
        _finalist(
            trial,
            runs[PLAIN],
            runs[name],
            costs[name].of(trial.draft) / trial.draft,
            agreements[name],
            options.temperature,
        )
        for name, trial in names.items()
    ]


def _without_loops(
    plain: ForedraftContender, prompts: Sequence[list[int]], options: TuneSettings
) -> list[list[int]]:
    """Return the prompts after which plain decoding repeats itself little; all prompts if there are none."""
    loops = [
        repeated(plain.run([prompt], options.new_tokens).tokens[0]) >= MAX_REPEATED for prompt in prompts
    ]
    varied = [prompt for prompt, looping in zip(prompts, loops, strict=True) if not looping]
    return (varied or list(prompts))[:MAX_PROMPTS]


@contextmanager
def _added_drafters(contest: _Contest, plans: dict[str, Skips]) -> Iterator[None]:
    """Add a drafter for each plan to the engine while the context is open."""
    engine = contest.llm.loaded.engine
    kind = LayerSkip if contest.drafting is None else LowBit
    runner = contest.drafting or contest.runner
    added = {name: kind(runner, engine.cache, skips) for name, skips in plans.items()}
    with replaced(engine, "drafters", engine.drafters | added):
        yield


def _run_in_turns(
    contest: _Contest, contenders: Sequence[ForedraftContender], progress: Progress
) -> dict[str, Runs]:
    """Time all contenders on every prompt, by turns within each repeat."""
    runs: dict[str, Runs] = {contender.name: [] for contender in contenders}
    for done, prompt in enumerate(contest.prompts):
        for own in runs.values():
            own.append([])
        for repeat in range(-1 if done == 0 else 0, contest.options.repeats):  # the first turn warms up
            for contender in turns(contenders, repeat):
                timing = contender.run([prompt], contest.options.new_tokens)
                if repeat >= 0:
                    runs[contender.name][-1].append(timing)
        progress("decode", done + 1, len(contest.prompts))
    return runs


def _measure_agreement(
    contest: _Contest, trial: Trial, contender: ForedraftContender, runs: Runs
) -> Agreement:
    """Compare decoded and predicted τ over the timed runs, and over more runs until τ is accurate enough."""
    prompts, options = contest.prompts, contest.options
    found = Agreement(
        contest.runner, contest.drafting, Skips.parse(trial.skips), trial.draft, options.temperature
    )
    for turn in range(MAX_TURNS):
        if turn < options.repeats:
            timings = [repeats[turn] for repeats in runs]
        else:
            timings = [contender.run([prompt], options.new_tokens) for prompt in prompts]
        found.add(
            [
                CalibrationText((*prompt, *timing.tokens[0]), len(prompt))
                for prompt, timing in zip(prompts, timings, strict=True)
            ],
            [timing.stats.rounds for timing in timings if timing.stats is not None],
        )
        if found.relative_error <= TAU_TOLERANCE / 2:
            break
    return found


def _finalist(
    trial: Trial, plain: Runs, own: Runs, c: float, agreement: Agreement, temperature: float
) -> Finalist:
    """Summarise the runs of a plan (`own`) and of plain decoding; `c` is the cost of a draft token."""
    pairs = [list(zip(ours, theirs, strict=True)) for ours, theirs in zip(own, plain, strict=True)]
    ratios = [median(a.tokens_per_second / b.tokens_per_second for a, b in prompt) for prompt in pairs]
    stats = Stats.merge(timing.stats for runs in own for timing in runs if timing.stats is not None)
    identical = all(a.tokens == b.tokens for prompt in pairs for a, b in prompt)
    speedup = Spread.of(ratios)
    repetition = Spread.of(repeated(runs[0].tokens[0]) for runs in own)
    assert speedup is not None and repetition is not None
    return Finalist(
        skips=trial.skips,
        draft=trial.draft,
        predicted=trial.predicted,
        predicted_tau=agreement.predicted_tau,
        tau=agreement.tau,
        alpha=stats.alpha or 0.0,
        c=c,
        speedup=speedup,
        identical=identical if temperature == 0 else None,
        prompts=len(own),
        repeated=repetition,
        faster=sum(ratio > 1 for ratio in ratios),
        trial_tau=trial.taus[trial.draft - 1],
        tau_error=agreement.relative_error,
    )
