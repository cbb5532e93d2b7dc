"""The best plans in real decoding: held-out prompts, in turns with plain decoding.

Contract: plans are told apart by measurement alone. Every contender decodes each prompt in each repeat; a
speed-up is the median of the ratios within a prompt's repeats, then over the prompts, and stands beside the
flag that says whether all tokens were plain decoding's. Where drafts are drawn, a plan decodes on, by itself
and untimed, until its tau is known well enough to be held against the predicted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from foredraft.bench.contender import Timing
from foredraft.bench.costs import measure_costs
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.bench.options import MAX_REPEATED
from foredraft.bench.records import Spread
from foredraft.bench.schedule import turns
from foredraft.bench.timing import wrapped
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM
from foredraft.model.runner import Runner
from foredraft.ngrams import repeated
from foredraft.tune.agreement import Agreement
from foredraft.tune.calibration import Text
from foredraft.tune.options import Options
from foredraft.tune.progress import Progress
from foredraft.tune.records import AGREEMENT, Finalist, Trial

__all__ = ["finals"]

PROMPTS = 16  # that are decoded, at most
TURNS = 24  # over the prompts, at most, to know a tau
PLAIN = "none"


def finals(
    llm: LLM, trials: Sequence[Trial], prompts: Sequence[list[int]], options: Options, progress: Progress
) -> list[Finalist]:
    """What became of each plan, in their order."""
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    temperature = options.temperature
    plain = ForedraftContender(PLAIN, llm, PLAIN, temperature=temperature, policy=Fixed(0))
    chosen = _varied(plain, prompts, options)
    names = {f"{place}. {trial.skips}": trial for place, trial in enumerate(trials, start=1)}
    timings: dict[str, list[list[Timing]]] = {name: [] for name in (PLAIN, *names)}
    with _drafting(llm, {name: Skips.spelled(trial.skips) for name, trial in names.items()}):
        contenders = [plain]
        for name, trial in names.items():
            fixed = Fixed(trial.draft)
            contenders.append(ForedraftContender(name, llm, name, temperature=temperature, policy=fixed))
        for done, prompt in enumerate(chosen):
            for several in timings.values():
                several.append([])
            for repeat in range(-1 if done == 0 else 0, options.repeats):  # the first turn warms up
                for contender in turns(contenders, repeat):
                    timing = contender.run([prompt], options.new_tokens)
                    if repeat >= 0:
                        timings[contender.name][-1].append(timing)
            progress("decode", done + 1, len(chosen))
        context = int(median(map(len, chosen))) + options.new_tokens // 2
        longest = max(trial.draft for trial in trials)
        costs = measure_costs(llm, 1, context, longest).drafting
        agreements = {
            name: _agreement(runner, trial, contender, chosen, timings[name], options)
            for (name, trial), contender in zip(names.items(), contenders[1:], strict=True)
        }
    return [
        _finalist(
            trial,
            timings[PLAIN],
            timings[name],
            costs[name].of(trial.draft) / trial.draft,
            agreements[name],
            temperature,
        )
        for name, trial in names.items()
    ]


def _varied(plain: ForedraftContender, prompts: Sequence[list[int]], options: Options) -> list[list[int]]:
    """Prompts after which plain decoding repeats itself little, where there are any."""
    loops = [
        repeated(plain.run([prompt], options.new_tokens).tokens[0]) >= MAX_REPEATED for prompt in prompts
    ]
    varied = [prompt for prompt, looping in zip(prompts, loops, strict=True) if not looping]
    return (varied or list(prompts))[:PROMPTS]


@contextmanager
def _drafting(llm: LLM, plans: dict[str, Skips]) -> Iterator[None]:
    """While entered, the engine has these drafters, too."""
    engine = llm.engine
    assert isinstance(engine.target, Runner)
    before = engine.drafters
    made = {name: LayerSkip(engine.target, engine.cache, skips) for name, skips in plans.items()}
    with ExitStack() as stack:
        stack.enter_context(wrapped(engine, "drafters", before | made))
        yield


def _agreement(
    runner: Runner,
    trial: Trial,
    contender: ForedraftContender,
    prompts: list[list[int]],
    timings: list[list[Timing]],
    options: Options,
) -> Agreement:
    """Over the texts of the race, and over more where they are too few."""
    found = Agreement(runner, Skips.spelled(trial.skips), trial.draft, options.temperature)
    for turn in range(TURNS):
        if turn < options.repeats:
            made = [several[turn] for several in timings]
        else:
            made = [contender.run([prompt], options.new_tokens) for prompt in prompts]
        found.add(
            [Text((*prompt, *own.tokens[0]), len(prompt)) for prompt, own in zip(prompts, made, strict=True)],
            [own.stats.rounds for own in made if own.stats is not None],
        )
        if found.error <= AGREEMENT / 2:
            break
    return found


def _finalist(
    trial: Trial,
    plain: list[list[Timing]],
    own: list[list[Timing]],
    c: float,
    agreement: Agreement,
    temperature: float,
) -> Finalist:
    ratios = [
        median(a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(own, plain, strict=True)
    ]
    stats = Stats.merge(timing.stats for several in own for timing in several if timing.stats is not None)
    identical = all(
        a.tokens == b.tokens
        for ours, theirs in zip(own, plain, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    speedup = Spread.of(ratios)
    loops = Spread.of(repeated(several[0].tokens[0]) for several in own)
    assert speedup is not None and loops is not None
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
        repeated=loops,
        faster=sum(ratio > 1 for ratio in ratios),
        trial_tau=trial.taus[trial.draft - 1],
        tau_error=agreement.error,
    )
