"""Self-generation: the target continues the prompts of the data, so that a drafter learns what it will say.

The texts are written in batches by Foredraft's own engine, each with a seed of its own, and kept in the
run's folder as they come: a run that is continued writes the rest alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.decode.params import SamplingParams
from foredraft.errors import ConfigError, RequestError
from foredraft.loading import load_for
from foredraft.train.kept_lines import broken_line, whole_lines
from foredraft.train.loop import OnProgress
from foredraft.train.packed_documents import Document
from foredraft.train.processes import Processes
from foredraft.train.training_options import TrainOptions

__all__ = ["self_generated"]

FILE = "self_generated.jsonl"
ROWS = 32  # sequences of a batch


def self_generated(
    model: str | None,
    load: Mapping[str, Any],
    prompts: Sequence[list[int]],
    options: TrainOptions,
    length: int,
    vocabulary: int,
    folder: Path,
    processes: Processes,
    report: OnProgress,
) -> list[Document]:
    """Return each prompt with what the target writes after it, of which that alone counts.

    Args:
        model: As in `preparation.prepare`.
        load: As there.
        prompts: Token ids of each prompt.
        options: Of the training.
        length: Tokens of a document at most; the oldest tokens of a prompt give way.
        vocabulary: Ids of the target.
        folder: Keeps the texts.
        processes: The first of them writes, the others wait.
        report: Told how far it is.

    Raises:
        ConfigError: No prompt has a continuation, or the kept texts cannot be read or written.
    """
    new_tokens = min(options.self_generate, length - 1)
    prompts = [prompt[-(length - new_tokens) :] for prompt in prompts]
    file = folder / FILE
    if processes.first:
        try:
            _write(model, load, prompts, new_tokens, options, file, vocabulary, report)
        except OSError as error:
            raise ConfigError(
                f"in which {FILE} cannot be written ({error.strerror})", option="work", value=str(folder),
                remedy="make room, and run the same command again",
            ) from error  # fmt: skip
    processes.wait()
    documents = []
    for prompt, written in zip(prompts, _written(file, len(prompts), vocabulary), strict=True):
        if written:
            counts = (False,) * len(prompt) + (True,) * len(written)
            documents.append(Document((*prompt, *written), counts))
    if not documents:
        raise ConfigError(
            "holds no prompt that the target continues", option="data", remedy="give other prompts"
        )
    return documents


def _written(file: Path, most: int, vocabulary: int) -> list[list[int]]:
    """Return the texts that are kept: the whole lines of the file.

    Raises:
        ConfigError: A line holds no token ids, or there are more lines than prompts.
    """
    lines = whole_lines(file)
    for number, ids in enumerate(lines, 1):
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocabulary for id in ids):
            raise broken_line(file, number, "is no list of the model's token ids")
        if number > most:
            raise broken_line(file, number, f"follows the texts of all {most} prompts")
    return lines


def _write(
    model: str | None,
    load: Mapping[str, Any],
    prompts: Sequence[list[int]],
    new_tokens: int,
    options: TrainOptions,
    file: Path,
    vocabulary: int,
    report: OnProgress,
) -> None:
    done = _written(file, len(prompts), vocabulary)
    if len(done) == len(prompts):
        return
    file.write_text("".join(f"{json.dumps(ids)}\n" for ids in done))  # without half a line at its end
    longest = max(map(len, prompts)) + new_tokens
    llm = load_for(lambda *_: (ROWS, longest), model, **load)
    params = SamplingParams(temperature=options.self_temperature, max_new_tokens=new_tokens)
    with file.open("a") as kept:
        for first in range(len(done), len(prompts), ROWS):
            batch = list(prompts[first : first + ROWS])
            each = [params.replace(seed=options.seed + first + n) for n in range(len(batch))]
            for output in llm.generate(batch, each):
                if output.error is not None:
                    raise RequestError(f"the target could not continue a prompt: {output.error}")
                kept.write(json.dumps(output.token_ids) + "\n")
            kept.flush()
            report("self-generate", min(first + ROWS, len(prompts)), len(prompts), "")
