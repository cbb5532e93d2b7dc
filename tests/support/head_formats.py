"""Every format of a published head: its drafter, the writer of tiny ones, and the definition of its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support import blocks, blocks_gguf, eagle, eagle3_gguf, heads, medusa


@dataclass(frozen=True)
class FileFormat:
    drafter: str  # reads it
    save: Callable[..., Path]  # writes a tiny random one: folder, format, vocabulary
    define: Callable[..., Tensor]  # gives the logits of a draft: place, target, text, drafted tokens
    draft_vocab: int | None = None  # the size; None where it is that of the target's vocabulary


def block(format: str) -> FileFormat:
    """Return a format of a DFlash or DSpark head, or of a GGUF file of one."""
    of_file = format in blocks_gguf.FORMATS
    form = blocks.FORMATS[blocks_gguf.FORMATS[format][0] if of_file else format]
    save, define = (
        (blocks_gguf.save_block_gguf, blocks_gguf.defined_gguf)
        if of_file
        else (blocks.save_block, blocks.defined_logits)
    )

    def save_one(place: Path, _: str, vocabulary: int, **head: Any) -> Path:
        return save(place, format, vocabulary, **head)

    return FileFormat(form["of"], save_one, define, form.get("draft_vocab"))


# of a block, a name may be that of an EAGLE-3 head, too
BLOCKS = {f"block {name}": block(name) for name in (*blocks.FORMATS, *blocks_gguf.FORMATS)}
FILE_FORMATS: dict[str, FileFormat] = {
    **{name: FileFormat("eagle3", heads.save_head, heads.defined_logits, form.get("draft_vocab"))
       for name, form in heads.FORMATS.items()},
    **{name: FileFormat("eagle3", eagle3_gguf.save_gguf_head, eagle3_gguf.defined_gguf,
                        heads.FORMATS[form[0]].get("draft_vocab"))
       for name, form in eagle3_gguf.FORMATS.items()},
    **{name: FileFormat("eagle", eagle.save_eagle, eagle.defined_eagle) for name in eagle.FORMATS},
    **{name: FileFormat("medusa", medusa.save_medusa, medusa.defined_medusa, form.get("draft_vocab"))
       for name, form in medusa.FORMATS.items()},
    **BLOCKS,
}  # fmt: skip
