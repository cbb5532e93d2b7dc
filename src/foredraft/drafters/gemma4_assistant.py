"""Gemma 4's assistant: a few layers that read the target's own keys and values.

A draft step joins the target's embedding of the last token with the target's last state after its final
norm, or with the state that the step before gave, and projects both to the assistant's size. Every layer of
the assistant attends to the keys and values of the target's last layer of the same kind that has any, at
committed positions alone. So the assistant has no cache of keys and values, reads no prompt, and rolling back
is free. All steps of a round stand at the position of the pending token.

The drafter keeps the target's last states of all positions, so that a text may be cut anywhere, in cache rows
that follow the batch's. With ordered embeddings, a step has logits for the tokens of the nearest centroids
alone; q is zero for the others.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Parts
from foredraft.drafters.assistant_config import AssistantConfig, is_assistant, producers
from foredraft.drafters.kept_states import keep, kept, states_spec
from foredraft.errors import CheckpointError, Option
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.checkpoint import CheckpointTensors
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Resume, Runner
from foredraft.model.transfers import upload
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import build_decoder, build_linear

__all__ = ["ASSET", "Assistant", "Centroids", "Gemma4Assistant", "load_assistant"]

BEFORE, AFTER, CENTROIDS = "pre_projection", "post_projection", "masked_embedding.centroids"
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Centroids:
    """A head that has logits for the tokens of the nearest centroids alone.

    Attributes:
        product: Gives the logits of the centroids.
        order: The tokens of each centroid, [C, V / C].
        chosen: The number of centroids that count.
    """

    product: Product
    order: Tensor
    chosen: int

    def logits(self, decoder: Decoder, x: Tensor) -> Tensor:
        """Return logits [B, V] float32 of normed states [B, hidden]: -inf for tokens that are not near."""
        nearest = self.product(x).topk(self.chosen, -1).indices
        ids = self.order[nearest].flatten(1)  # [B, chosen * V / C]
        found = torch.bmm(decoder.embedding_rows(ids), x[:, :, None])[:, :, 0].float()
        everywhere = found.new_full((len(x), self.order.numel()), -math.inf)
        return everywhere.scatter_(1, ids, found)


@dataclass(frozen=True, slots=True)
class Assistant:
    """The weights of an assistant beside its target's.

    Attributes:
        runner: Runs its layers and its head.
        target: The target's decoder.
        before: Projects the target's embedding and state, side by side.
        after: Projects what the layers give to the size of the target's states.
        centroids: The head of ordered embeddings; None: the decoder's own.
    """

    runner: Runner
    target: Decoder
    before: Product
    after: Product
    centroids: Centroids | None

    @torch.inference_mode()
    def step(
        self, cache: CacheLayers, tokens: Tensor, states: Tensor, starts: list[int], idle: list[bool] | None
    ) -> Forward:
        """Run one draft step.

        Args:
            cache: The target's keys and values, for each layer of the assistant.
            tokens: [B, 1] int64.
            states: The states after the target's final norm, or of the step before, [B, hidden].
            starts: The last committed position of each row.
            idle: Rows that do not draft; None: all draft.

        Returns:
            Logits [B, 1, V], and states [B, 1, hidden] for the next step.
        """
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


@dataclass(frozen=True, slots=True)
class AssistantPass(DraftPass):
    """The forward of a draft step from states that mean nothing, to be timed."""

    assistant: Assistant = field(kw_only=True)

    def __call__(
        self, cache: CacheLayers, tokens: Tensor, starts: list[int], *, idle: Any = None, **more: Any
    ) -> Forward:
        target = self.assistant.target
        states = torch.zeros(len(tokens), target.spec.hidden_size, dtype=target.dtype, device=target.device)
        return self.assistant.step(cache, tokens, states, starts, idle)

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        return None


class Gemma4Assistant(Stepper):
    """A stepper over an assistant, the target's cache and the target's last states.

    Args:
        target: The target's runner.
        cache: The target's KV cache.
        assistant: The assistant.
    """

    name = "gemma4-assistant"
    draft_pass: DraftPass

    def __init__(self, target: Runner, cache: KVCache, assistant: Assistant) -> None:
        spec, own = target.decoder.spec, assistant.runner.decoder.spec
        assistant.runner.reserve_positions(cache.stored)
        self.assistant, self._norm = assistant, target.decoder.norm
        self.taps = (spec.layers,)
        self.draft_pass = AssistantPass(assistant.runner, assistant=assistant)
        producing = producers(spec)
        self._layers = cache.chosen([producing[window is None] for window in own.windows])
        self.cache = cache.beside(states_spec(spec, spec.hidden_size))
        self.caches = (cache, self.cache)
        self._states: Tensor | None = None  # of the step before, [B, hidden]; None before the first one
        self._at: list[int] = []  # the committed positions of each row, throughout a round

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # the target has read all but the pending token

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._states is None:
            self._at, self._states = list(starts), self._last_states(starts)
        # a text of one token has no position that the assistant could attend to: its q is uniform
        alone = [position < 1 for position in self._at]
        skipped = [is_idle or none for is_idle, none in zip(idle, alone, strict=True)]
        if all(skipped):
            return torch.zeros(len(starts), self.assistant.target.spec.vocab_size, device=tokens.device)
        last = [max(0, position - 1) for position in self._at]
        forward = self.assistant.step(self._layers, tokens, self._states, last, skipped)
        self._states = forward.hidden[:, 0]
        assert forward.logits is not None
        logits = forward.logits[:, 0]
        return logits.masked_fill(upload(alone, logits.device)[:, None], 0.0)

    def _last_states(self, starts: list[int]) -> Tensor:
        """Return the target's states after its final norm, of the positions before `starts`, [B, hidden]."""
        device = self.cache.device
        positions = upload([max(0, start - 1) for start in starts], device)
        return self._norm(kept(self.cache, torch.arange(len(starts), device=device), positions))

    def resume(self) -> Resume | None:
        self._states = None  # the draft ends
        return None

    def observe(self, sequence: Sequence, start: int, states: Any) -> None:
        """Keep the target's last states of newly committed positions."""
        keep(self.cache, sequence.row, start, states[self.taps[0]])

    def rewind(self, sequence: Sequence) -> None:
        self._states = None
        lengths, row = self.cache.lengths, sequence.row
        lengths[row] = min(lengths[row], len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        self._states = None


def load_assistant(folder: Path, config: AssistantConfig, target: Runner) -> Assistant:
    """Load the assistant that `config` describes, in the target's dtype.

    Raises:
        CheckpointError: The weights are broken, or are not those of the config.
    """
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


@dataclass(frozen=True, kw_only=True)
class FoundAssistant(Found):
    """An assistant that fits the target.

    Attributes:
        folder: Holds it.
        config: What it is.
        target: The target.
    """

    folder: Path
    config: AssistantConfig
    target: Checkpoint

    def row_bytes(self, positions: int) -> int:
        spec = self.target.spec
        return KVCache.bytes_per_row(states_spec(spec, spec.hidden_size), positions, self.target.dtype)

    def make(self, parts: Parts) -> Gemma4Assistant:
        assistant = load_assistant(self.folder, self.config, parts.target)
        return Gemma4Assistant(parts.target, parts.cache, assistant)


class AssistantAsset(Asset):
    """An assistant: the folder or hub id that the user gives as the draft model."""

    missing = Missing(
        "needs an assistant of this model", ("give ", Option("draft"), ", its folder or hub id")
    )
    required = Missing("which needs the model's assistant", missing.remedy)

    def knows(self, place: Path) -> bool:
        return is_assistant(place)

    def find(self, search: AssetSearch) -> Found | Missing:
        folder, target = search.draft, search.target
        if folder is None:
            return self.missing
        if not self.knows(folder):
            return replace(self.missing, unfit=f"{folder} is a whole model, and no assistant")
        config = AssistantConfig.from_folder(folder)
        config.check(target, folder)
        count = config.parameters
        return FoundAssistant(
            bytes=count * target.dtype.itemsize, about=f"the assistant {folder}, {count / 1e6:.1f} M weights",
            folder=folder, config=config, target=target,
        )  # fmt: skip


ASSET = AssistantAsset()
