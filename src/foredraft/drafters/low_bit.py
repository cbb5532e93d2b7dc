"""Low bit: the target drafts for itself, with a copy of its weights in few bits.

A second set of linear layers runs under the same decoder, in the same passes and on the same cache. A step
reads a quarter or a half of the bytes of a plain step, and its distributions are nearly the target's.
QuantSpec (Tiwari et al. 2025, arXiv:2502.10424) and ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565) draft
so.

As with layer skipping, a draft's keys and values land past the committed length, where the verifying pass
overwrites them in every layer before any layer attends there. Sub-layers can be left out of the copy, too.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.skips import Skips
from foredraft.kernels.huge_pages import Arena
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.layers import Product
from foredraft.model.runner import DraftInputs, FusedDraft, Runner
from foredraft.model.runner.native import code_native

__all__ = ["LowBit", "low_bit_copy"]


class LowBit(Stepper):
    """A stepper over a coded copy of the target, on the target's own cache.

    Args:
        copy: Runs the copy (`low_bit_copy`).
        cache: The target's KV cache.
        skips: Sub-layers to leave out of the copy; None leaves out none.
        planned: Draft length for which the plan was found, where it is known.

    Raises:
        ConfigError: The target has no such layers.
    """

    name = "low-bit"
    draft_pass: DraftPass

    def __init__(
        self, copy: Runner, cache: KVCache, skips: Skips | None = None, planned: int | None = None
    ) -> None:
        layers = copy.decoder.spec.layers
        if skips is not None:
            skips.check(layers)
        copy.reserve_positions(cache.stored)
        self.skips, self.cache, self.planned = skips, cache, planned
        self.caches = (cache,)
        self.draft_pass = DraftPass(copy, None if skips is None else skips.plan(layers))

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # the target has read all but the pending token

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        logits = self.draft_pass(self.cache, tokens, starts, idle=idle).logits
        assert logits is not None
        return logits[:, 0]

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        return self.draft_pass.fused(self.cache, inputs)


def low_bit_copy(target: Runner, bits: int) -> Runner:
    """Return a runner of a copy of the target whose linear layers have codes of so many bits.

    It shares everything else with the target, and the linear layers that cannot be coded.

    Args:
        target: Run by the kernels.
        bits: Of a code, 4 or 8.
    """
    whole, arena = target.decoder, Arena()

    def coded(product: Product) -> Product:
        return code_native(product, bits, arena)

    def copy(layer: Layer) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        attention = replace(attention, qkv=coded(attention.qkv), output=coded(attention.output))
        if mlp is not None:
            mlp = replace(mlp, gate_up=coded(mlp.gate_up), down=coded(mlp.down))
        return Layer(attention, mlp)

    layers = tuple(map(copy, whole.layers))
    decoder = Decoder(whole.spec, whole.embedding, layers, whole.norm, coded(whole.output))
    return Runner(decoder, shapes=target.shapes)
