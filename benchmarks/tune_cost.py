"""The cost of a layer-skip search at a 32-layer shape, in bare forwards over the same tokens.

A random Llama of 32 layers generates the calibration texts. Then a whole search runs, with its ranking, its
sampler and its storage in a file. After every few trials it is interrupted for one bare forward over the same
columns with all layers, norm and head: the unit of the result. The plans that a random model leads to are
meaningless, and a plan that skips much is cheap to try. So the result also has the most expensive trial: a
plan that skips nothing, timed in turns with bare forwards, plus the search's work around a trial.

    python -m benchmarks.tune_cost --trials 200 --every 5
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import foredraft
from benchmarks.shape import random_checkpoint
from benchmarks.timing import spread, timed
from benchmarks.tune_demo import bare, silent
from benchmarks.workload import machine, write
from foredraft.model.plan import Plan
from foredraft.tune.calibration import new_tokens_per_prompt, write_calibration_texts
from foredraft.tune.expected_rounds import ExpectedRounds
from foredraft.tune.plan_costs import measure_plan_costs
from foredraft.tune.search import Deadline, Search
from foredraft.tune.study import StudyStorage
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_settings import SAMPLERS, TuneSettings

LAYERS, PROMPTS = 32, 64
LENGTH, CONTEXT = 48, 128  # tokens of a prompt, and of the context at which costs are measured
VOCABULARY = 2048
DEVICE = torch.device("cpu")


class Watched(TeacherForced):
    """Sums up the seconds that trials take for their forwards and for the arithmetic of rounds."""

    seconds = 0.0

    def rounds(self, plan: Plan, *, every_start: bool = False) -> ExpectedRounds:
        seconds, found = timed(lambda: super(Watched, self).rounds(plan, every_start=every_start), DEVICE)
        self.seconds += seconds
        return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="trials between two timed bare forwards")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--sampler", choices=SAMPLERS, default=TuneSettings().sampler)
    parser.add_argument("--repeats", type=int, default=3, help="of the most expensive trial")
    parser.add_argument("--name", default="tune_cost")
    return parser.parse_args(arguments)


def config_keys(hidden: int) -> dict[str, int]:
    """Return the config keys of a Llama with this hidden size."""
    return {
        "num_hidden_layers": LAYERS,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": VOCABULARY,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    options = TuneSettings(
        trials=given.trials, tokens=given.tokens, temperature=1.0, sampler=given.sampler, max_draft=8
    )
    shape = config_keys(given.hidden)
    generator = random.Random(0)
    prompts = [[generator.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        model = random_checkpoint(Path(folder) / "model", shape)
        room = LENGTH + new_tokens_per_prompt(given.tokens, PROMPTS)
        llm = foredraft.load(model, drafter="none", max_batch=8, max_length=room)
        runner = llm.loaded.runner
        calibration = write_calibration_texts(llm, prompts, given.tokens, options.temperature, silent)
        teacher = Watched(runner, calibration, options.max_draft)
        costs = measure_plan_costs(llm.loaded, CONTEXT, options.max_draft, options.temperature, repeats=5)
        place = StudyStorage(f"sqlite:///{folder}/study.db")
        search = Search(place, "a study", options, teacher, lambda: costs, Deadline(None))
        forwards: list[float] = []

        def between(stage: str, done: int, total: int, note: str = "", /) -> None:
            if done % given.every == 0:
                forwards.append(timed(lambda: bare(teacher), DEVICE)[0])

        bare(teacher)  # warm-up
        start = time.perf_counter()
        search.find_seed_plans()
        search.run_trials(between)
        whole = time.perf_counter() - start - sum(forwards)
        in_trials = teacher.seconds
        full = Plan.full(LAYERS)
        full_over_forward = [
            timed(lambda: teacher.rounds(full), DEVICE)[0] / timed(lambda: bare(teacher), DEVICE)[0]
            for _ in range(given.repeats)
        ]
    unit, trials = median(forwards), len(search.trials())
    around = (whole - in_trials) / trials / unit
    result = {
        "what": vars(given) | {"shape": shape},
        "machine": machine(),
        "tokens": calibration.tokens,
        "trials": trials,
        "forward_seconds": spread(forwards),
        "search_seconds": whole,
        "search_over_forwards": whole / trials / unit,
        "around_a_trial_over_forward": around,
        "nothing_left_out_over_forward": spread(full_over_forward),
        "dearest_over_forward": median(full_over_forward) + around,
    }
    write(given.name, result)


if __name__ == "__main__":
    main()
