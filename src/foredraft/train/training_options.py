"""The options of `foredraft train`; the command line has their defaults and help from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.arguments import check_fields, option
from foredraft.arguments.values import Number, Value, Whole
from foredraft.drafters.asset import ADAPTER_KINDS, WITH_MLP
from foredraft.errors import ConfigError, Option

LOSSES = {
    "ce": "soft cross-entropy",
    "kl": "KL divergence of the drafter from the target",
    "reverse-kl": "KL divergence of the target from the drafter",
    "tv": "total variation: the probability of a rejection",
    "lk": "kl while the drafter is far from the target, tv once it is near",
}  # name -> what it is, for the help; `students` has the functions
# Values of an option.
ANY = option(Value())
COUNT = option(Whole("a whole number, 1 or more", 1, math.inf))
WHOLE = option(Whole("0 or more", 0, math.inf))
AMOUNT = option(Number("0 or more"))
POSITIVE = option(Number("a number above 0", above=True))
SHARE = option(Number("a number above 0, at most 1", most=1.0, above=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What all kinds of training take.

    Args:
        data: Files to learn from: text, JSON Lines or Parquet with text, prompt and response, or chat
            messages.
        validation: Files to validate on. Default: a twentieth of the data is held out.
        self_generate: Let the model write this many new tokens after every prompt of the data, and learn from
            these.
        self_temperature: Temperature at which it writes them.
        length: Maximum tokens of a document; a longer one is cut. Default: 1024, or the model's maximum.
        skip_bad_lines: Leave out lines that hold no document, and count them.
        kept_states: GiB of the disk for the model's hidden states, so that later passes over the data need
            not compute them.
        steps: Steps of the optimiser at most.
        step_tokens: Tokens of a step, of all processes together.
        group_tokens: Tokens of one pass; lower it if memory is short. Default: 4096, fewer with a large
            vocabulary.
        learning_rate: Highest learning rate.
        warm_up: Steps in which the learning rate rises.
        weight_decay: Weight decay of matrices.
        clip: Largest norm of the gradient.
        loss: Loss, or a mixture such as ce=0.1,tv=0.9.
        temperature: Temperature of the validation; 0 validates greedy decoding.
        validate_every: Steps between validations, each of which writes a checkpoint.
        patience: Validations without a better one before training stops; 0 goes on to the last step.
        seed: Random seed.
        work: Folder of the run's checkpoints and logs. Default: one in the cache folder, by model, data and
            options.
        fresh: Start anew instead of going on from the last checkpoint.
    """

    data: tuple[Path, ...] = field(metadata=ANY)
    validation: tuple[Path, ...] = field(default=(), metadata=ANY)
    self_generate: int = field(default=0, metadata=WHOLE)
    self_temperature: float = field(default=1.0, metadata=AMOUNT)
    length: int | None = field(default=None, metadata=COUNT)
    skip_bad_lines: bool = field(default=False, metadata=ANY)
    kept_states: float = field(default=0.0, metadata=AMOUNT)
    steps: int = field(default=2000, metadata=COUNT)
    step_tokens: int = field(default=16384, metadata=COUNT)
    group_tokens: int | None = field(default=None, metadata=COUNT)
    # it falls to a tenth of it at the end, along a cosine
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)
    warm_up: int = field(default=100, metadata=WHOLE)
    weight_decay: float = field(default=0.0, metadata=AMOUNT)
    clip: float = field(default=1.0, metadata=POSITIVE)
    loss: str = field(default="kl", metadata=ANY)
    temperature: float = field(default=1.0, metadata=AMOUNT)
    validate_every: int = field(default=100, metadata=COUNT)
    patience: int = field(default=5, metadata=WHOLE)
    seed: int = field(default=0, metadata=WHOLE)
    work: Path | None = field(default=None, metadata=ANY)
    fresh: bool = field(default=False, metadata=ANY)

    def check(self) -> None:
        """Raise ConfigError where a value cannot be honoured."""
        if not self.data:
            raise ConfigError("is needed", option="data", remedy="give one file or more")
        parse_loss(self.loss)
        check_fields(self, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions(TrainOptions):
    """What `foredraft train adapter` takes.

    Args:
        out: Folder to write. Default: the one in the cache folder where --drafter kangaroo finds it.
        depth: Layers of the model below the adapter. Default: an eighth of them, from 1 to 3.
        kind: The adapter.
        draft_vocabulary: Tokens that it can draft, those most frequent in the data; fewer make a draft
            cheaper. Default: all.
    """

    out: Path | None = field(default=None, metadata=ANY)
    depth: int | None = field(default=None, metadata=COUNT)
    kind: str = field(default=WITH_MLP, metadata=ANY)
    draft_vocabulary: int | None = field(default=None, metadata=COUNT)

    def check(self) -> None:
        TrainOptions.check(self)
        if self.kind not in ADAPTER_KINDS:
            raise ConfigError(option="kind", value=self.kind, remedy=f"give {' or '.join(ADAPTER_KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(TrainOptions):
    """What `foredraft train draft` takes.

    Args:
        out: Folder to write.
        layers: Layers of the draft model.
        from_layers: Layers of the model to start from, such as 0,15: as many as `layers`. Default: it starts
            at random.
        hidden_size: Size of its hidden states. Default: the model's.
        intermediate_size: Size within its MLPs. Default: the model's.
        heads: Its query heads. Default: the model's.
        kv_heads: Its key and value heads. Default: the model's, or as many as `heads`.
        checkpointed: Recompute activations in the backward pass: slower, with less memory.
    """

    out: Path = field(metadata=ANY)
    layers: int = field(default=2, metadata=COUNT)
    from_layers: tuple[int, ...] = field(default=(), metadata=ANY)
    hidden_size: int | None = field(default=None, metadata=COUNT)
    intermediate_size: int | None = field(default=None, metadata=COUNT)
    heads: int | None = field(default=None, metadata=COUNT)
    kv_heads: int | None = field(default=None, metadata=COUNT)
    checkpointed: bool = field(default=False, metadata=ANY)

    def check(self) -> None:
        TrainOptions.check(self)
        if self.from_layers and len(self.from_layers) != self.layers:
            problem = f"names {len(self.from_layers)} layers, but the draft model has {self.layers}"
            raise ConfigError(problem, option="from_layers", remedy="name one for each layer")
        sizes = self.hidden_size, self.intermediate_size, self.heads, self.kv_heads
        if self.from_layers and sizes != (None,) * 4:
            problem, remedy = "needs layers of the target's own sizes", "leave the sizes as they are"
            raise ConfigError(problem, option="from_layers", remedy=f"leave it out, or {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(TrainOptions):
    """What `foredraft train eagle3` takes.

    Args:
        out: Folder to write.
        taps: Auxiliary layers, after which the head reads the model's states, such as 2,8,13. Default: 2,
            half of the layers, and three fewer than all.
        draft_vocabulary: Tokens that it can draft, those most frequent in the data; fewer make a draft
            cheaper. Default: all.
        draft_length: Tokens of a draft that are learned, each after the first from the head's own states.
        decay: Weight of each of them in the loss against the one before.
        from_head: Head to start from, with its own layers and draft vocabulary: one that was trained before,
            or published for the model that yours was tuned from. Default: it starts at random.
    """

    out: Path = field(metadata=ANY)
    taps: tuple[int, ...] = field(default=(), metadata=ANY)
    draft_vocabulary: int | None = field(default=None, metadata=COUNT)
    draft_length: int = field(default=5, metadata=COUNT)
    decay: float = field(default=0.8, metadata=SHARE)
    from_head: Path | None = field(default=None, metadata=ANY)

    def check(self) -> None:
        TrainOptions.check(self)
        if self.from_head is not None and (self.taps or self.draft_vocabulary is not None):
            problem, value = "which has its own layers and draft vocabulary", str(self.from_head)
            remedy = ("leave out ", Option("taps"), " and ", Option("draft_vocabulary"))
            raise ConfigError(problem, option="from_head", value=value, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPOptions(TrainOptions):
    """What `foredraft train mtp` takes.

    Args:
        out: Folder to write.
        draft_length: Tokens of a draft that are learned, each after the first from the layer's own states.
        decay: Weight of each of them in the loss against the one before.
        from_head: Head to start from, as it was trained before. Default: the model's own layer.
    """

    out: Path = field(metadata=ANY)
    draft_length: int = field(default=3, metadata=COUNT)
    decay: float = field(default=0.8, metadata=SHARE)
    from_head: Path | None = field(default=None, metadata=ANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashOptions(TrainOptions):
    """What `foredraft train dflash` takes.

    Args:
        out: Folder to write.
        layers: Layers of the head.
        block: Slots of a block, the last token's among them: a draft has one token less.
        taps: Auxiliary layers, after which the head reads the model's states, such as 2,8,13. Default: as
            many as `layers`, spread over the model.
        draft_vocabulary: Tokens that it can draft, those most frequent in the data; fewer make a draft
            cheaper. Default: all.
        mask_token: Id of the token that stands in the slots. Default: the one that ends a text.
        decay: Weight of each token of a draft in the loss against the one before.
    """

    out: Path = field(metadata=ANY)
    layers: int = field(default=2, metadata=COUNT)
    block: int = field(default=8, metadata=option(Whole("2 or more", 2, math.inf)))
    taps: tuple[int, ...] = field(default=(), metadata=ANY)
    draft_vocabulary: int | None = field(default=None, metadata=COUNT)
    mask_token: int | None = field(default=None, metadata=ANY)
    decay: float = field(default=0.87, metadata=SHARE)


def parse_loss(text: str) -> dict[str, float]:
    """Return the weight of each loss in the name of one, or in a mixture such as "ce=0.1,tv=0.9"."""
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
