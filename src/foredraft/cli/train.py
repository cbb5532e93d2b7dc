"""`foredraft train adapter`, `eagle3`, `dflash` and `draft`: train a drafter on the user's own text.

stdout has a few lines, or with --json one JSON document. The exit code is 0 when a drafter was written. After
Ctrl-C it is 130, and the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter

from foredraft.cli.errors import as_flag
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.options import (
    COMMON,
    NONE,
    OUTPUT,
    Flag,
    Given,
    TargetOptions,
    bullets,
    common,
    load_options,
)
from foredraft.cli.output_files import check_places
from foredraft.cli.progress import started
from foredraft.drafters.adapter_kinds import ADAPTER_KINDS, WITH_MLP
from foredraft.errors import ConfigError, Option
from foredraft.files import check_folder_place, write_whole
from foredraft.train.training_options import (
    LOSSES,
    AdapterOptions,
    DFlashOptions,
    Eagle3Options,
    TrainOptions,
)
from foredraft.train.training_options import DraftOptions as TrainedDraftOptions

if TYPE_CHECKING:
    from foredraft.train.result import Result

    KindName: TypeAlias = str
else:
    KindName = Literal[tuple(ADAPTER_KINDS)]

__all__ = ["adapter", "dflash", "draft", "eagle3"]

USED_BY = {
    "eagle3": "draft",
    "dflash": "draft",
}  # kind -> the option that names its folder, where that is not the kind's name
TRAINING = Group("Training", sort_key=2)
DATA = Group("Data", sort_key=1)
DEFAULT = TrainOptions(data=())
Files = Annotated[tuple[Path, ...], Parameter(negative=(), consume_multiple=True, show_default=False)]


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, slots=True)
class DataOptions:
    data: Annotated[
        tuple[Path, ...],
        Parameter(group=(COMMON, DATA), negative=(), consume_multiple=True, show_default=False),
    ] = ()
    """Files to learn from: text, JSON Lines or Parquet with text, prompt and response, or chat messages."""
    validation: Files = ()
    """Files to validate on. Default: a twentieth of the data is held out."""
    self_generate: Annotated[int, common(DATA)] = DEFAULT.self_generate
    """Let the model write this many new tokens after every prompt of the data, and learn from these."""
    self_temperature: float = DEFAULT.self_temperature
    """Temperature at which it writes them."""
    length: int | None = None
    """Maximum tokens of a document; a longer one is cut. Default: 1024, or the model's maximum."""
    skip_bad_lines: Flag = False
    """Leave out lines that hold no document, and count them."""
    kept_states: float = DEFAULT.kept_states
    """GiB of the disk for the model's hidden states, so that later passes over the data need not compute
    them."""


@Parameter(name="*", group=TRAINING)
@dataclass(frozen=True, slots=True)
class LoopOptions:
    steps: Annotated[int, common(TRAINING)] = DEFAULT.steps
    """Steps of the optimiser at most."""
    step_tokens: int = DEFAULT.step_tokens
    """Tokens of a step, of all processes together."""
    group_tokens: int | None = None
    """Tokens of one pass; lower it if memory is short. Default: 4096, fewer with a large vocabulary."""
    learning_rate: Annotated[float, common(TRAINING)] = DEFAULT.learning_rate
    """Highest learning rate."""
    warm_up: int = DEFAULT.warm_up
    """Steps in which the learning rate rises."""
    weight_decay: float = DEFAULT.weight_decay
    """Weight decay of matrices."""
    clip: float = DEFAULT.clip
    """Largest norm of the gradient."""
    loss: Annotated[
        str,
        Parameter(help=f"Loss, or a mixture such as ce=0.1,tv=0.9.\n\n{bullets(LOSSES)}", show_choices=False),
    ] = DEFAULT.loss
    temperature: float = DEFAULT.temperature
    """Temperature of the validation; 0 validates greedy decoding."""
    validate_every: int = DEFAULT.validate_every
    """Steps between validations, each of which writes a checkpoint."""
    patience: int = DEFAULT.patience
    """Validations without a better one before training stops; 0 goes on to the last step."""
    seed: int = DEFAULT.seed
    """Random seed."""
    work: Path | None = None
    """Folder of the run's checkpoints and logs. Default: one in the cache folder, by model, data and
    options."""
    fresh: Flag = False
    """Start anew instead of going on from the last checkpoint."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class JsonOptions:
    json: Annotated[Flag, common(OUTPUT)] = False
    """Print one JSON document instead of text, and nothing else on stdout."""
    html: Annotated[Path | None, common(OUTPUT)] = None
    """Write a report with plots to this file, one self-contained page."""


def adapter(
    *,
    data: DataOptions = DataOptions(),
    out: Annotated[Path | None, common(OUTPUT)] = None,
    depth: Annotated[int | None, common(TRAINING)] = None,
    kind: Annotated[
        KindName,
        Parameter(group=TRAINING, help=f"The adapter.\n\n{bullets(ADAPTER_KINDS)}", show_choices=False),
    ] = WITH_MLP,
    draft_vocabulary: Annotated[int | None, Parameter(group=TRAINING)] = None,
    loop: LoopOptions = LoopOptions(),
    model: TargetOptions = NONE,
    output: JsonOptions = JsonOptions(),
) -> int:
    """Train the adapter of drafter kangaroo: one layer on top of the model's own first layers.

    It learns the model's next-token distribution on your text. A run that ends, by Ctrl-C or otherwise, goes
    on from its last checkpoint with the same command. Under torchrun several processes share the work.

    Parameters
    ----------
    out
        Folder to write. Default: the one in the cache folder where --drafter kangaroo finds it.
    depth
        Layers of the model below the adapter. Default: an eighth of them, from 1 to 3.
    draft_vocabulary
        Words that it can draft, those most frequent in the data; fewer make a draft cheaper. Default: all.
    """
    own = {"out": out, "depth": depth, "kind": kind, "draft_vocabulary": draft_vocabulary}
    return _run("adapter", own, data, loop, model, output)


def eagle3(
    *,
    out: Annotated[Path, common(OUTPUT)],
    data: DataOptions = DataOptions(),
    taps: Annotated[str | None, Parameter(group=TRAINING)] = None,
    draft_vocabulary: Annotated[int | None, common(TRAINING)] = None,
    draft_length: Annotated[int, common(TRAINING)] = 5,
    decay: Annotated[float, Parameter(group=TRAINING)] = 0.8,
    from_head: Annotated[Path | None, common(TRAINING)] = None,
    loop: LoopOptions = LoopOptions(),
    model: TargetOptions = NONE,
    output: JsonOptions = JsonOptions(),
) -> int:
    """Train an EAGLE-3 head: one layer over the model's states at three depths, in the published format.

    It learns the model's next-token distribution on your text, and to go on from its own states. It is used
    with --draft, here and in other programs. A run that ends, by Ctrl-C or otherwise, goes on from its last
    checkpoint with the same command. Under torchrun several processes share the work.

    Parameters
    ----------
    out
        Folder to write.
    taps
        Numbers of layers after which the head reads the model's states, such as 2,8,13. Default: 2, half of
        the layers, and three fewer than all.
    draft_vocabulary
        Words that it can draft, those most frequent in the data; fewer make a draft cheaper. Default: all.
    draft_length
        Tokens of a draft that are learned, each after the first from the head's own states.
    decay
        Weight of each of them in the loss against the one before.
    from_head
        Head to start from, which has taps and words of its own: one that was trained before, or published for
        the model that yours was tuned from. Default: it starts at random.
    """
    own = {
        "out": out, "taps": _layers(taps, "taps"), "draft_vocabulary": draft_vocabulary,
        "draft_length": draft_length, "decay": decay, "from_head": from_head,
    }  # fmt: skip
    return _run("eagle3", own, data, loop, model, output)


def dflash(
    *,
    out: Annotated[Path, common(OUTPUT)],
    data: DataOptions = DataOptions(),
    layers: Annotated[int, common(TRAINING)] = 2,
    block: Annotated[int, common(TRAINING)] = 8,
    taps: Annotated[str | None, Parameter(group=TRAINING)] = None,
    draft_vocabulary: Annotated[int | None, common(TRAINING)] = None,
    mask_token: Annotated[int | None, Parameter(group=TRAINING)] = None,
    decay: Annotated[float, Parameter(group=TRAINING)] = 0.87,
    loop: LoopOptions = LoopOptions(),
    model: TargetOptions = NONE,
    output: JsonOptions = JsonOptions(),
) -> int:
    """Train a DFlash head: it drafts a whole block in one pass, in the published format.

    It learns the model's next-token distributions on your text, for all tokens of a draft at once. It is used
    with --draft, here and in other programs. A run that ends, by Ctrl-C or otherwise, goes on from its last
    checkpoint with the same command. Under torchrun several processes share the work.

    Parameters
    ----------
    out
        Folder to write.
    layers
        Layers of the head.
    block
        Slots of a block, the last token's among them: a draft has one token less.
    taps
        Numbers of layers after which the head reads the model's states, such as 2,8,13. Default: as many as
        --layers, spread over the model.
    draft_vocabulary
        Words that it can draft, those most frequent in the data; fewer make a draft cheaper. Default: all.
    mask_token
        Id of the token that stands in the slots. Default: the one that ends a text.
    decay
        Weight of each token of a draft in the loss against the one before.
    """
    own = {
        "out": out, "layers": layers, "block": block, "taps": _layers(taps, "taps"),
        "draft_vocabulary": draft_vocabulary, "mask_token": mask_token, "decay": decay,
    }  # fmt: skip
    return _run("dflash", own, data, loop, model, output)


def draft(
    *,
    out: Annotated[Path, common(OUTPUT)],
    data: DataOptions = DataOptions(),
    layers: Annotated[int, common(TRAINING)] = 2,
    from_layers: Annotated[str | None, common(TRAINING)] = None,
    hidden_size: Annotated[int | None, Parameter(group=TRAINING)] = None,
    intermediate_size: Annotated[int | None, Parameter(group=TRAINING)] = None,
    heads: Annotated[int | None, Parameter(group=TRAINING)] = None,
    kv_heads: Annotated[int | None, Parameter(group=TRAINING)] = None,
    checkpointed: Annotated[Flag, Parameter(group=TRAINING)] = False,
    loop: LoopOptions = LoopOptions(),
    model: TargetOptions = NONE,
    output: JsonOptions = JsonOptions(),
) -> int:
    """Train a small draft model that imitates the model, as an ordinary Hugging Face checkpoint.

    It learns the model's next-token distribution on your text, and is used with --draft, here and in other
    programs. A run that ends, by Ctrl-C or otherwise, goes on from its last checkpoint with the same command.
    Under torchrun several processes share the work.

    Parameters
    ----------
    out
        Folder to write.
    layers
        Layers of the draft model.
    from_layers
        Layers of the model to start from, such as 0,15: as many as --layers. Default: it starts at random.
    hidden_size
        Size of its hidden states. Default: the model's.
    intermediate_size
        Size within its MLPs. Default: the model's.
    heads
        Its query heads. Default: the model's.
    kv_heads
        Its key and value heads. Default: the model's, or as many as --heads.
    checkpointed
        Recompute activations in the backward pass: slower, with less memory.
    """
    own = {
        "out": out, "layers": layers, "from_layers": _layers(from_layers, "from_layers"),
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "heads": heads,
        "kv_heads": kv_heads, "checkpointed": checkpointed,
    }  # fmt: skip
    return _run("draft", own, data, loop, model, output)


def _layers(text: str | None, option: str) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if min(found) < 0:
        raise ConfigError(option=option, value=text, remedy="give layers such as 0,15")
    return found


def _run(
    what: str,
    own: dict[str, Any],
    data: DataOptions,
    loop: LoopOptions,
    model: Given,
    output: JsonOptions,
) -> int:
    """Train, show the progress, and print what came of it."""
    if own["out"] is not None:
        check_folder_place(own["out"], "out")
    if loop.work is not None:
        check_folder_place(loop.work, "work", kept=True)
    check_places(html=output.html)
    leads = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the first one speaks
    bars = started() if leads else None
    options = asdict(data) | asdict(loop) | own
    train = _trainer(what)  # imports PyTorch, and so before signals wait for the next report
    try:
        with Interrupt() as interrupt:

            def report(stage: str, done: int, total: int, note: str = "") -> None:
                interrupt.check()
                if bars is not None:
                    bars.show(stage, done, total, note)

            result = train(options, model.get("model"), report=report, **load_options(model))
    finally:
        if bars is not None:
            bars.clear()
    if output.json and leads:
        print(json.dumps(result.as_dict()))
    elif leads:
        print("\n".join(_lines(what, result, found=what == "adapter" and own["out"] is None)))
    if output.html is not None and leads:
        write_whole(output.html, _page(what, result, options), "html")
    return 0


def _page(what: str, result: Result, options: dict[str, Any]) -> str:
    """Return the --html page."""
    from foredraft.pages.training import training_page
    from foredraft.train.journal import FILE
    from foredraft.train.kept_lines import whole_lines

    return training_page(what, result, whole_lines(Path(result.work) / FILE), options)


def _trainer(what: str) -> Callable[..., Result]:
    if what == "adapter":
        from foredraft.train.adapter import train_adapter

        return lambda options, *rest, **more: train_adapter(AdapterOptions(**options), *rest, **more)
    if what == "eagle3":
        from foredraft.train.eagle3 import train_eagle3

        return lambda options, *rest, **more: train_eagle3(Eagle3Options(**options), *rest, **more)
    if what == "dflash":
        from foredraft.train.dflash import train_dflash

        return lambda options, *rest, **more: train_dflash(DFlashOptions(**options), *rest, **more)
    from foredraft.train.draft import train_draft

    return lambda options, *rest, **more: train_draft(TrainedDraftOptions(**options), *rest, **more)


def _lines(what: str, result: Result, *, found: bool) -> list[str]:
    """Return what came of the training; found: it is where `load` finds it by itself."""
    end = "stopped, since the validation got no better" if result.stopped_early else "done"
    lines = [
        f"{end} after {result.steps:,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s",
        f"written to {result.out}",
        f"predicted speed-up, by the bytes that a step reads: {result.predicted:.2f} x",
        f"checkpoints and logs: {result.work}",
    ]
    if result.skipped:
        print(f"foredraft: {result.skipped} bad lines were left out", file=sys.stderr)
    use = Option("drafter", "kangaroo") if found else Option(USED_BY.get(what, what), result.out)
    told = f"use it with {as_flag(use)}"
    if found and result.predicted <= 1:
        told = f"it is predicted to be slower than plain decoding, so only {as_flag(use)} uses it"
    return [*lines, f"{told}; `foredraft bench` measures it"]
