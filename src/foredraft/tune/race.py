"""The best plans in real decoding: held-out prompts, in turns with plain decoding.

Contract: plans are told apart by measurement alone. Every contender decodes each prompt in each repeat; a
speed-up is the median of the ratios within a prompt's repeats, then over the prompts, and stands beside the
flag that says whether all tokens were plain decoding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from foredraft.bench.contender import Timing
from foredraft.bench.costs import measure_costs
from foredraft.bench.options import MAX_REPEATED
from foredraft.bench.ours import Ours
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
from foredraft.tune.calibration import Calibration, Text
from foredraft.tune.options import Options
from foredraft.tune.records import Finalist, Progress, Trial
from foredraft.tune.teacher import Teacher

__all__ = ["race"]

PROMPTS = 16  # that are decoded, at most
PLAIN = "none"


def race(
    llm: LLM, trials: Sequence[Trial], prompts: Sequence[list[int]], options: Options, progress: Progress
) -> list[Finalist]:
    """What became of each plan, in their order."""
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    temperature = options.temperature
    plain = Ours(PLAIN, llm, PLAIN, temperature=temperature, decides=Fixed(0))
    texts = _texts(plain, prompts, options)
    names = {f"{place}. {trial.skips}": trial for place, trial in enumerate(trials, start=1)}
    timings: dict[str, list[list[Timing]]] = {name: [] for name in (PLAIN, *names)}
    with _drafting(llm, {name: Skips.spelled(trial.skips) for name, trial in names.items()}):
        contenders = [plain]
        for name, trial in names.items():
            fixed = Fixed(trial.draft)
            contenders.append(Ours(name, llm, name, temperature=temperature, decides=fixed))
        for done, text in enumerate(texts):
            for several in timings.values():
                several.append([])
            for repeat in range(-1 if done == 0 else 0, options.repeats):  # the first turn warms up
                for contender in turns(contenders, repeat):
                    timing = contender.run([list(text.ids[: text.start])], options.new_tokens)
                    if repeat >= 0:
                        timings[contender.name][-1].append(timing)
            progress("decode", done + 1, len(texts))
        context = int(median(text.start for text in texts)) + options.new_tokens // 2
        longest = max(trial.draft for trial in trials)
        costs = measure_costs(llm, 1, context, longest).drafting
    teacher = Teacher(runner, Calibration(tuple(texts), temperature), longest)
    return [
        _finalist(trial, timings[PLAIN], timings[name], costs[name], _tau(teacher, trial), temperature)
        for name, trial in names.items()
    ]


def _texts(plain: Ours, prompts: Sequence[list[int]], options: Options) -> list[Text]:
    """What plain decoding makes of the prompts; those first that repeat little."""
    made = []
    for prompt in prompts:
        tokens = plain.run([prompt], options.new_tokens).tokens[0]
        made.append((repeated(tokens) >= MAX_REPEATED, Text((*prompt, *tokens), len(prompt))))
    if any(not loops for loops, _ in made):
        made = [(loops, text) for loops, text in made if not loops]
    return [text for _, text in made][:PROMPTS]


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


def _tau(teacher: Teacher, trial: Trial) -> float:
    """Of the texts as they were decoded, their ends included."""
    plan = Skips.spelled(trial.skips).plan(teacher.runner.decoder.spec.layers)
    rounds = teacher.rounds(plan, every_start=True)
    return float(teacher.tokens / rounds.counts[trial.draft - 1])


def _finalist(
    trial: Trial,
    plain: list[list[Timing]],
    own: list[list[Timing]],
    c: float,
    predicted_tau: float,
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
    assert speedup is not None and loops is not None and stats.mean_accepted_length is not None
    return Finalist(
        skips=trial.skips,
        draft=trial.draft,
        predicted=trial.predicted,
        predicted_tau=predicted_tau,
        tau=stats.mean_accepted_length,
        alpha=stats.alpha or 0.0,
        c=c,
        speedup=speedup,
        identical=identical if temperature == 0 else None,
        prompts=len(own),
        repeated=loops,
    )
