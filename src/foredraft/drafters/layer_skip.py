"""The target drafts for itself, on its own cache: with sub-layers left out, or with weights of few bits.

A draft's passes write past the committed length of the target's cache, where the verifying pass overwrites
them. Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) leaves out any attention or MLP. After an exit
(LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710) the verifying pass resumes from the draft's states, so the
draft's passes keep to batch-invariant shapes.

Low bit: a copy of the weights runs in the same passes and on the same cache; a step reads a quarter or a half
of a plain step's bytes (QuantSpec, Tiwari et al. 2025, arXiv:2502.10424; ML-SpecQD, Georganas et al. 2025,
arXiv:2503.13565).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.decode.drafter import AutoregressiveDrafter, DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.plan_files import Skips
from foredraft.drafters.states import KnownStates
from foredraft.kernels.pool import Arena
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.runner import DraftInputs, FusedDraft, Resume, Runner
from foredraft.model.runner.native.products import code_native


class SelfSpeculative(AutoregressiveDrafter):
    """An autoregressive drafter over the target's layers, whole or in part, on the target's own cache."""

    resumes: bool  # the verifying pass resumes from the states below an exit
    draft_pass: DraftPass

    def __init__(
        self, runner: Runner, cache: KVCache, skips: Skips | None = None, planned: int | None = None
    ) -> None:
        layers = runner.decoder.spec.layers
        if skips is not None:
            skips.check(layers)
        self.skips, self.cache, self.planned = skips, cache, planned
        self.caches = (cache,)
        exit = skips.exit if self.resumes and skips is not None else None
        self.draft_pass = DraftPass(runner, None if skips is None else skips.plan(layers), exit)
        self._known = None if exit is None else KnownStates(exit)

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # the target has read all but the pending token

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle)
        if self._known is not None:
            self._known.add(forward.aux_states[self._known.depth], [not each for each in idle])
        assert forward.logits is not None
        return forward.logits[:, 0]

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        draft = self.draft_pass.fused(self.cache, inputs)
        if draft is not None and self._known is not None:
            self._known.add_fused(draft, inputs.lengths)
        return draft

    def resume(self) -> Resume | None:
        return None if self._known is None else self._known.take()

    def leave(self, sequence: Sequence) -> None:
        if self._known is not None:
            self._known.forget()


class LayerSkip(SelfSpeculative):
    """An autoregressive drafter over the target's own runner."""

    name, resumes = "layer-skip", True


class LowBit(SelfSpeculative):
    """An autoregressive drafter over a coded copy of the target."""

    name, resumes = "low-bit", False

    def __init__(self, copy: Runner, cache: KVCache, *plan: Any) -> None:
        super().__init__(copy, cache, *plan)
        copy.reserve_positions(cache.stored)


def low_bit_copy(target: Runner, bits: int) -> Runner:
    """Return a runner of a copy of the target whose linear layers have codes of so many bits."""
    whole, arena = target.decoder, Arena()

    def coded(product: Product) -> Product:
        return code_native(product, bits, arena)

    layers = tuple(layer.changed(coded) for layer in whole.layers)
    inputs = whole.inputs and replace(whole.inputs, projection=coded(whole.inputs.projection))
    head, learned = coded(whole.output), whole.learned_positions
    decoder = Decoder(whole.spec, whole.embedding, layers, whole.norm, head, learned, inputs)
    return Runner(decoder, shapes=target.shapes)
