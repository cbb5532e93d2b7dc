"""Commands about files of models: `info`, `doctor`, `export` and `quantise`.

`info` loads no weights."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from cyclopts import Parameter

from foredraft.cli.options import (
    MODEL,
    OUTPUT,
    DocumentOptions,
    DraftModelOptions,
    Flag,
    SourceOptions,
    TargetOptions,
    bullets,
    common,
    load_options,
)
from foredraft.cli.render import ProgressBars, started
from foredraft.cli.sections import COMMON, NONE
from foredraft.cli.words import as_flag, check_places, table, write_report
from foredraft.errors import ConfigError, Option
from foredraft.export import FORMATS
from foredraft.files import check_folder_place

if TYPE_CHECKING:
    from foredraft.doctor import Diagnosis, SettingTrial
    from foredraft.loading.inspection import Context, Inspection, LoraInfo, ModelInfo, PairInfo


def info(
    name: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    target: TargetOptions = NONE,
    drafting: DraftModelOptions = NONE,
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Show what a model is, which memory it needs, which drafters it has, and whether a draft model fits it.

    No weights are loaded. Of a model on the Hugging Face Hub only the small files are downloaded. A model
    that Foredraft cannot run is refused with the reason.

    Parameters
    ----------
    name
        The model: a folder, a GGUF file or a Hugging Face id, as --model takes it. Default: the demo models.
    """
    if name is not None and "model" in target:
        raise ConfigError(
            ("the model is given as an argument and by ", Option("model")), remedy="leave one out"
        )
    check_places(out=output.out)
    from foredraft.loading.inspection import inspect_models

    with ProgressBars() as bars:
        found = inspect_models(
            target.get("model", name), **load_options(target, drafting), progress=bars.show, spelling=as_flag
        )
    write_report(found.as_dict(), lambda width: lines(found, width), output)
    return 0


def lines(found: Inspection, width: int | None = None) -> list[str]:
    """Return the inspection as tables, at most `width` characters wide, and sentences."""
    shown = [line for model in found.models for line in (about(model), *map(about_lora, model.loras))]
    shown += ["", *memory(found, width), "", room(found.context, found), found.threads.why]
    shown += [] if found.kernels is None else [found.kernels]
    rows = [("drafter", "at hand", "")]
    for each in found.drafters:
        fits = found.pair is not None and each.name == found.pair.drafter
        note = fit(found.pair, found.models) if found.pair is not None and fits else each.note or ""
        rows.append((each.name, "yes" if each.at_hand else "no", note))
    shown += ["", *table(rows, width)]
    return shown + [
        f"The weights of the {model.role} are not downloaded, so its tensors were not checked."
        for model in found.models
        if not model.weights_checked
    ]


def about(model: ModelInfo) -> str:
    stored = "" if model.quantisation is None else f"{model.quantisation}, computing in "
    name, file = model.name or "demo", PurePath(model.folder)
    if file.suffix == ".gguf" and PurePath(name).name != file.name:  # the one of a folder or a repository
        name += f" ({file.name})"
    return (
        f"{model.role}: {name}, {model.architecture}, {model.parameters / 1e6:,.1f} M"
        f" parameters, {stored}{model.dtype}; {model.layers} layers of {model.hidden_size:,}, vocabulary"
        f" {model.vocab_size:,}"
        f"{'' if model.tokenizer else ', no tokenizer'}; up to {model.max_positions:,} tokens"
    )


def about_lora(lora: LoraInfo) -> str:
    parts = [f"{count} {name}" for name, count in lora.modules.items()]
    if lora.ranks:
        alphas = " and ".join(f"{alpha:g}" for alpha in lora.alphas)
        root = " over the root of the rank" if lora.scaled_by != "r" else ""
        parts.insert(0, f"rank {' and '.join(map(str, lora.ranks))}, alpha {alphas}{root}")
    if lora.replaced:
        parts.append(f"{lora.replaced} tensor{'s' if lora.replaced > 1 else ''} replaced")
    base = "" if lora.base is None else f"; made for {lora.base}"
    return f"LoRA: {lora.name}, {', '.join(parts)}{base}"


def memory(found: Inspection, width: int | None) -> list[str]:
    from foredraft.loading.inspection import CACHED_TOKENS
    from foredraft.model.quantisation.codes import BITS

    models = found.models
    labels = {32: "weights in 32 bits", 16: "weights in 16 bits"}
    labels |= {bits: f"weights with --weights {name}" for name, bits in BITS.items()}
    rows = [
        (label, *(in_gib(model.weight_bytes[bits]) if bits in model.weight_bytes else "" for model in models))
        for bits, label in sorted(labels.items(), reverse=True)
        if any(bits in model.weight_bytes for model in models)
    ]
    rows.append((f"KV cache of {CACHED_TOKENS:,} tokens", *(in_gib(model.cache_bytes) for model in models)))
    if any(model.state_bytes for model in models):
        rows.append(("states of a text", *(in_gib(model.state_bytes) for model in models)))
        rows.append(("a snapshot of them", *(in_gib(model.snapshot_bytes) for model in models)))
    coded = any(model.quantisation is not None for model in models)
    note = ["Quantised weights stay coded where the kernels read their format; the dtype is of the others."]
    expanded = [
        f"The {model.role}'s weights of {format} are expanded to {model.dtype}: {in_gib(size)} GiB."
        for model in models
        for format, size in model.expanded_bytes.items()
    ]
    left_out = [
        f"--weights {name} would take {in_gib(size)} GiB, no less than {models[0].dtype}: weights"
        " that no kernel here reads as codes stay as they are."
        for name, bits in BITS.items()
        if (size := models[0].larger_bytes.get(bits)) is not None
    ]
    header = "GiB", *(model.role for model in models)
    return [*table([header, *rows], width), *left_out, *note * coded, *expanded]


def in_gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


def room(context: Context, found: Inspection) -> str:
    """Return one line on the length of sequences that fit into memory."""
    from foredraft.model.memory import as_gib

    free = f"{as_gib(found.free_bytes)} are free on {found.device}"
    if context.longest is None or context.refusal is not None:
        return f"{free}: {context.refusal}"
    limit = found.models[0].max_positions
    most = "the model's limit" if context.longest == limit else f"the model's limit is {limit:,}"
    return (
        f"{free}: room for one sequence of {context.longest:,} tokens ({most}), or by default {context.rows}"
        f" sequences of {context.positions:,}"
    )


def fit(pair: PairInfo, models: tuple[ModelInfo, ...]) -> str:
    target, draft = models
    compared = target.tokenizer and draft.tokenizer
    same = "the target's tokenizer" if compared else "the target's vocabulary size, no tokenizers to compare"
    sizes = f"{draft.vocab_size:,} of {target.vocab_size:,} ids"
    return (
        f"{same if pair.same_tokenizer else 'another tokenizer'}, {sizes}; the target has"
        f" {pair.parameter_ratio:.1f} x its parameters"
    )


def doctor(
    *texts: str,
    target: TargetOptions = NONE,
    drafting: DraftModelOptions = NONE,
    dry_run: Annotated[Flag, common(OUTPUT)] = False,
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Measure how well a head or a draft model is accepted, and find the setting that it was trained with.

    Nothing is decoded: target and drafter read a short sample, and their distributions are compared. Of an
    EAGLE, DFlash, DSpark or MTP head the doctor tries the usual ways in which one is misread, and writes the
    best setting beside the head, where loading finds it. A setting changes the speed, never the text.
    Without --draft it examines the model's own layer for further tokens (MTP).

    Parameters
    ----------
    texts
        The sample; without any, one that ships with Foredraft. Texts of the kind that you generate tell more.
    dry_run
        Write nothing.
    """
    own = "draft" not in drafting
    if own and "model" not in target:
        raise ConfigError("no drafter to examine", remedy=("give ", Option("draft"), ", its folder"))
    check_places(out=output.out)
    with started() as bars:
        from foredraft.doctor import diagnose
        from foredraft.doctor.examination import SAMPLE
        from foredraft.loading import load_for, options_for
        from foredraft.loading.checkpoints import find_draft

        model, options = target.get("model"), load_options(target, drafting)
        options |= {"drafter": "mtp"} if own else {}
        folder = find_draft(options_for(model, **options))
        llm = load_for(lambda tokenizer, defaults: (1, 64), model, policy="fixed", **options)
        place = folder or Path(llm.model)
        found = diagnose(llm.loaded, place, texts or SAMPLE, write=not dry_run, progress=bars.show)
    write_report(found.as_dict(), lambda width: diagnosis_lines(found, width), output)
    return 0


def diagnosis_lines(found: Diagnosis, width: int | None = None) -> list[str]:
    """Return the diagnosis as tables, at most `width` characters wide, and sentences."""
    shown = [f"{found.drafter} {found.name}, {found.drafts} drafts on the sample", ""]
    positions = range(1, len(found.own.sampled) + 1)
    rows = [("", *(f"token {n}" for n in positions))]
    rows.append(("accepted at temperature 1", *(f"{100 * share:.0f} %" for share in found.own.sampled)))
    rows.append(("accepted at temperature 0", *(f"{100 * share:.0f} %" for share in found.own.greedy)))
    shown += table(rows, width)
    if found.trials:
        trials = [("setting", "tokens a round", "gain"), ("as its files say", f"{found.own.tau:.2f}", "")]
        for each in sorted(found.trials, key=lambda trial: -trial.tau):
            trials.append((described(each), f"{each.tau:.2f}", f"{each.gain:+.2f} ± {each.doubt:.2f}"))
        shown += ["", *table(trials, width)]
    shown += ["", verdict(found)]
    return shown + [f"Note: {note}." for note in found.notes]


def described(trial: SettingTrial) -> str:
    """Return the setting of a trial, as in "tap_shift = 1"."""
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in trial.settings.items())


def verdict(found: Diagnosis) -> str:
    if not found.improved:
        return f"This is as good as it gets here: {found.own.tau:.2f} tokens a round."
    kept = "" if found.written is None else f" It is written to {found.written}, and loading honours it."
    return (
        f"Better: {described(found.best)}, {found.own.tau:.2f} -> {found.best.tau:.2f} tokens a round.{kept}"
    )


if TYPE_CHECKING:
    FormatName: TypeAlias = str
else:
    FormatName = Literal[tuple(FORMATS)]


def export(
    *,
    draft: Annotated[Path, common(MODEL)],
    format: Annotated[
        FormatName, common(OUTPUT, help=f"The format.\n\n{bullets(FORMATS)}", show_choices=False)
    ],
    out: Annotated[Path, common(OUTPUT)],
    source: SourceOptions = NONE,
    json_output: Annotated[Flag, common(OUTPUT, name="--json")] = False,
) -> int:
    """Write an EAGLE-3 head in the format of another engine, value for value.

    Settings that `foredraft doctor` wrote beside the head go into the new file.

    Parameters
    ----------
    draft
        The head's folder.
    out
        Folder to write, or the file.
    json_output
        Print one JSON document instead of text.
    """
    from foredraft.export.command import export_head

    result = export_head(draft, format, out, source.get("model"), **load_options(source))
    if json_output:
        print(json.dumps(result.as_dict()))
        return 0
    taps = ", ".join(map(str, result.taps))
    print(f"written to {result.out}: draft vocabulary {result.words:,}, over the states after layers {taps}")
    return 0


def quantise(
    *,
    out: Annotated[Path, common(OUTPUT)],
    weights: Annotated[Literal["int4", "int8"], common(MODEL)] = "int8",
    data: Annotated[
        tuple[Path, ...],
        Parameter(group=(COMMON, OUTPUT), negative=(), consume_multiple=True, show_default=False),
    ] = (),
    source: SourceOptions = NONE,
    json_output: Annotated[Flag, common(OUTPUT, name="--json")] = False,
) -> int:
    """Write a model with weights of 4 or 8 bits as a checkpoint, which other programs load too.

    Parameters
    ----------
    out
        Folder to write: weights in the format of compressed-tensors, all other files, and a card.
    weights
        Bits of the linear layers and the head, in groups of 32.
    data
        Files of text, of prompts, JSON Lines or Parquet to compare the models on; the card then says what was
        lost.
    json_output
        Print one JSON document instead of text.
    """
    check_folder_place(out, "out")
    from foredraft.quantise import quantise_checkpoint

    result = quantise_checkpoint(source.get("model"), weights, out, data=data, **load_options(source))
    if json_output:
        print(json.dumps(result.as_dict()))
        return 0
    print(f"written to {result.out}: {result.bytes / 1e6:,.1f} MB")
    if (quality := result.quality) is not None:
        print(
            f"over {quality.tokens:,} tokens: KL {quality.kl:.4f} nats (1 in 1,000 above"
            f" {quality.kl_999:.3f}; by the embedding alone {quality.embedding_kl:.4f}), same likeliest token"
            f" {quality.same_top:.1%}, perplexity ratio {quality.perplexity_ratio:.4f}"
        )
    print(f"use it with --model {result.out}")
    return 0
