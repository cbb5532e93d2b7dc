"""Planted defects of Gemma 4's arithmetic; the comparison with transformers must catch each of them.

The table reads as that of `test_defects.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.model import attention, decoder, rope
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.layer_inputs import LayerInput, LayerInputs
from foredraft.model.spec import ModelSpec
from tests.parity.mutant_checks import (
    MASKS,
    NARROWER,
    RUN,
    WIDER,
    Function,
    check,
    decoding_logits,
    projected_with,
    prompt_logits,
    with_parts,
    with_rope,
)
from tests.support.planting import Spoiler, defect


def read_from(layer: int, other: int) -> Spoiler:
    """Let one layer read the keys and values of another one than its own source."""

    def spoiler(source_of: Function) -> Function:
        return lambda spec, index: other if index == layer else source_of(spec, index)

    return spoiler


def unscaled(finish: Function) -> Function:
    def spoilt(spec: ModelSpec, layer: Layer, *rest: Any) -> Tensor:
        out: Tensor = finish(spec, replace(layer, scalar=1.0), *rest)
        return out

    return spoilt


def without_gate(add: Function) -> Function:
    """Add the inputs of a layer as they are."""

    def spoilt(own: LayerInput, x: Tensor, given: Tensor, *rest: Any) -> Tensor:
        added: Tensor = own.output(given)
        return x + own.norm(added)

    return spoilt


def normed_keys_for_values(own: Any) -> Any:
    if own.v_norm is None or own.k_norm is None or own.window is not None:
        return own
    v_norm, k_norm = own.v_norm, own.k_norm
    return replace(own, v_norm=lambda keys: v_norm(k_norm(keys)))


SHARED, JOINED = "gemma4-shared", "gemma4-k-eq-v"
MUTANTS = [
    defect("window one too wide", MASKS, WIDER, check(decoding_logits, "gemma4")),
    defect("window one too narrow", MASKS, NARROWER, check(prompt_logits, "gemma4-unified")),
    # layer 5 shares the keys of layer 3, and layers 4 and 6 those of layer 1
    defect(
        "shared keys of the windowed layer before", ModelSpec.source_of, read_from(5, 2),
        check(decoding_logits, SHARED),
    ),
    defect(
        "shared keys of the first windowed layer", ModelSpec.source_of, read_from(5, 0),
        check(decoding_logits, "gemma4-unified-shared"),
    ),
    defect(
        "norm of values left out", RUN, projected_with(lambda own: replace(own, v_norm=None)),
        check(decoding_logits, "gemma4"),
    ),
    defect(
        "norm of values left out where they are keys", RUN,
        projected_with(lambda own: replace(own, v_norm=None)), check(decoding_logits, JOINED),
    ),
    defect(
        "values are the normed keys", RUN, projected_with(normed_keys_for_values),
        check(decoding_logits, JOINED),
    ),
    defect(
        "scalar of layers left out", RUN, with_parts(finish=unscaled), check(decoding_logits, "gemma4")
    ),
    defect(
        "inputs of the layer after", decoder._input_of,
        lambda input_of: lambda context, layer: input_of(context, (layer + 1) % 7),
        check(decoding_logits, SHARED),
    ),
    defect("gate of inputs left out", LayerInput.add, without_gate, check(decoding_logits, SHARED)),
    defect(
        "tokens' own inputs left out", LayerInputs.of,
        lambda of: lambda own, *rest: of(replace(own, scale=0.0), *rest),
        check(decoding_logits, "gemma4-by-layer"),
    ),
    defect(
        "weight of the norm of projected inputs left out", LayerInputs.of,
        lambda of: lambda own, *rest: of(
            replace(own, norm=replace(own.norm, weight=torch.ones_like(own.norm.weight))), *rest
        ),
        check(decoding_logits, "gemma4-by-layer"),
    ),
    defect(
        "all channels of full attention rotated", rope.frequencies, with_rope(turning=1.0),
        check(decoding_logits, "gemma4"),
    ),
    defect(
        "scores scaled by the size of a head", attention.masked_attention,
        lambda attend: lambda spec, q, *rest: attend(
            replace(spec, attention_scale=q.shape[-1] ** -0.5), q, *rest
        ),
        check(decoding_logits, "gemma4"),
    ),
    defect(
        "embedding without its scale", Decoder.embed,
        lambda embed: lambda own, *rest: embed(own, *rest) / own.embedding_scale,
        check(decoding_logits, "gemma4-unified"),
    ),
]  # fmt: skip
