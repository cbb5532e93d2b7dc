"""The options of `foredraft train`, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foredraft.drafters.adapter_kinds import ADAPTER_KINDS, WITH_MLP
from foredraft.errors import ConfigError, Option

__all__ = ["LOSSES", "AdapterOptions", "DraftOptions", "Eagle3Options", "TrainOptions", "parse_loss"]

LOSSES = {
    "ce": "soft cross-entropy",
    "kl": "KL divergence of the drafter from the target",
    "reverse-kl": "KL divergence of the target from the drafter",
    "tv": "total variation: the probability of a rejection",
    "lk": "kl while the drafter is far from the target, tv once it is near",
}  # name -> what it is, for the help; `losses` has the functions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What all kinds of training take.

    Attributes:
        data: Files to learn from.
        validation: Files to validate on; none holds a part of the data out.
        self_generate: New tokens that the target writes after each prompt of the data, in place of what
            follows there; 0 learns from the data as it is.
        self_temperature: Temperature at which it writes.
        skip_bad_lines: Leave lines out that hold no document.
        length: Tokens of a document at most; None is 1,024, or the model's positions.
        steps: Steps of the optimiser.
        step_tokens: Tokens of a step, of all processes.
        group_tokens: Tokens of one pass; None takes fewer where the vocabulary is large.
        learning_rate: The highest; it warms up to it and falls to a tenth of it, along a cosine.
        warm_up: Steps before that.
        weight_decay: Of matrices.
        clip: Largest norm of the gradient.
        loss: A loss or a mixture (`parse_loss`).
        temperature: Temperature of the validation; 0 asks for the same argmax.
        validate_every: Steps between two validations.
        patience: Validations without a better one before training stops; 0 goes on to the last step.
        seed: Of the order of the data and of weights that start at random.
        kept_states: GiB of the disk for the target's states, so that later epochs need not compute them.
        work: Folder of the run's checkpoints and logs; None is one in the cache folder, by target, data and
            options.
        fresh: Start anew where an earlier run could be continued.
    """

    data: tuple[Path, ...]
    validation: tuple[Path, ...] = ()
    self_generate: int = 0
    self_temperature: float = 1.0
    skip_bad_lines: bool = False
    length: int | None = None
    steps: int = 2000
    step_tokens: int = 16384
    group_tokens: int | None = None
    learning_rate: float = 1e-3
    warm_up: int = 100
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: str = "kl"
    temperature: float = 1.0
    validate_every: int = 100
    patience: int = 5
    seed: int = 0
    kept_states: float = 0.0
    work: Path | None = None
    fresh: bool = False

    @property
    def starting_head(self) -> Path | None:
        """The head that the training starts from; None where the target and the seed decide."""
        return None

    def check(self) -> None:
        """Raise ConfigError where a value cannot be honoured."""
        if not self.data:
            raise ConfigError("is needed", option="data", remedy="give one file or more")
        parse_loss(self.loss)
        for name in ("steps", "step_tokens", "group_tokens", "length", "validate_every"):
            check_count(name, getattr(self, name))
        for name in ("self_generate", "warm_up", "seed", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(option=name, value=getattr(self, name), remedy="give 0 or more")
        for name in ("weight_decay", "temperature", "self_temperature", "kept_states"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(option=name, value=getattr(self, name), remedy="give 0 or more")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(option=name, value=getattr(self, name), remedy="give a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions(TrainOptions):
    """What `foredraft train adapter` takes.

    Attributes:
        depth: Layers of the target below the adapter; None is an eighth of them, from 1 to 3.
        kind: One of `ADAPTER_KINDS`.
        draft_vocabulary: Words that the adapter can draft, those most frequent in the data; None is all.
        out: Folder to write; None is the one in the cache folder where `load` finds it.
    """

    depth: int | None = None
    kind: str = WITH_MLP
    draft_vocabulary: int | None = None
    out: Path | None = None

    def check(self) -> None:
        TrainOptions.check(self)
        if self.kind not in ADAPTER_KINDS:
            raise ConfigError(option="kind", value=self.kind, remedy=f"give {' or '.join(ADAPTER_KINDS)}")
        for name in ("depth", "draft_vocabulary"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(TrainOptions):
    """What `foredraft train draft` takes.

    Attributes:
        out: Folder to write, a checkpoint of Hugging Face.
        layers: Number of layers.
        from_layers: Layers of the target to start from, in order; none starts at random.
        hidden_size: Size of a hidden state; None is the target's.
        intermediate_size: Size within an MLP; None is the target's.
        heads: Query heads; None is the target's.
        kv_heads: Key and value heads; None is the target's.
        checkpointed: Recompute activations in the backward pass, to save memory.
    """

    out: Path
    layers: int = 2
    from_layers: tuple[int, ...] = ()
    hidden_size: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    checkpointed: bool = False

    def check(self) -> None:
        TrainOptions.check(self)
        sizes = ("hidden_size", "intermediate_size", "heads", "kv_heads")
        for name in ("layers", *sizes):
            check_count(name, getattr(self, name))
        if self.from_layers and len(self.from_layers) != self.layers:
            raise ConfigError(
                f"names {len(self.from_layers)} layers, but the draft model has {self.layers}",
                option="from_layers", remedy="name one for each layer",
            )  # fmt: skip
        if self.from_layers and any(getattr(self, name) is not None for name in sizes):
            raise ConfigError(
                "needs layers of the target's own sizes", option="from_layers",
                remedy="leave it out, or leave the sizes as they are",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(TrainOptions):
    """What `foredraft train eagle3` takes.

    Attributes:
        out: Folder to write.
        taps: Numbers of the target's layers after which the head reads its states; none is the usual three.
        draft_vocabulary: Words that the head can draft, those most frequent in the data; None is all.
        draft_length: Tokens of a draft that are learned, each after the first from the head's own states.
        decay: Weight of each of them against the one before.
        from_head: A head to start from, which has taps and words of its own; None starts at random.
    """

    out: Path
    taps: tuple[int, ...] = ()
    draft_vocabulary: int | None = None
    draft_length: int = 5
    decay: float = 0.8
    from_head: Path | None = None

    @property
    def starting_head(self) -> Path | None:
        return self.from_head

    def check(self) -> None:
        TrainOptions.check(self)
        if self.from_head is not None and (self.taps or self.draft_vocabulary is not None):
            raise ConfigError(
                "which has taps and words of its own", option="from_head", value=str(self.from_head),
                remedy=("leave out ", Option("taps"), " and ", Option("draft_vocabulary")),
            )  # fmt: skip
        for name in ("draft_vocabulary", "draft_length"):
            check_count(name, getattr(self, name))
        check_decay(self.decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashOptions(TrainOptions):
    """What `foredraft train dflash` takes.

    Attributes:
        out: Folder to write.
        layers: Layers of the head.
        block: Slots of a block, the pending token's among them: a draft has one token less.
        taps: Numbers of the target's layers after which the head reads its states; none spreads as many as
            `layers` over the target.
        draft_vocabulary: Words that the head can draft, those most frequent in the data; None is all.
        mask_token: The token id that stands in the slots; None is the one that ends a text.
        decay: Weight of each token of a draft against the one before.
    """

    out: Path
    layers: int = 2
    block: int = 8
    taps: tuple[int, ...] = ()
    draft_vocabulary: int | None = None
    mask_token: int | None = None
    decay: float = 0.87

    def check(self) -> None:
        TrainOptions.check(self)
        for name in ("draft_vocabulary", "layers"):
            check_count(name, getattr(self, name))
        if self.block < 2:
            raise ConfigError(option="block", value=self.block, remedy="give 2 or more")
        check_decay(self.decay)


def check_decay(value: float) -> None:
    """Raise ConfigError unless a value can be the weight of a token against the one before."""
    if not 0 < value <= 1:
        raise ConfigError(option="decay", value=value, remedy="give a number above 0, at most 1")


def parse_loss(text: str) -> dict[str, float]:
    """Return the weight of each loss in the name of one, or in a mixture such as "ce=0.1,tv=0.9".

    Raises:
        ConfigError: The text names no loss.
    """
    if text in LOSSES:
        return {text: 1.0}
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if name not in LOSSES or not 0 < value < float("inf") or name in weights:
            remedy = f"give one of {', '.join(LOSSES)}, or a mixture such as ce=0.1,tv=0.9"
            raise ConfigError(option="loss", value=text, remedy=remedy)
        weights[name] = value
    return weights


def check_count(option: str, value: int | None) -> None:
    """Raise ConfigError unless a value is None, or 1 or more."""
    if value is not None and value < 1:
        raise ConfigError(option=option, value=value, remedy="give a whole number, 1 or more")
