"""Gemma 4's assistant: a few layers that read the target's own keys and values.

A draft step projects the target's embedding of the last token, beside the state of the step before (at first
the target's last one, normed), to the assistant's size. A layer attends to the keys and values of the
target's last layer of its kind, at committed positions alone; all steps of a round stand at the position of
the pending token.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.asset import Found
from foredraft.drafters.head_kinds import ASSISTANTS
from foredraft.drafters.heads.layers import TimedPass
from foredraft.drafters.states import LastStateReader, states_spec
from foredraft.errors import CheckpointError, ConfigError, Option
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.checkpoint import Checkpoint, CheckpointTensors
from foredraft.model.config import DOWNLOAD_AGAIN, ConfigReader, read_json
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.runner import Forward, Resume, Runner
from foredraft.model.spec import CONFIG, OUTSIDE, ModelSpec
from foredraft.model.weights import build_decoder, build_linear, parameter_count


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    spec: ModelSpec  # of its layers, final norm and head
    target_size: int  # size of the target's states
    centroids: int | None  # of ordered embeddings; None: the head gives the logits of all tokens
    chosen: int  # the centroids whose tokens a step has logits for

    @classmethod
    def from_folder(cls, folder: Path) -> AssistantConfig:
        read = ConfigReader(read_json(folder / CONFIG))
        text = read.section("text_config")
        if text is None:
            raise read.error("text_config", "it must hold the config of the assistant's layers")
        own: dict[str, Any] = {
            **text.config,
            "model_type": ASSISTANTS[read.take("model_type")],
            "tie_word_embeddings": read.flag("tie_word_embeddings", default=True),
            "dtype": text.take("dtype") or read.take("dtype") or "float32",
        }
        layers = text.count("num_hidden_layers")
        if text.count("num_kv_shared_layers", 0, if_null=0, allow_zero=True) not in (0, layers):
            raise text.error("num_kv_shared_layers", f"all {layers} layers of an assistant read other keys")
        spec = ModelSpec.from_hf(own | {"num_kv_shared_layers": 0})
        if spec.layer_input_size:
            raise text.error("hidden_size_per_layer_input", "it must be 0 in an assistant")
        centroids = _centroids(read, spec)
        spec = replace(  # its layers attend to committed positions, over windows as in transformers
            spec, windows=tuple(window and window + 1 for window in spec.windows),
            sources=(OUTSIDE,) * spec.layers, rotated_ahead=1, logit_softcap=None,
            shared_intermediate_size=None,
        )  # fmt: skip
        return cls(spec, read.count("backbone_hidden_size", 1536), *centroids)

    @property
    def parameters(self) -> int:
        projections = 3 * self.target_size * self.spec.hidden_size
        return parameter_count(self.spec) + projections + (self.centroids or 0) * self.spec.hidden_size

    def check(self, target: Checkpoint, folder: Path) -> None:
        """Raise ConfigError where the assistant is for another target than this one."""
        spec, own, producing = target.spec, self.spec, producers(target.spec)
        sizes: list[tuple[str, object, object]] = [
            ("states of size", self.target_size, spec.hidden_size),
            ("a vocabulary of", own.vocab_size, spec.vocab_size),
        ]
        for window in dict.fromkeys(own.windows):
            kind, source = "full attention" if window is None else "a window", producing.get(window is None)
            theirs = None if source is None else spec.windows[source]
            heads = None if source is None else (spec.kv_heads_of(theirs), spec.head_dim_of(theirs))
            mine = own.kv_heads_of(window), own.head_dim_of(window)
            sizes.append((f"in layers with {kind}, key heads and their size of", mine, heads))
        for what, wanted, found in sizes:
            if wanted != found:
                raise ConfigError(
                    f"{folder} is the assistant of another model than {target.source}: it needs {what}"
                    f" {wanted}, and the model has {found}",
                    remedy=("give ", Option("draft"), " the assistant that was made for the model"),
                )


def _centroids(read: ConfigReader, spec: ModelSpec) -> tuple[int | None, int]:
    """Return the number of centroids, None without, and how many of them are chosen."""
    if not read.flag("use_ordered_embeddings", if_null=False):
        return None, 0
    count = read.count("num_centroids", 2048)
    if spec.vocab_size % count:
        raise read.error("num_centroids", f"it must divide the vocabulary of {spec.vocab_size}")
    if not spec.tied:
        raise read.error("tie_word_embeddings", "ordered embeddings are the head, too")
    chosen = read.count("centroid_intermediate_top_k", 32)
    if chosen > count:
        raise read.error("centroid_intermediate_top_k", f"there are {count} centroids")
    return count, chosen


def producers(spec: ModelSpec) -> dict[bool, int]:
    """Return the last layer with keys and values of its own, by whether it has full attention."""
    return {spec.windows[layer] is None: layer for layer in range(spec.layers) if spec.stores(layer)}


BEFORE, AFTER, CENTROIDS = "pre_projection", "post_projection", "masked_embedding.centroids"
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Centroids:
    """A head that has logits for the tokens of the nearest centroids alone."""

    product: Product  # gives the logits of the centroids
    order: Tensor  # the tokens of each centroid, [C, V / C]
    chosen: int  # the number of centroids that count

    def logits(self, decoder: Decoder, x: Tensor) -> Tensor:
        """Return logits [B, V] float32 of normed states [B, hidden]: -inf for tokens that are not near."""
        nearest = self.product(x).topk(self.chosen, -1).indices
        ids = self.order[nearest].flatten(1)  # [B, chosen * V / C]
        found = torch.bmm(decoder.embedding_rows(ids), x[:, :, None])[:, :, 0].float()
        everywhere = found.new_full((len(x), self.order.numel()), -math.inf)
        return everywhere.scatter_(1, ids, found)


@dataclass(frozen=True, slots=True)
class Assistant:
    """The weights of an assistant beside its target's."""

    runner: Runner  # runs its layers and its head
    target: Decoder  # the target's decoder
    before: Product  # projects the target's embedding and state, side by side
    after: Product  # projects what the layers give to the size of the target's states
    centroids: Centroids | None  # the head of ordered embeddings; None: the decoder's own

    @torch.inference_mode()
    def step(
        self, cache: CacheLayers, tokens: Tensor, states: Tensor, starts: list[int], idle: list[bool] | None
    ) -> Forward:
        """Run one draft step from tokens [B, 1] and states [B, hidden]."""
        decoder, batch = self.runner.decoder, len(tokens)
        entering = self.before(torch.cat([self.target.embed(tokens[:, 0]), states], -1))
        forward = self.runner.forward(
            cache, tokens, starts, idle=idle, want_logits=self.centroids is None, invariant=False,
            resume=Resume(0, entering[:, None], [1] * batch),
        )  # fmt: skip
        normed = decoder.norm(forward.hidden[:, 0])  # [B, hidden of the assistant]
        logits = forward.logits
        if self.centroids is not None:
            logits = self.centroids.logits(decoder, normed)[:, None]
        return Forward(logits, self.after(normed)[:, None], {})

    def timed_step(self, cache: CacheLayers, tokens: Tensor, starts: list[int]) -> Tensor:
        target = self.target
        states = torch.zeros(len(tokens), target.spec.hidden_size, dtype=target.dtype, device=target.device)
        logits = self.step(cache, tokens, states, starts, None).logits
        assert logits is not None
        return logits[:, 0]


class Gemma4Assistant(LastStateReader):
    """An autoregressive drafter over an assistant, the target's cache and the target's last states."""

    name = "gemma4-assistant"

    def __init__(self, target: Runner, cache: KVCache, assistant: Assistant) -> None:
        super().__init__(target, cache)
        own = assistant.runner.decoder.spec
        assistant.runner.reserve_positions(cache.stored)
        self.assistant, self._norm = assistant, target.decoder.norm
        self.draft_pass = TimedPass(assistant.runner, name="assistant", step=assistant.timed_step)
        producing = producers(target.decoder.spec)
        self._layers = cache.chosen([producing[window is None] for window in own.windows])
        self.caches = (cache, self.states)
        self._states: Tensor | None = None  # of the step before, [B, hidden]; None before the first one
        self._at: list[int] = []  # the committed positions of each row, throughout a round

    @classmethod
    def found(cls, folder: Path, target: Checkpoint) -> Found:
        config = AssistantConfig.from_folder(folder)
        config.check(target, folder)
        count, spec = config.parameters, target.spec
        return Found(
            bytes=count * target.dtype.itemsize, about=f"the assistant {folder}, {count / 1e6:.1f} M weights",
            specs=(states_spec(spec, spec.hidden_size),), dtype=target.dtype,
            build=lambda parts: cls(parts.target, parts.cache, load_assistant(folder, config, parts.target)),
        )  # fmt: skip

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._states is None:
            self._at, self._states = list(starts), self._norm(self.states_before(starts))
        # a text of one token has no position that the assistant could attend to: its q is uniform
        alone = [position < 1 for position in self._at]
        skipped = [is_idle or none for is_idle, none in zip(idle, alone, strict=True)]
        if all(skipped):
            return torch.zeros(len(starts), self.assistant.target.spec.vocab_size, device=tokens.device)
        last = [max(0, position - 1) for position in self._at]
        forward = self.assistant.step(self._layers, tokens, self._states, last, skipped)
        self._states = forward.hidden[:, 0]
        assert forward.logits is not None
        return self.over_target(forward.logits[:, 0], [not each for each in alone])

    def end_draft(self) -> None:
        self._states = None


def load_assistant(folder: Path, config: AssistantConfig, target: Runner) -> Assistant:
    decoder, spec, native = target.decoder, config.spec, target.by_kernels
    size, own = config.target_size, spec.hidden_size
    with ExitStack() as stack:
        tensors = CheckpointTensors(folder, stack, decoder.device, decoder.dtype, spec.quantisation)
        layers = build_decoder(spec, tensors, native)

        def linear(name: str, rows: int, columns: int) -> Product:
            return build_linear(spec, tensors, name, (rows, columns), native=native)

        before, after = linear(BEFORE, own, 2 * size), linear(AFTER, size, own)
        centroids = None
        if config.centroids is not None:
            product = linear(CENTROIDS, config.centroids, own)
            order = tensors.view(ORDER, (spec.vocab_size,), ("I64", "I32")).long().clone()
            if not torch.equal(order.sort().values, torch.arange(len(order))):
                raise CheckpointError(f"tensor {ORDER} does not name every token once", remedy=DOWNLOAD_AGAIN)
            centroids = Centroids(product, order.view(config.centroids, -1).to(decoder.device), config.chosen)
        tensors.reject_unused(spec)
    return Assistant(Runner(layers, deterministic=False), decoder, before, after, centroids)
