"""The tables of kinds: drafters and policies, by the names that users give.

Contract: a new kind is one file and one line here; `load`, the command line, its help and its checks read
the tables. Nothing here imports PyTorch before something is made, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.decode.draft import Drafter
    from foredraft.decode.policy import Policy
    from foredraft.model.runner import Runner

__all__ = ["DRAFTERS", "POLICIES", "DrafterKind", "Parts", "PolicyKind", "default_drafter"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be made of; rows, positions: as the target's cache has."""

    target: Runner
    draft: Runner | None
    rows: int
    positions: int


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A line of the drafters' table.

    make: None where nothing drafts. needs_draft: it is made of a draft model. stepper: it gives logits, from
    which a draft is sampled or taken greedily. lossless: the output has exactly the target's law.
    """

    summary: str
    make: Callable[[Parts], Drafter] | None
    needs_draft: bool = False
    stepper: bool = False
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A line of the policies' table. make: from the longest draft, which is max_draft unless given."""

    summary: str
    make: Callable[[int], Policy]
    max_draft: int


def _in(module: str) -> Any:
    """The names in a module, which is imported now."""
    return import_module(f"foredraft.{module}")


DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind("plain decoding", None),
    "lookup": DrafterKind(
        "the text so far drafts: what followed the latest match",
        lambda parts: _in("drafters.lookup").Lookup(),
    ),
    "draft-model": DrafterKind(
        "a small model with the same tokenizer drafts",
        lambda parts: _in("drafters.draft_model").DraftModel(parts.draft, parts.rows, parts.positions),
        needs_draft=True,
        stepper=True,
    ),
}

POLICIES: dict[str, PolicyKind] = {
    "fixed": PolicyKind(
        "always the longest draft", lambda longest: _in("decode.policy").Fixed(longest), max_draft=5
    ),
    "heuristic": PolicyKind(
        "two more after a draft accepted whole, one fewer otherwise",
        lambda longest: _in("decode.policy").Heuristic(longest),
        max_draft=10,
    ),
}


def default_drafter(draft_given: bool) -> str:
    """Who drafts where nobody is named."""
    return "draft-model" if draft_given else "none"
