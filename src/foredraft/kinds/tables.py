"""The tables of drafters, policies and acceptance rules, by the names that users give.

Contract: a new kind is one file and one line here. `load`, the command line, its help and its checks read the
tables. The functions that build an object import its module when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.decode.drafter import Drafter
    from foredraft.decode.policy import Policy
    from foredraft.drafters.adapter import Adapter
    from foredraft.drafters.skips import Skips
    from foredraft.drafters.vocabulary import VocabularyMap
    from foredraft.model.cache import KVCache
    from foredraft.model.runner import Runner
    from foredraft.model.tokenizer import Tokenizer

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "PREDICTION",
    "RULES",
    "DrafterKind",
    "Parts",
    "PolicyKind",
    "PolicyOption",
    "RuleKind",
]


@dataclass(frozen=True, slots=True)
class Parts:
    """The loaded parts that a drafter is built from.

    Attributes:
        target: Runner of the target.
        cache: The target's KV cache.
        draft: Runner of the draft model; None without one.
        rows: Rows of the target's cache.
        positions: Positions of each row of the target's cache.
        tokenizers: The target's and, where there is a draft model, the draft model's.
        vocabulary: Map from the target's ids to the draft model's; None where the ids are equal.
        skips: Sub-layers of the target that its own drafts skip; None without a plan.
        planned: Draft length that the plan was tuned for, in tokens; None where the plan does not say.
        adapter: The trained adapter; None without one.
        low_bit: Runner of the target's copy in few bits; None without one.
        low_bit_skips: Sub-layers that this copy leaves out; None for none.
        low_bit_planned: As `planned`, of the copy's plan.
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
    adapter: Adapter | None = None
    low_bit: Runner | None = None
    low_bit_skips: Skips | None = None
    low_bit_planned: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """One line of the table of drafters.

    Attributes:
        summary: Its help text.
        make: Builds the drafter; None for names that stand for no drafter of their own.
        needs_draft: It runs a draft model, with the target's tokenizer unless it `retokenizes`.
        retokenizes: Its draft model has another tokenizer than the target.
        chooses: The name stands for all loaded drafters; the policy chooses among them.
        stretch: Positions of the draft model's cache for each position of the target's cache.
        needs_plan: It runs the target without the sub-layers that a plan skips.
        needs_adapter: It runs a trained adapter over the target's first layers.
        needs_copy: It runs a copy of the target's weights in few bits.
        stepper: It returns logits, so its drafts have probabilities and can be sampled.
        lossless: The output has exactly the target's distribution.
        by_request: It drafts only for requests that bring a text for it.
    """

    summary: str
    make: Callable[[Parts], Drafter] | None
    needs_draft: bool = False
    retokenizes: bool = False
    chooses: bool = False
    stretch: int = 1
    needs_plan: bool = False
    needs_adapter: bool = False
    needs_copy: bool = False
    stepper: bool = False
    lossless: bool = True
    by_request: bool = False


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """One entry of `policy_options`: a number from `least` to `most`, or one of `words`."""

    default: float | str
    least: float = 0.0
    most: float = 1.0
    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The values to give, as error messages name them."""
        return (
            f"one of {', '.join(self.words)}"
            if self.words
            else f"a number from {self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One line of the table of policies.

    Attributes:
        summary: Its help text.
        make: Builds the policy from the longest draft, in tokens, and its settings by name.
        max_draft: Longest draft unless the user gives one, in tokens.
        settings: The entries of `policy_options` that it knows.
        uses_costs: It compares measured costs, so it can choose among several drafters.
        stops_by_content: It stops by the drafter's probabilities, which only a stepper has.
    """

    summary: str
    make: Callable[..., Policy]
    max_draft: int
    settings: Mapping[str, PolicyOption] = field(default_factory=dict)
    uses_costs: bool = False
    stops_by_content: bool = False


@dataclass(frozen=True, slots=True)
class RuleKind:
    """One line of the table of acceptance rules.

    Attributes:
        summary: Its help text.
        lossless: The output has exactly the target's distribution.
    """

    summary: str
    lossless: bool = True


def _in(module: str) -> Any:
    """Import a module of the package and return it."""
    return import_module(f"foredraft.{module}")


def _policy(name: str) -> Callable[..., Policy]:
    """Return the `make` of a policy class in `decode.policy`."""

    def make(longest: int, **settings: float | str) -> Policy:
        made: Policy = getattr(_in("decode.policy"), name)(longest, **settings)
        return made

    return make


# Draft tokens for each token of the target that the cache of a retokenizing draft model has room for. Few
# vocabularies split text into more than twice as many tokens as another one.
RETOKENIZED = 2
PREDICTION = "prediction"  # the drafter of requests that bring a text for it

DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind("plain decoding", None),
    "lookup": DrafterKind(
        "copies the tokens that followed the latest earlier match in the text",
        lambda parts: _in("drafters.lookup").Lookup(),
    ),
    PREDICTION: DrafterKind(
        "copies the text that the request predicts; without one it drafts nothing",
        lambda parts: _in("drafters.prediction").Prediction(),
        by_request=True,
    ),
    "draft-model": DrafterKind(
        "a small model with the same tokenizer",
        lambda parts: _in("drafters.draft_model").DraftModel(
            parts.draft, parts.rows, parts.positions, parts.vocabulary
        ),
        needs_draft=True,
        stepper=True,
    ),
    "retokenize": DrafterKind(
        "a small model with another tokenizer, whose text is encoded again for the target",
        lambda parts: _in("drafters.retokenize").Retokenize(
            parts.draft, parts.rows, RETOKENIZED * parts.positions, *parts.tokenizers
        ),
        needs_draft=True,
        retokenizes=True,
        stretch=RETOKENIZED,
    ),
    "layer-skip": DrafterKind(
        "the model itself without some of its layers",
        lambda parts: _in("drafters.layer_skip").LayerSkip(
            parts.target, parts.cache, parts.skips, parts.planned
        ),
        needs_plan=True,
        stepper=True,
    ),
    "kangaroo": DrafterKind(
        "its first layers and a trained adapter",
        lambda parts: _in("drafters.kangaroo").Kangaroo(parts.target, parts.cache, parts.adapter),
        needs_adapter=True,
        stepper=True,
    ),
    "low-bit": DrafterKind(
        "the model itself with its weights in 4 or 8 bits",
        lambda parts: _in("drafters.low_bit").LowBit(
            parts.low_bit, parts.cache, parts.low_bit_skips, parts.low_bit_planned
        ),
        needs_copy=True,
        stepper=True,
    ),
    "auto": DrafterKind("the loaded drafter that pays most, by measured costs", None, chooses=True),
}

POLICIES: dict[str, PolicyKind] = {
    "auto": PolicyKind(
        "drafts while one more token pays by measured costs, and not at all where no draft pays",
        _policy("Auto"),
        max_draft=10,
        uses_costs=True,
    ),
    "fixed": PolicyKind("always the longest draft", _policy("Fixed"), max_draft=5),
    "heuristic": PolicyKind(
        "2 tokens more after a fully accepted draft, 1 fewer otherwise",
        _policy("Heuristic"),
        max_draft=10,
    ),
    "confidence": PolicyKind(
        "stops after the first token at which the drafter's top probability is below a threshold",
        _policy("Confidence"),
        max_draft=10,
        settings={"threshold": PolicyOption(0.6)},
        stops_by_content=True,
    ),
    "adaptive-exit": PolicyKind(
        "as confidence, with a threshold that follows a target acceptance rate",
        _policy("AdaptiveExit"),
        max_draft=12,
        settings={
            "target": PolicyOption(0.9),
            "first": PolicyOption(0.6),
            "epsilon": PolicyOption(0.01),
            "beta1": PolicyOption(0.5),
            "beta2": PolicyOption(0.9),
        },
        stops_by_content=True,
    ),
    "target-confidence": PolicyKind(
        "the longest draft, or none while the target's confidence in its last token is below a threshold",
        _policy("TargetConfidence"),
        max_draft=5,
        settings={
            "threshold": PolicyOption(0.5),
            "by": PolicyOption("probability", words=("probability", "entropy", "margin")),
        },
    ),
    "fallback": PolicyKind(
        "stops before the first token at which the drafter's top probability is below a threshold",
        _policy("Fallback"),
        max_draft=10,
        settings={"threshold": PolicyOption(0.6)},
        stops_by_content=True,
    ),
}

RULES: dict[str, RuleKind] = {
    "speculative": RuleKind("accepts more tokens"),
    "coupled": RuleKind("same seed, same text, whatever the drafter"),
    "bild": RuleKind("keeps drafted tokens unless they surprise the target", lossless=False),
}
