"""`foredraft train adapter`, `eagle3`, `dflash`, `mtp` and `draft`: train a drafter on the user's own text.

stdout has a few lines, or with --json one JSON document. The exit code is 0 when a drafter was written. After
Ctrl-C it is 130, and the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter

from foredraft.arguments import Declared, declared
from foredraft.cli.commands import COMMANDS
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.options import OUTPUT, Flag, TargetOptions, bullets, common, load_options
from foredraft.cli.render import started
from foredraft.cli.sections import COMMON, NONE, Given, in_flags
from foredraft.cli.words import as_flag, check_places
from foredraft.drafters.asset import ADAPTER_KINDS
from foredraft.errors import ConfigError, Option
from foredraft.files import check_folder_place, write_whole
from foredraft.train.training_options import (
    LOSSES,
    AdapterOptions,
    DFlashOptions,
    Eagle3Options,
    MTPOptions,
    TrainOptions,
)
from foredraft.train.training_options import DraftOptions as TrainedDraftOptions

if TYPE_CHECKING:
    from argparse import Namespace

    from foredraft.train.trainers import Result

USED_BY = {
    "eagle3": "draft",
    "dflash": "draft",
    "mtp": "draft",
}  # kind -> the option that names its folder, where that is not the kind's name
TRAINING = Group("Training", sort_key=2)
DATA = Group("Data", sort_key=1)
KINDS = {
    "adapter": AdapterOptions,
    "eagle3": Eagle3Options,
    "dflash": DFlashOptions,
    "mtp": MTPOptions,
    "draft": TrainedDraftOptions,
}  # of training: what they take
TABLES = {"loss": LOSSES, "kind": ADAPTER_KINDS}  # of options whose help has a line for each name
LAYERS = ("taps", "from_layers")  # numbers of layers, which the command line has as one word
DATA_OPTIONS = (
    *("data", "validation", "self_generate", "self_temperature", "length", "skip_bad_lines", "kept_states"),
)
COMMON_OPTIONS = ("data", "self_generate", "out", "steps", "learning_rate")


def options_of(kind: Any, *marked: str) -> Any:
    """Return a dataclass of the options of a kind of training; `--help` shows those that are marked, too."""
    known, shown = {**declared(kind), **declared(TrainOptions)}, (*marked, *COMMON_OPTIONS)
    own = [name for name in known if name not in declared(TrainOptions)]
    loop = [name for name in declared(TrainOptions) if name not in DATA_OPTIONS]
    types, made = get_type_hints(kind), list[Any]()
    first = 1 if known["out"].default is MISSING else 0  # what is required comes first
    for name in (*own[:first], *DATA_OPTIONS, *own[first:], *loop):
        group = DATA if name in DATA_OPTIONS else OUTPUT if name == "out" else TRAINING
        annotated = _with_help(known[name], types[name], (COMMON, group) if name in shown else (group,))
        default = None if name in LAYERS else () if name == "data" else known[name].default
        made.append((name, annotated) if default is MISSING else (name, annotated, default))
    arguments = make_dataclass(kind.__name__, made, kw_only=True, namespace={"__module__": __name__})
    return Parameter(name="*")(arguments)


def _with_help(each: Declared, kind: Any, groups: tuple[Group, ...]) -> Any:
    how: dict[str, Any] = {"help": in_flags(each.help), "group": groups}
    if each.name in LAYERS:
        kind = str | None
    elif each.name in ("data", "validation"):
        how |= {"negative": (), "consume_multiple": True, "show_default": False}
    elif kind is bool:
        kind = Flag
    elif each.name in TABLES:
        how |= {"help": f"{how['help']}\n\n{bullets(TABLES[each.name])}", "show_choices": False}
        kind = Literal[tuple(ADAPTER_KINDS)] if each.name == "kind" else kind
    return Annotated[kind, Parameter(**how)]


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class JsonOptions:
    json: Annotated[Flag, common(OUTPUT)] = False
    """Print one JSON document instead of text, and nothing else on stdout."""
    html: Annotated[Path | None, common(OUTPUT)] = None
    """Write a report with plots to this file, one self-contained page."""


GOES_ON = """A run that ends, by Ctrl-C or otherwise, goes on from its last checkpoint with the same command.
Under torchrun several processes share the work."""
HERE = "It is used with --draft, here and in other programs."


def _command(what: str, learns: str, *marked: str) -> Callable[..., int]:
    """Return the command of a kind of training, whose help shows the options that are marked, too."""
    arguments = options_of(KINDS[what], *marked)

    def run(*, options: Any, model: TargetOptions = NONE, output: JsonOptions = JsonOptions()) -> int:
        return _run(what, options, model, output)

    run.__doc__ = f"{COMMANDS[f'train {what}'].summary}\n\nIt learns {learns} {GOES_ON}"
    run.__annotations__["options"] = arguments
    if what == "adapter":  # it needs no option
        run.__kwdefaults__ = {**(run.__kwdefaults__ or {}), "options": arguments()}
    return run


adapter = _command("adapter", "the model's next-token distribution on your text.", "depth")
eagle3 = _command(
    "eagle3",
    f"the model's next-token distribution on your text, and to go on from its own states. {HERE}",
    *("draft_vocabulary", "draft_length", "from_head"),
)
dflash = _command(
    "dflash",
    f"the model's next-token distributions on your text, for all tokens of a draft at once. {HERE}",
    *("layers", "block", "draft_vocabulary"),
)
mtp = _command(
    "mtp",
    f"the model's next-token distribution on your text, and to go on from its own states. {HERE}",
    *("draft_length", "from_head"),
)
draft = _command(
    "draft",
    "the model's next-token distribution on your text, and is used with --draft, here and in other programs.",
    *("layers", "from_layers"),
)


def _run(what: str, given: Namespace, model: Given, output: JsonOptions) -> int:
    """Train, show the progress, and print what came of it."""
    values = vars(given)
    values |= {name: _layers(values[name], name) for name in LAYERS if name in values}
    options = KINDS[what](**values)
    if values["out"] is not None:
        check_folder_place(values["out"], "out")
    if options.work is not None:
        check_folder_place(options.work, "work", kept=True)
    check_places(html=output.html)
    leads = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the first one speaks
    bars = started() if leads else None
    from foredraft.train.trainers import train  # imports PyTorch, before signals wait for the next report

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
    if leads:
        found = values["out"] is None
        print(json.dumps(result.as_dict()) if output.json else "\n".join(_lines(what, result, found=found)))
    if output.html is not None and leads:
        from foredraft.pages.training import training_page
        from foredraft.train.training_checkpoints import FILE, whole_lines

        figures = whole_lines(Path(result.work) / FILE)
        write_whole(output.html, training_page(what, result, figures, asdict(options)), "html")
    return 0


def _layers(text: str | None, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        found = (-1,)
    if min(found, default=0) < 0:
        raise ConfigError(option=option, value=text, remedy="give layers such as 0,15")
    return found


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
