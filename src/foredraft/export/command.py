"""The command: checks of the options, and the folder or the file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foredraft import demo
from foredraft.drafters.heads.eagle3_files import CONFIG, OTHERS, is_eagle3
from foredraft.drafters.heads.eagle3_writing import (
    WEIGHTS,
    head_config,
    specforge_lacks,
    speculators_names,
    write_head,
)
from foredraft.drafters.heads.stored_head import StoredHead, read_stored_head
from foredraft.errors import ConfigError, Option
from foredraft.export.formats import GGUF, SPECFORGE, SPECULATORS
from foredraft.export.gguf_head import write_gguf_head
from foredraft.files import replacing
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.model.unread import Checkpoint
from foredraft.train.preparation import check_out

__all__ = ["Exported", "export_head"]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        out: The folder, or the file.
        format: A name of `formats`.
        taps: The numbers of the target's layers after which the head reads.
        words: That it can draft.
    """

    out: str
    format: str
    taps: tuple[int, ...]
    words: int

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def export_head(draft: Path, format: str, out: Path, model: str | None = None, **load: Any) -> Exported:
    """Write a head in the format of another engine.

    Args:
        draft: The head's folder.
        format: A name of `formats`.
        out: The folder to write, or the file.
        model: Its target: a folder, a GGUF file or a hub id; None is the demo target.
        **load: Of the arguments of `foredraft.load`: revision, dtype.

    Raises:
        ConfigError: An option cannot be honoured, or the format cannot hold this head.
        CheckpointError: The head or the target cannot be read.
    """
    if not is_eagle3(draft):
        raise ConfigError(
            "which is no EAGLE-3 head", option="draft", value=str(draft), remedy="give a head's folder"
        )
    given = options_for(model or demo.target_path(), device="cpu", draft=None, **load)
    target = find_target(given)
    head = read_stored_head(draft, target)
    try:
        if format == GGUF:
            if out.is_dir():
                raise ConfigError("which is a folder", option="out", value=str(out), remedy="give a file")
            with replacing(out) as new:
                write_gguf_head(new, head, target)
        else:
            check_out(out, lambda found: not found.samefile(draft) and _is_head(found))
            write_head(out, *_folder(head, format, target))
    except OSError as error:
        raise ConfigError(
            f"which cannot be written ({error.strerror})", option="out", value=str(out),
            remedy="give another place",
        ) from error  # fmt: skip
    return Exported(str(out), format, head.record.taps or (), head.record.words)


def _is_head(folder: Path) -> bool:
    return is_eagle3(folder) and {file.name for file in folder.iterdir()} <= {CONFIG, WEIGHTS}


def _folder(head: StoredHead, format: str, target: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the tensors of a folder."""
    if format == SPECULATORS:
        record = replace(head.record, spelling=SPECULATORS)
        return head_config(head.body, record, target, head.dtype), speculators_names(head.tensors)
    assert format == SPECFORGE
    if (feature := specforge_lacks(head.record)) is not None:
        raise ConfigError(
            f"a head with {feature} is none that SGLang computes", option="format", value=format,
            remedy=("give ", Option("format", SPECULATORS)),
        )  # fmt: skip
    record = replace(head.record, spelling=OTHERS)
    return head_config(head.body, record, target, head.dtype), dict(head.tensors)
