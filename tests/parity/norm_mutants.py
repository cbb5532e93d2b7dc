"""Planted defects of norms, residuals, positions and tensor layouts; the comparison with transformers catches each.

The table reads as that of `test_defects.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model import attention, forward_context, layers, rope, row_orders, weights
from foredraft.model.decoder import Attention, Decoder, Layer
from foredraft.model.layers import LayerNorm, RMSNorm
from foredraft.model.projected_embeddings import PROJECTIONS, Folded, ProjectedLayout
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_layouts import HEAD, TensorLayout
from tests.parity.mutant_checks import (
    Function,
    check,
    decoding_logits,
    prompt_logits,
    reloaded_logits,
    with_parts,
    with_rope,
)
from tests.support.planting import Spoiler, defect, replaced


def of_spec(**changed: Any) -> Spoiler:
    """Give a function of a spec another one."""
    return lambda sound: lambda spec, *rest: sound(replace(spec, **changed), *rest)


def in_head(**changed: Any) -> Spoiler:
    """Give the head another spec."""

    def spoiler(head: Function) -> Function:
        def spoilt(own: Decoder, *rest: Any) -> Tensor:
            with replaced(own, "spec", replace(own.spec, **changed)):
                logits: Tensor = head(own, *rest)
            return logits

        return spoilt

    return spoiler


def normed_before(own: Any) -> Any:
    """Return a sub-layer whose input has the norm of its output."""
    return replace(own, norm=own.post_norm, post_norm=None)


def project_normed(project: Function) -> Function:
    return lambda spec, own, *rest: project(spec, normed_before(own), *rest)


def finish_normed(finish: Function) -> Function:
    def spoilt(spec: ModelSpec, layer: Layer, *rest: Any) -> Tensor:
        before = Layer(normed_before(layer.attention), normed_before(layer.mlp))
        out: Tensor = finish(spec, before, *rest)
        return out

    return spoilt


def each_head_normed(project: Function) -> Function:
    """Norm each head of queries and keys by itself, with its part of the weight."""

    def by_head(norm: Any) -> Function:
        def normed(x: Tensor) -> Tensor:
            dim = x.shape[-1]
            return F.rms_norm(x, (dim,), None, norm.eps) * norm.weight.view(-1, dim)

        return normed

    def spoilt(spec: ModelSpec, own: Attention, *rest: Any) -> Tensor:
        heads: Any = replace(own, q_norm=by_head(own.q_norm), k_norm=by_head(own.k_norm))  # type: ignore[arg-type]
        qkv: Tensor = project(replace(spec, projection_norms=False), heads, *rest)
        return qkv

    return spoilt


def mean_kept(call: Function) -> Function:
    def spoilt(norm: LayerNorm, x: Tensor) -> Tensor:
        out = RMSNorm(norm.weight, norm.eps)(x)
        return out if norm.bias is None else out + norm.bias

    return spoilt


def without_bias(call: Function) -> Function:
    return lambda norm, x: call(replace(norm, bias=None), x)


def next_position(embed: Function) -> Function:
    return lambda own, tokens, positions: embed(own, tokens, positions + 1)


def one_row_early(learned_positions: Function) -> Function:
    """Take OPT's table from the row before that of position 0."""

    def spoilt(builder: Any) -> Tensor:
        with replaced(builder, "spec", replace(builder.spec, position_offset=1)):
            table: Tensor = learned_positions(builder)
        return table

    return spoilt


def head_without_bias(linear: Function) -> Function:
    def spoilt(builder: Any, names: dict[str, int], *rest: Any) -> Any:
        made = linear(builder, names, *rest)
        return replace(made, bias=None) if HEAD in names else made

    return spoilt


def taken_as_stored(part: str) -> Spoiler:
    """Leave one of GPT-2's weights as [K, M]."""
    return lambda transposed: lambda layout, name: part not in name and transposed(layout, name)


def activated_by(name: str) -> Spoiler:
    return lambda activate: lambda activation, x: activate(name, x)


def stored_order(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    return torch.arange((heads + 2 * kv_heads) * head_dim)


def first_head_normed(call: Function) -> Function:
    """Give all heads the norm of the first."""
    return lambda norm, x: call(replace(norm, weight=norm.weight[:1]) if norm.weight.dim() == 2 else norm, x)


def folded_back(product: Function) -> Function:
    """Project embeddings and heads each by the other's projection."""

    def spoilt(own: Folded, rows: slice) -> Tensor:
        other = {PROJECTIONS["project_in"]: "project_out", PROJECTIONS["project_out"]: "project_in"}
        module = other[own.projection.removesuffix(".weight")]
        file = own.projections
        found = replace(file, stored=file.stored.replace(file.stored.split(".")[-2], module))
        made: Tensor = product(replace(own, projections=found, outward=not own.outward), rows)
        return made

    return spoilt


RUN, TABLE, CALL = Decoder.run, rope.rope_table, LayerNorm.__call__
MUTANTS = [
    defect(
        "norms before sub-layers instead of after",
        RUN,
        with_parts(project=project_normed, finish=finish_normed),
        check(decoding_logits, "olmo2"),
    ),
    defect(
        "queries and keys normed by head",
        RUN,
        with_parts(project=each_head_normed),
        check(decoding_logits, "olmo2"),
    ),
    defect(
        "norms of outputs instead of sums",
        RUN,
        with_parts(finish=of_spec(sum_norms=False)),
        check(decoding_logits, "opt-sums-normed"),
    ),
    defect(
        "norms before sub-layers instead of after sums",
        RUN,
        with_parts(project=project_normed, finish=finish_normed),
        check(decoding_logits, "opt-sums-normed"),
    ),
    defect("one norm for all heads", CALL, first_head_normed, check(decoding_logits, "stablelm-head-norms")),
    defect(
        "projections of embedding and head exchanged",
        Folded.__getitem__,
        folded_back,
        check(reloaded_logits, "opt-projected-untied"),
    ),
    defect(
        "head of an untied model folded from its embedding",
        ProjectedLayout.combined,
        lambda combined: lambda own, files: combined(replace(own, tied=True), files),
        check(reloaded_logits, "opt-projected-untied"),
        CheckpointError,
    ),
    defect(
        "norms of OLMo take 1 + weight",
        weights._Builder.norm,
        lambda norm: (
            lambda builder, *rest: replace(norm(builder, *rest), weight=norm(builder, *rest).weight + 1)
        ),
        check(reloaded_logits, "olmo3"),
    ),
    defect(
        "rope scaling in windowed layers, too",
        ModelSpec.rope_of,
        lambda rope_of: lambda spec, window: rope_of(spec, None),
        check(decoding_logits, "olmo3-yarn"),
    ),
    defect(
        "parallel residual made sequential",
        RUN,
        with_parts(finish=of_spec(parallel_residual=False)),
        check(decoding_logits, "gpt_neox"),
    ),
    defect(
        "sequential residual made parallel",
        RUN,
        with_parts(finish=of_spec(parallel_residual=True)),
        check(decoding_logits, "gpt_neox-sequential-tied"),
    ),
    defect("mean of a layer norm not subtracted", CALL, mean_kept, check(decoding_logits, "cohere2")),
    defect("bias of a norm left out", CALL, without_bias, check(decoding_logits, "starcoder2")),
    defect("learned position off by one", Decoder.embed, next_position, check(decoding_logits, "gpt2")),
    defect(
        "learned positions without OPT's offset",
        weights._Builder.learned_positions,
        one_row_early,
        check(reloaded_logits, "opt"),
    ),
    defect(
        "layers without rotation rotated",
        attention.attend,
        of_spec(unrotated=()),
        check(decoding_logits, "exaone4"),
    ),
    defect(
        "all layers without rotation",
        attention.attend,
        of_spec(unrotated=tuple(range(5))),
        check(decoding_logits, "cohere2"),
    ),
    defect("logits divided", Decoder.head, in_head(logit_scale=1 / 0.3), check(decoding_logits, "cohere2")),
    defect("logits not scaled", Decoder.head, in_head(logit_scale=None), check(prompt_logits, "cohere2")),
    defect(
        "interleaved channels left as stored",
        row_orders.channel_order,
        lambda order: lambda spec: None,
        check(reloaded_logits, "glm4"),
    ),
    defect(
        "channels interleaved though they are not",
        row_orders.channel_order,
        of_spec(interleaved=True),
        check(reloaded_logits, "phi-head-norms"),
    ),
    defect("whole heads rotated", TABLE, with_rope(share=1.0), check(decoding_logits, "stablelm")),
    defect(
        "queries, keys and values left by head",
        row_orders.grouped_rows,
        lambda grouped: stored_order,
        check(reloaded_logits, "gpt_neox"),
    ),
    defect(
        "bias of the head left out",
        weights._Builder.linear,
        head_without_bias,
        check(reloaded_logits, "phi"),
    ),
    defect(
        "output projection not transposed",
        TensorLayout._is_transposed,
        taken_as_stored("o_proj"),
        check(reloaded_logits, "gpt2"),
    ),
    defect(
        "c_attn not transposed",
        TensorLayout._is_transposed,
        taken_as_stored("qkv_proj"),
        check(reloaded_logits, "gpt2"),
        CheckpointError,
    ),
    defect("ReLU taken for GELU", layers.activate, activated_by("relu"), check(decoding_logits, "gpt2")),
    defect("GELU taken for ReLU", layers.activate, activated_by("gelu"), check(decoding_logits, "opt")),
    defect(
        "GELU in its tanh approximation taken for GELU",
        layers.activate,
        activated_by("gelu_tanh"),
        check(decoding_logits, "gpt_neox"),
    ),
    defect(
        "window left out",
        forward_context.causal_masks,
        lambda masks: (
            lambda spec, *rest: dict.fromkeys(
                spec.windows, masks(replace(spec, windows=(None,)), *rest)[None]
            )
        ),
        check(decoding_logits, "starcoder2"),
    ),
]
