"""Train the adapter of the demo target, as `foredraft train adapter` does, on the corpus of the demo models.

The prompts of the benchmarks come from held-out modules, none of which may be in the data.

    python -m recipes.demo.adapter --corpus DIR --prompts FILE --work DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from foredraft.train import trainers
from foredraft.train.training_options import AdapterOptions

from .corpus import read_sources

STEPS, STEP_TOKENS = 3000, 4096


def refuse_held_out(corpus: Path, prompts: Path) -> None:
    """Raise ValueError where a module of the prompts is in the data."""
    modules = {json.loads(line)["module"] for line in prompts.read_text().splitlines()}
    sources = read_sources(corpus / "train.jsonl")
    if found := modules & {f"{source.package}:{source.path}" for source in sources}:
        raise ValueError(f"held-out modules are in the data: {', '.join(sorted(found))}")


def show(stage: str, done: int, total: int, note: str) -> None:
    """Print how far the training is, every tenth step."""
    if done % 10 == 0 or stage != "train":
        print(f"{stage} {done}/{total} {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the adapter of the demo target.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="file that recipes.demo.prompts wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--depth", type=int, default=1, help="layers below the adapter")
    parser.add_argument("--kind", default="attention+mlp", help="attention, or attention+mlp")
    parser.add_argument("--loss", default="kl", help="the loss")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest")
    given = parser.parse_args()
    refuse_held_out(given.corpus, given.prompts)
    options = AdapterOptions(
        data=(given.corpus / "train.jsonl",),
        validation=(given.corpus / "heldout.jsonl",),
        length=512,
        steps=given.steps,
        step_tokens=STEP_TOKENS,
        warm_up=50,
        learning_rate=given.learning_rate,
        loss=given.loss,
        validate_every=200,
        patience=0,
        depth=given.depth,
        kind=given.kind,
        work=given.work,
        out=given.out,
    )
    print(trainers.train(options, report=show).as_dict())


if __name__ == "__main__":
    main()
