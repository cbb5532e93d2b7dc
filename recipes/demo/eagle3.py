"""Train an EAGLE-3 head of the demo target, as `foredraft train eagle3` does, on the demo models' corpus.

    python -m recipes.demo.eagle3 --corpus DIR --prompts FILE --work DIR --out DIR

With the defaults it takes about an hour of one core with bfloat16 matrix units.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from foredraft.train import trainers
from foredraft.train.training_options import Eagle3Options

from .adapter import refuse_held_out, show

CHARACTERS = 12_000_000  # of the modules that it learns from: more than it comes to see
DRAFT_VOCAB = 2048  # of 4,096
HELD_OUT = 16  # modules of the validation: all 96 would take longer than the steps between


def write_sample(source: Path, place: Path, characters: int | None, lines: int | None) -> Path:
    """Write lines of a file in an order that a seed gives, until there are enough; return the place."""
    found = source.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(found)
    taken, total = [], 0
    for line in found[:lines]:
        if characters is not None and total >= characters:
            break
        taken.append(line)
        total += len(json.loads(line)["text"])
    place.write_text("".join(taken))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head of the demo target.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="file that recipes.demo.prompts wrote")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the data, the checkpoints and logs"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--from-head", type=Path, help="a head to start from; its draft vocabulary stays")
    parser.add_argument("--words", type=int, help="tokens that the head can draft; 2,048 by default")
    parser.add_argument("--draft-length", type=int, default=4, help="tokens of a draft that are learned")
    parser.add_argument("--steps", type=int, default=6000, help="steps of training")
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of the data, and of the first weights"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads")
    given = parser.parse_args()
    refuse_held_out(given.corpus, given.prompts)
    given.work.mkdir(parents=True, exist_ok=True)
    data = write_sample(given.corpus / "train.jsonl", given.work / "data.jsonl", CHARACTERS, None)
    held_out = write_sample(given.corpus / "heldout.jsonl", given.work / "held_out.jsonl", None, HELD_OUT)
    options = Eagle3Options(
        data=(data,),
        validation=(held_out,),
        length=512,
        steps=given.steps,
        step_tokens=given.step_tokens,
        warm_up=100,
        learning_rate=given.learning_rate,
        validate_every=500,
        patience=0,
        seed=given.seed,
        from_head=given.from_head,
        draft_vocabulary=given.words if given.from_head else given.words or DRAFT_VOCAB,
        draft_length=given.draft_length,
        work=given.work / "run",
        out=given.out,
    )
    print(trainers.train(options, report=show, threads=given.threads).as_dict())


if __name__ == "__main__":
    main()
