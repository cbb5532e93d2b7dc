"""`foredraft export`, a head in the format of another engine, and `quantise`, a checkpoint of few bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from cyclopts import Parameter

from foredraft.cli.options import MODEL, OUTPUT, Flag, SourceOptions, bullets, common, load_options
from foredraft.cli.sections import COMMON, NONE
from foredraft.export import FORMATS
from foredraft.files import check_folder_place

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
