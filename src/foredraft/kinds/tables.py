"""The tables of drafters, policies and acceptance rules, by the names that users give.

Contract: a new kind is one file and one line here. `load`, the command line, its help and its checks read the
tables, and ask a drafter's own asset (`drafters.asset`) for the rest. The functions that return an object
import its module when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from foredraft.drafters.asset import DEFAULT_COPY

if TYPE_CHECKING:
    from foredraft.decode.policy import Policy
    from foredraft.drafters.asset import Asset


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """One line of the table of drafters."""

    summary: str  # its help text
    # imports its file and returns its asset; None for names that stand for no drafter of their own
    asset: Callable[[], Asset] | None = None
    # the option of `load` that gives the asset, and so makes the drafter the default one under a policy that
    # decides about one drafter; None where the asset is not given
    given_by: str | None = None
    reads: tuple[str, ...] = ()  # further options of `load` that the asset reads
    # options of `load`, with their values, that have the asset made beside another drafter
    wanted_by: Mapping[str, str | int] = field(default_factory=dict)
    chooses: bool = False  # the name stands for all loaded drafters; the policy chooses among them
    autoregressive: bool = False  # it returns logits: its drafts have probabilities and can be sampled
    lossless: bool = True  # the output has exactly the target's distribution
    by_request: bool = False  # it drafts only for requests that bring a text for it

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `load` that its asset reads."""
        return (*([] if self.given_by is None else [self.given_by]), *self.reads)


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """One entry of `policy_options`: a number from `least` to `most`, perhaps `whole`, or one of `words`."""

    default: float | str
    least: float = 0.0
    most: float = 1.0
    words: tuple[str, ...] = ()
    whole: bool = False

    @property
    def allowed(self) -> str:
        """The values to give, as error messages name them."""
        if self.words:
            return f"one of {', '.join(self.words)}"
        return f"a {'whole ' * self.whole}number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One line of the table of policies."""

    summary: str  # its help text
    make: Callable[..., Policy]  # builds the policy from the longest draft, in tokens, and its settings
    max_draft: int  # longest draft unless the user gives one, in tokens
    settings: Mapping[str, PolicyOption] = field(default_factory=dict)  # the `policy_options` that it knows
    uses_costs: bool = False  # it compares measured costs, so it can choose among several drafters
    stops_by_content: bool = False  # it stops by probabilities, which autoregressive drafters alone have


@dataclass(frozen=True, slots=True)
class RuleKind:
    """One line of the table of acceptance rules."""

    summary: str  # its help text
    lossless: bool = True  # the output has exactly the target's distribution


def _in(module: str, name: str) -> Any:
    """Import a module of the package and return what it calls so."""
    return getattr(import_module(f"foredraft.{module}"), name)


def _policy(name: str, module: str = "decode.policy") -> Callable[..., Policy]:
    """Return the `make` of a policy class in a module."""
    return lambda longest, **settings: _in(module, name)(longest, **settings)


def _asset(module: str, name: str = "ASSET") -> Callable[[], Asset]:
    """Return the `asset` of a line: what a module of `drafters` calls so."""
    return lambda: _in(f"drafters.{module}", name)


def _head(summary: str, asset: str) -> DrafterKind:
    """Return the line of a drafter whose weights are a head of the target."""
    found = _asset("assets", asset)
    return DrafterKind(summary, found, given_by="draft", autoregressive=True)


PREDICTION = "prediction"  # the drafter of requests that bring a text for it

DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind("plain decoding"),
    "lookup": DrafterKind("copies what followed the latest match before", _asset("lookup")),
    "suffix": DrafterKind(
        "copies after the longest match in any text",
        _asset("assets", "TEXTS_ASSET"),
        reads=("recent_texts", "texts_file"),
        wanted_by={"recent_texts": 0},
    ),
    PREDICTION: DrafterKind(
        "copies the text that the request predicts; without one it drafts nothing",
        _asset("lookup", "PREDICTION_ASSET"),
        by_request=True,
    ),
    "draft-model": DrafterKind(
        "a small model with the same tokenizer", _asset("draft_model"), given_by="draft", autoregressive=True
    ),
    "retokenize": DrafterKind(
        "a small model with another tokenizer, whose text is encoded again for the target",
        _asset("draft_model", "OTHER_TOKENIZER_ASSET"),
        given_by="draft",
    ),
    "eagle3": _head("a trained EAGLE-3 head over its states", "EAGLE3_ASSET"),
    "p-eagle": _head("a trained P-EAGLE head", "P_EAGLE_ASSET"),
    "eagle": _head("a trained EAGLE-1 or EAGLE-2 head", "EAGLE_ASSET"),
    "mtp": _head("the layer with which it predicts further tokens", "MTP_ASSET"),
    "medusa": _head("trained Medusa heads over its last state", "MEDUSA_ASSET"),
    "dflash": _head("a trained DFlash head", "DFLASH_ASSET"),
    "dspark": _head("a trained DSpark head", "DSPARK_ASSET"),
    "gemma4-assistant": _head("Google's drafter for a Gemma 4", "ASSISTANT_ASSET"),
    "layer-skip": DrafterKind(
        "the model without some of its layers",
        _asset("assets", "PLAN_ASSET"),
        given_by="plan",
        autoregressive=True,
    ),
    "kangaroo": DrafterKind(
        "its first layers and a trained adapter",
        _asset("assets", "ADAPTER_ASSET"),
        given_by="adapter",
        autoregressive=True,
    ),
    "low-bit": DrafterKind(
        "the model itself in 4 or 8 bits",
        _asset("assets", "COPY_ASSET"),
        reads=("plan", "draft_weights"),
        wanted_by={"draft_weights": DEFAULT_COPY},
        autoregressive=True,
    ),
    "auto": DrafterKind("the loaded drafter that pays most, by measured costs", chooses=True),
}

POLICIES: dict[str, PolicyKind] = {
    "auto": PolicyKind(
        "drafts while one more token pays by measured costs, and not at all where no draft pays",
        _policy("Auto", "decode.policy.auto"),
        max_draft=10,
        uses_costs=True,
    ),
    "fixed": PolicyKind(
        "always the longest draft",
        _policy("Fixed"),
        max_draft=5,
        settings={"siblings": PolicyOption(0, most=32, whole=True)},
    ),
    "heuristic": PolicyKind(
        "2 tokens more after a fully accepted draft, 1 fewer otherwise", _policy("Heuristic"), max_draft=10
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
    "block": RuleKind("judges a sampled draft as a whole, and accepts at least as many"),
    "coupled": RuleKind("same seed, same text, whatever the drafter"),
    "bild": RuleKind("keeps drafted tokens unless they surprise the target", lossless=False),
}
