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
    from foredraft.drafters.skips import Skips
    from foredraft.drafters.vocabulary import VocabularyMap
    from foredraft.model.cache import KVCache
    from foredraft.model.runner import Runner
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["DRAFTERS", "POLICIES", "DrafterKind", "Parts", "PolicyKind", "default_drafter"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be made of; rows, positions: as the target's cache has.

    cache: the target's. tokenizers: the target's and the draft's. vocabulary: between the two, None where
    their ids are the same. skips: what of the target a draft of its own leaves out.
    """

    target: Runner
    cache: KVCache
    draft: Runner | None
    rows: int
    positions: int
    tokenizers: tuple[Tokenizer | None, ...] = ()
    vocabulary: VocabularyMap | None = None
    skips: Skips | None = None


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A line of the drafters' table.

    make: None where nothing drafts. needs_draft: it is made of a draft model, which has the target's
    tokenizer or, if the drafter `retokenizes`, another. stretch: positions of the draft's cache for each of
    the target's. needs_plan: it is made of the target, less what a plan leaves out. stepper: it gives logits,
    from which a draft is sampled or taken greedily. lossless: the output has exactly the target's law.
    """

    summary: str
    make: Callable[[Parts], Drafter] | None
    needs_draft: bool = False
    retokenizes: bool = False
    stretch: int = 1
    needs_plan: bool = False
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


# A draft's tokens for one of the target's that there is room for: few vocabularies are twice as fine.
RETOKENIZED = 2

DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind("plain decoding", None),
    "lookup": DrafterKind(
        "the text so far drafts: what followed the latest match",
        lambda parts: _in("drafters.lookup").Lookup(),
    ),
    "draft-model": DrafterKind(
        "a small model with the same tokenizer drafts",
        lambda parts: _in("drafters.draft_model").DraftModel(
            parts.draft, parts.rows, parts.positions, parts.vocabulary
        ),
        needs_draft=True,
        stepper=True,
    ),
    "retokenize": DrafterKind(
        "a small model with another tokenizer drafts text, encoded anew for the target",
        lambda parts: _in("drafters.retokenize").Retokenize(
            parts.draft, parts.rows, RETOKENIZED * parts.positions, *parts.tokenizers
        ),
        needs_draft=True,
        retokenizes=True,
        stretch=RETOKENIZED,
    ),
    "layer-skip": DrafterKind(
        "the model itself drafts, with some of its layers left out",
        lambda parts: _in("drafters.layer_skip").LayerSkip(parts.target, parts.cache, parts.skips),
        needs_plan=True,
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


def default_drafter(draft_given: bool, other_tokenizer: bool = False, *, plan_given: bool = False) -> str:
    """Who drafts where nobody is named; other_tokenizer: the draft model has one of its own."""
    if plan_given:
        return "layer-skip"
    if not draft_given:
        return "none"
    return "retokenize" if other_tokenizer else "draft-model"
