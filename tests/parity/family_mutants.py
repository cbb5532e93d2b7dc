"""Planted defects of the families after Gemma 3, in tables as that of `test_defects.py`, which plants them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model import attention, checkpoint, decoder, layers, rope, spec
from foredraft.model.decoder import Attention, Decoder, Layer
from foredraft.model.families import llama
from foredraft.model.layer_weights import LayerBuilder
from foredraft.model.layers import (
    PROJECTIONS,
    LayerInput,
    LayerInputs,
    LayerNorm,
    ProjectedLayout,
    RMSNorm,
)
from foredraft.model.rope import Rope
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import HEAD, Naming, transposed
from tests.parity.mutant_checks import (
    MASKS,
    NARROWER,
    RUN,
    WIDER,
    Function,
    configured,
    decoding,
    given,
    norms_with,
    projected_with,
    prompt,
    reloaded,
    with_parts,
    with_spec,
    without_scale,
)
from tests.support.mutation import Mutation, defect
from tests.support.mutations import argument, around, instead

TABLE, FAMILY, SCORES, CALL = rope.rope_table, spec._family, attention.masked_attention, LayerNorm.__call__
LINEAR, NORM = LayerBuilder.linear, LayerBuilder.norm

# --- Gemma 4 --------------------------------------------------------------------------------------------


def read_from(layer: int, other: int) -> Mutation:
    """Let one layer read the keys and values of another one than its own source."""
    return lambda source_of: lambda spec, index: other if index == layer else source_of(spec, index)


unscaled = around(lambda finish, spec, layer, *rest: finish(spec, replace(layer, scalar=1.0), *rest))
without_gate = instead(lambda own, x, given, *rest: x + own.norm(own.output(given)))
unweighted_norm = around(
    lambda of, own, *rest: of(
        replace(own, norm=replace(own.norm, weight=torch.ones_like(own.norm.weight))), *rest
    )
)


def normed_keys_for_values(own: Any) -> Any:
    if own.v_norm is None or own.k_norm is None or own.window is not None:
        return own
    v_norm, k_norm = own.v_norm, own.k_norm
    return replace(own, v_norm=lambda keys: v_norm(k_norm(keys)))


scaled_by_head = around(
    lambda attend, spec, q, *rest: attend(replace(spec, attention_scale=q.shape[-1] ** -0.5), q, *rest)
)

SHARED, JOINED, BY_LAYER = "gemma4-shared", "gemma4-k-eq-v", "gemma4-by-layer"
VALUES_AS_THEY_ARE = projected_with(lambda own: replace(own, v_norm=None))
GEMMA4 = [
    defect("window one too wide", MASKS, WIDER, decoding("gemma4")),
    defect("window one too narrow", MASKS, NARROWER, prompt("gemma4-unified")),
    # layer 5 shares the keys of layer 3, and layers 4 and 6 those of layer 1
    defect(
        "shared keys of the windowed layer before", ModelSpec.source_of, read_from(5, 2), decoding(SHARED)
    ),
    defect(
        "shared keys of the first windowed layer", ModelSpec.source_of, read_from(5, 0),
        decoding("gemma4-unified-shared"),
    ),
    defect("norm of values left out", RUN, VALUES_AS_THEY_ARE, decoding("gemma4")),
    defect("norm of values left out where they are keys", RUN, VALUES_AS_THEY_ARE, decoding(JOINED)),
    defect("values are the normed keys", RUN, projected_with(normed_keys_for_values), decoding(JOINED)),
    defect("scalar of layers left out", RUN, with_parts(finish=unscaled), decoding("gemma4")),
    defect(
        "inputs of the layer after", decoder._input_of,
        lambda input_of: lambda context, layer: input_of(context, (layer + 1) % 7), decoding(SHARED),
    ),
    defect("gate of inputs left out", LayerInput.add, without_gate, decoding(SHARED)),
    defect("tokens' own inputs left out", LayerInputs.of, given(scale=0.0), decoding(BY_LAYER)),
    defect("norm of projected inputs unweighted", LayerInputs.of, unweighted_norm, decoding(BY_LAYER)),
    defect("all channels of full attention rotated", rope.frequencies, given(turning=1.0), decoding("gemma4")),
    defect("scores scaled by the size of a head", SCORES, scaled_by_head, decoding("gemma4")),
    defect("embedding without its scale", Decoder.embed, without_scale, decoding("gemma4-unified")),
]  # fmt: skip

# --- families of a Llama's form --------------------------------------------------------------------------


def in_family(mutation: Mutation) -> Mutation:
    """Mutate the function that reads a family's config."""

    @around
    def with_family(family_of: Function, config: Any) -> Any:
        name, family = family_of(config)
        return name, replace(family, own=mutation(family.fields))

    return with_family


embeddings_unscaled = around(lambda fields, read: {**fields(read), "embedding_scale": None})


def at_a_position(past: int) -> Mutation:
    """Load for a text that ends so far past the trained length."""
    return lambda at_length: lambda own, positions: at_length(own, own.original_positions + past)


@around
def switched_in_the_middle(table: Function, own: Rope, head_dim: int, positions: int, *rest: Any) -> Tensor:
    """Rotate positions up to the trained length by the short factors, and the others by the long ones."""
    long: Tensor = table(own, head_dim, positions, *rest)
    if own.kind != "longrope":
        return long
    short = replace(own, factors=tuple(1.0 + at / 8 for at in range(len(own.factors))))
    first = own.original_positions
    return torch.cat([table(short, head_dim, first, *rest), long[first:]])


one_layer_early = around(lambda unrotated, read: tuple(max(0, layer - 1) for layer in unrotated(read)))
residual_scaled_too = around(lambda added, spec, x, *rest: added(spec, x * spec.residual_scale, *rest))
# grow at every position, not only with each period
grown_within_a_period = instead(
    lambda own, positions: 1 + own.growth * torch.log(1 + torch.arange(positions) / own.period)
)
keys_grown_too = around(
    lambda read_rope, read: (lambda found: (found[1] or found[0], found[1]))(read_rope(read))
)
# take the first rows of keys for queries, by one head
split_at_other_rows = instead(
    lambda spec: torch.arange((spec.heads + 2 * spec.kv_heads) * spec.head_dim).roll(spec.head_dim)
)


@around
def up_before_gate(linear: Function, builder: Any, names: dict[str, int], *rest: Any) -> Any:
    """Take the second half of the fused weight for the gate."""
    [name] = names if len(names) == 1 else [""]
    if not name.endswith("gate_up_proj"):
        return linear(builder, names, *rest)
    order = torch.arange(names[name]).roll(names[name] // 2)
    return linear(builder, names, *rest[:1], False, order)


LONG, SHORT = "phi3-longrope-long", "phi3-longrope-short"
LLAMA_LIKE = [
    defect("long factors for short ones", Rope.at_length, at_a_position(1), reloaded(SHORT)),
    defect("short factors for long ones", Rope.at_length, at_a_position(0), reloaded(LONG)),
    defect("factors switched in the middle", TABLE, switched_in_the_middle, decoding(LONG)),
    defect(
        "longrope's attention factor left out", TABLE, given(attention_factor=1.0),
        decoding("phi3-longrope-factor"),
    ),
    defect(
        "the whole head rotated", Rope.rotated, lambda rotated: lambda own, head_dim: head_dim,
        decoding("phi3-partial"),
    ),
    defect("fused weight split at other rows", checkpoint.qkv_order, split_at_other_rows, reloaded("phi3")),
    defect("up projection taken for the gate", LINEAR, up_before_gate, reloaded("phi3")),
    defect(
        "a layer rotated that is not", llama.read_unrotated,
        lambda unrotated: lambda read: unrotated(read)[:0], reloaded("smollm3"),
    ),
    defect("another layer not rotated", llama.read_unrotated, one_layer_early, reloaded("smollm3-listed")),
    defect("logits multiplied where they are divided", Decoder.head, with_spec(logit_scale=8.0), decoding("granite")),
    defect("factor on what is added left out", decoder._added, given(residual_scale=None), decoding("granite")),
    defect("factor on the states, too", decoder._added, residual_scaled_too, prompt("granite")),
    defect("scores scaled by the size of a head", SCORES, given(attention_scale=0.25), decoding("granite")),
    defect("embeddings not scaled", FAMILY, in_family(embeddings_unscaled), reloaded("granite")),
    defect(
        "queries grow a position early", rope._grown,
        lambda grown: lambda own, positions: grown(own, positions + 1)[1:], decoding("ministral3"),
    ),
    defect("queries grow within a period", rope._grown, grown_within_a_period, decoding("ministral3")),
    defect("keys grow, too", rope.read_growing_rope, keys_grown_too, reloaded("ministral3")),
    defect("norms without their offset", NORM, norms_with(-1.0), reloaded("gemma")),
    defect("gelu taken for SiLU", FAMILY, in_family(configured(hidden_act="silu")), reloaded("gemma-gelu")),
    defect(
        "share of the head in the section ignored", FAMILY, in_family(configured(rope_parameters=None)),
        reloaded("phi3-partial"),
    ),
]  # fmt: skip

# --- norms, residuals, positions and tensor layouts ------------------------------------------------------


def normed_before(own: Any) -> Any:
    """Return a sub-layer whose input has the norm of its output."""
    return replace(own, norm=own.post_norm, post_norm=None)


project_normed = around(lambda project, spec, own, *rest: project(spec, normed_before(own), *rest))
finish_normed = around(
    lambda finish, spec, layer, *rest: finish(
        spec, Layer(normed_before(layer.attention), normed_before(layer.mlp)), *rest
    )
)


def each_head_normed(project: Function) -> Function:
    """Norm each head of queries and keys by itself, with its part of the weight."""

    @around
    def by_head(norm: Any, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        return F.rms_norm(x, (dim,), None, norm.eps) * norm.weight.view(-1, dim)

    def mutated(spec: ModelSpec, own: Attention, *rest: Any) -> Tensor:
        heads: Any = replace(own, q_norm=by_head(own.q_norm), k_norm=by_head(own.k_norm))  # type: ignore[arg-type]
        qkv: Tensor = project(replace(spec, projection_norms=False), heads, *rest)
        return qkv

    return mutated


@instead
def mean_kept(norm: LayerNorm, x: Tensor) -> Tensor:
    out = RMSNorm(norm.weight, norm.eps)(x)
    return out if norm.bias is None else out + norm.bias


next_position = argument(2, lambda positions: positions + 1)


@around
def head_without_bias(linear: Function, builder: Any, names: dict[str, int], *rest: Any) -> Any:
    made = linear(builder, names, *rest)
    return replace(made, bias=None) if HEAD in names else made


def taken_as_stored(part: str) -> Mutation:
    """Leave one of GPT-2's weights as [K, M]."""
    return lambda transposed: lambda layout, name: part not in name and transposed(layout, name)


def activated_by(name: str) -> Mutation:
    return lambda activate: lambda activation, x: activate(name, x)


stored_order = instead(lambda heads, kv_heads, head_dim: torch.arange((heads + 2 * kv_heads) * head_dim))
# give all heads the norm of the first
first_head_normed = around(
    lambda call, norm, x: call(replace(norm, weight=norm.weight[:1]) if norm.weight.dim() == 2 else norm, x)
)


@around
def folded_back(opened: Function, own: ProjectedLayout, stored: Any) -> Any:
    """Project embeddings and heads each by the other's projection."""
    inward, outward = (f"model.decoder.{name}.weight" for name in PROJECTIONS)
    turned = {inward: transposed(stored[outward]), outward: transposed(stored[inward])}
    return opened(own, stored | turned)


windowless = around(
    lambda masks, spec, *rest: dict.fromkeys(spec.windows, masks(replace(spec, windows=(None,)), *rest)[None])
)

NORMED_BEFORE = with_parts(project=project_normed, finish=finish_normed)
PARALLEL, SEQUENTIAL = (with_parts(finish=given(parallel_residual=each)) for each in (True, False))
TRANSPOSED, ORDER, ATTEND = Naming._is_transposed, checkpoint.channel_order, attention.attend
SUMS, PROJECTED = "opt-sums-normed", "opt-projected-untied"
OTHERS = [
    defect("norms before sub-layers instead of after", RUN, NORMED_BEFORE, decoding("olmo2")),
    defect("queries and keys normed by head", RUN, with_parts(project=each_head_normed), decoding("olmo2")),
    defect("norms of outputs, not of sums", RUN, with_parts(finish=given(sum_norms=False)), decoding(SUMS)),
    defect("norms before sub-layers instead of after sums", RUN, NORMED_BEFORE, decoding(SUMS)),
    defect("one norm for all heads", CALL, first_head_normed, decoding("stablelm-head-norms")),
    defect("projections in and out exchanged", ProjectedLayout.opened, folded_back, reloaded(PROJECTED)),
    defect(
        "untied head folded as a tied one",
        ProjectedLayout.opened,
        given(tied=True),
        reloaded(PROJECTED),
        CheckpointError,
    ),
    defect("norms of OLMo take 1 + weight", NORM, norms_with(1.0), reloaded("olmo3")),
    defect(
        "rope scaling in windowed layers, too",
        ModelSpec.rope_of,
        lambda rope_of: lambda spec, window: rope_of(spec, None),
        decoding("olmo3-yarn"),
    ),
    defect("parallel residual made sequential", RUN, SEQUENTIAL, decoding("gpt_neox")),
    defect("sequential residual made parallel", RUN, PARALLEL, decoding("gpt_neox-sequential-tied")),
    defect("mean of a layer norm not subtracted", CALL, mean_kept, decoding("cohere2")),
    defect("bias of a norm left out", CALL, given(bias=None), decoding("starcoder2")),
    defect("learned position off by one", Decoder.embed, next_position, decoding("gpt2")),
    defect(
        "learned positions from the row before OPT's position 0",
        LayerBuilder.learned_positions,
        with_spec(position_offset=1),
        reloaded("opt"),
    ),
    defect("layers without rotation rotated", ATTEND, given(unrotated=()), decoding("exaone4")),
    defect("all layers without rotation", ATTEND, given(unrotated=tuple(range(5))), decoding("cohere2")),
    defect("logits divided", Decoder.head, with_spec(logit_scale=1 / 0.3), decoding("cohere2")),
    defect("logits not scaled", Decoder.head, with_spec(logit_scale=None), prompt("cohere2")),
    defect("channels left as stored", ORDER, lambda order: lambda spec: None, reloaded("glm4")),
    defect("channels wrongly interleaved", ORDER, given(interleaved=True), reloaded("phi-head-norms")),
    defect("whole heads rotated", TABLE, given(share=1.0), decoding("stablelm")),
    defect("rows left in their groups", checkpoint.grouped_rows, stored_order, reloaded("gpt_neox")),
    defect("bias of the head left out", LINEAR, head_without_bias, reloaded("phi")),
    defect("output projection not transposed", TRANSPOSED, taken_as_stored("o_proj"), reloaded("gpt2")),
    defect(
        "c_attn not transposed", TRANSPOSED, taken_as_stored("qkv_proj"), reloaded("gpt2"), CheckpointError
    ),
    defect("ReLU taken for GELU", layers.activate, activated_by("relu"), decoding("gpt2")),
    defect("GELU taken for ReLU", layers.activate, activated_by("gelu"), decoding("opt")),
    defect("tanh taken for GELU", layers.activate, activated_by("gelu_tanh"), decoding("gpt_neox")),
    defect("window left out", MASKS, windowless, decoding("starcoder2")),
]
MUTANTS = [*GEMMA4, *LLAMA_LIKE, *OTHERS]
