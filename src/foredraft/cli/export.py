"""`foredraft export`: a head in the format of another engine.

stdout has a line, or with --json one JSON document. The exit code is 0 when the head was written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from foredraft.cli.options import (
    MODEL,
    NONE,
    OUTPUT,
    Flag,
    SourceOptions,
    bullets,
    common,
    load_options,
)
from foredraft.export.formats import FORMATS

if TYPE_CHECKING:
    FormatName: TypeAlias = str
else:
    FormatName = Literal[tuple(FORMATS)]

__all__ = ["export"]


def export(
    *,
    draft: Annotated[Path, common(MODEL)],
    format: Annotated[
        FormatName,
        common(OUTPUT, help=f"The format.\n\n{bullets(FORMATS)}", show_choices=False),
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
    print(f"written to {result.out}: {result.words:,} words, over the states after layers {taps}")
    return 0
