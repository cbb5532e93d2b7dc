"""The tables of kinds: drafters, policies and acceptance rules, by the names that users give.

Contract: a new kind is one file and one line here; `load`, the command line, its help and its checks read
the tables. Nothing here imports PyTorch before something is made, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.decode.drafter import Drafter
    from foredraft.decode.policy import Policy
    from foredraft.drafters.skips import Skips
    from foredraft.drafters.vocabulary import VocabularyMap
    from foredraft.model.cache import KVCache
    from foredraft.model.runner import Runner
    from foredraft.model.tokenizer import Tokenizer

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "RULES",
    "DrafterKind",
    "Parts",
    "PolicyKind",
    "PolicyOption",
    "RuleKind",
    "default_drafter",
    "suits",
]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be made of; rows, positions: as the target's cache has.

    cache: the target's. tokenizers: the target's and the draft's. vocabulary: between the two, None where
    their ids are the same. skips: what of the target a draft of its own leaves out; planned: how many
    tokens such a draft is best at, if its plan tells.
    """

    target: Runner
    cache: KVCache
    draft: Runner | None
    rows: int
    positions: int
    tokenizers: tuple[Tokenizer | None, ...] = ()
    vocabulary: VocabularyMap | None = None
    skips: Skips | None = None
    planned: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A line of the drafters' table.

    make: None where nothing drafts of its own. needs_draft: it is made of a draft model, which has the
    target's tokenizer or, if the drafter `retokenizes`, another. chooses: it stands for all that are loaded,
    of whom the policy chooses. stretch: positions of the draft's cache for each of the target's. needs_plan:
    it is made of the target, less what a plan leaves out. stepper: it gives logits, from which a draft is
    sampled or taken greedily. lossless: the output has exactly the target's law.
    """

    summary: str
    make: Callable[[Parts], Drafter] | None
    needs_draft: bool = False
    retokenizes: bool = False
    chooses: bool = False
    stretch: int = 1
    needs_plan: bool = False
    stepper: bool = False
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """A number that a policy can be given, from least to most, or one of some words."""

    default: float | str
    least: float = 0.0
    most: float = 1.0
    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return (
            f"one of {', '.join(self.words)}"
            if self.words
            else f"a number from {self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A line of the policies' table. make: from the longest draft, which is max_draft unless given, and the
    settings by name. weighs: costs decide, so that it can choose among drafters. confident: it asks how sure
    the drafter is, which only a stepper can tell."""

    summary: str
    make: Callable[..., Policy]
    max_draft: int
    settings: Mapping[str, PolicyOption] = field(default_factory=dict)
    weighs: bool = False
    confident: bool = False


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A line of the acceptance rules' table. lossless: the output has exactly the target's law."""

    summary: str
    lossless: bool = True


def _in(module: str) -> Any:
    """The names in a module, which is imported now."""
    return import_module(f"foredraft.{module}")


def _policy(name: str) -> Callable[..., Policy]:
    """Makes one of `decode.policy`, of the longest draft and its own settings."""

    def make(longest: int, **settings: float | str) -> Policy:
        made: Policy = getattr(_in("decode.policy"), name)(longest, **settings)
        return made

    return make


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
        lambda parts: _in("drafters.layer_skip").LayerSkip(
            parts.target, parts.cache, parts.skips, parts.planned
        ),
        needs_plan=True,
        stepper=True,
    ),
    "auto": DrafterKind(
        "of those that are loaded, the one that pays most, round by round", None, chooses=True
    ),
}

POLICIES: dict[str, PolicyKind] = {
    "auto": PolicyKind(
        "as long as one more token pays, by measured costs; no draft where none does",
        _policy("Auto"),
        max_draft=10,
        weighs=True,
    ),
    "fixed": PolicyKind("always the longest draft", _policy("Fixed"), max_draft=5),
    "heuristic": PolicyKind(
        "two more after a draft accepted whole, one fewer otherwise",
        _policy("Heuristic"),
        max_draft=10,
    ),
    "confidence": PolicyKind(
        "until the drafter is less sure than a threshold",
        _policy("Confidence"),
        max_draft=10,
        settings={"threshold": PolicyOption(0.6)},
        confident=True,
    ),
    "adaptive-exit": PolicyKind(
        "the same, and the threshold moves towards a share of drafted tokens that are kept",
        _policy("AdaptiveExit"),
        max_draft=12,
        settings={
            "target": PolicyOption(0.9),
            "first": PolicyOption(0.6),
            "epsilon": PolicyOption(0.01),
            "beta1": PolicyOption(0.5),
            "beta2": PolicyOption(0.9),
        },
        confident=True,
    ),
    "target-confidence": PolicyKind(
        "none while the target was unsure of its last token, else the longest",
        _policy("TargetConfidence"),
        max_draft=5,
        settings={
            "threshold": PolicyOption(0.5),
            "by": PolicyOption("probability", words=("probability", "entropy", "margin")),
        },
    ),
    "fallback": PolicyKind(
        "until the drafter is unsure, and not the token that it is unsure of",
        _policy("Fallback"),
        max_draft=10,
        settings={"threshold": PolicyOption(0.6)},
        confident=True,
    ),
}

RULES: dict[str, RuleKind] = {
    "speculative": RuleKind("accepts more"),
    "coupled": RuleKind("one text per seed, however it is drafted"),
    "bild": RuleKind("lets a draft stand unless it surprises the target", lossless=False),
}


def default_drafter(draft_given: bool, other_tokenizer: bool = False, *, plan_given: bool = False) -> str:
    """Who drafts where nobody is named; other_tokenizer: the draft model has one of its own."""
    if plan_given:
        return "layer-skip"
    if not draft_given:
        return "none"
    return "retokenize" if other_tokenizer else "draft-model"


def suits(drafter: str, policy: str) -> bool:
    """Whether a policy can decide about a drafter: only one that weighs costs chooses among several, and only
    a stepper can tell how sure it is."""
    who, how = DRAFTERS[drafter], POLICIES[policy]
    return (how.weighs or not who.chooses) and (who.stepper or not how.confident)
