"""Every spelling of a published head: its drafter, the writer of tiny ones, and the definition of its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tests.support import eagle, eagle3_gguf, heads, medusa

__all__ = ["SPELLED", "Spelled"]


@dataclass(frozen=True)
class Spelled:
    """One spelling.

    Attributes:
        drafter: Reads it.
        save: Writes a tiny random one: folder, spelling, vocabulary.
        define: Gives the logits of a draft: place, target, text, drafted tokens.
        words: Of its own vocabulary; None where that is the target's.
    """

    drafter: str
    save: Callable[..., Path]
    define: Callable[..., Tensor]
    words: int | None = None


SPELLED: dict[str, Spelled] = {
    **{name: Spelled("eagle3", heads.save_head, heads.defined_logits, form.get("words"))
       for name, form in heads.SPELLINGS.items()},
    **{name: Spelled("eagle3", eagle3_gguf.save_gguf_head, eagle3_gguf.defined_gguf,
                     heads.SPELLINGS[form[0]].get("words"))
       for name, form in eagle3_gguf.SPELLINGS.items()},
    **{name: Spelled("eagle", eagle.save_eagle, eagle.defined_eagle) for name in eagle.SPELLINGS},
    **{name: Spelled("medusa", medusa.save_medusa, medusa.defined_medusa, form.get("words"))
       for name, form in medusa.SPELLINGS.items()},
}  # fmt: skip
