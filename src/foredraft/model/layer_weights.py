"""LayerBuilder: layers, norms and linear layers, made of tensors by their names in a checkpoint.

Linear layers with one input are fused, packed for what runs them, or coded: by the checkpoint, or in so many
bits. A source on "meta" gives sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.kernels.pool import Arena
from foredraft.model import mamba, short_conv
from foredraft.model.checkpoint import (
    CheckpointTensors,
    Shapes,
    channel_order,
    delta_order,
    inputs_of,
    qkv_order,
)
from foredraft.model.decoder import MLP, Attention, Layer
from foredraft.model.delta import Delta
from foredraft.model.kept_weights import KeptWeights
from foredraft.model.layers import (
    LayerInput,
    LayerInputs,
    LayerNorm,
    Linear,
    Norm,
    Product,
    RMSNorm,
    RowSource,
)
from foredraft.model.quantisation.codes import CodeFormat, Codes, quantise
from foredraft.model.recurrent import Recurrence
from foredraft.model.runner.native.products import (
    NativeCodes,
    is_native,
    pack_codes,
    pack_native,
    pack_pieces,
)
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import EMBEDDING, HEAD, LAST_NORM, LAYERS, POSITIONS

LAYER_EMBEDDING, LAYER_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"


class TensorSource(Protocol):
    """Gives a decoder its tensors by name, on `device` and in `dtype`; those of one call are joined."""

    device: torch.device
    dtype: torch.dtype

    def load(self, shapes: Shapes) -> Tensor: ...  # in memory of their own
    def load_temporary(self, shapes: Shapes) -> Tensor: ...  # valid until the next call
    def free_temporary(self) -> None: ...


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu":
        return False
    from foredraft.model.runner.compiled import unpacked_because  # which the kernels do without

    return unpacked_because(device, dtype) is None


class LayerBuilder:
    def __init__(
        self,
        spec: ModelSpec,
        tensors: TensorSource,
        native: bool = False,
        bits: int | None = None,
        *,
        pack: bool = True,
    ) -> None:
        self.spec, self.tensors, self.native, self.bits = spec, tensors, native, bits
        # linear layers copy their weight
        self.packs = native or (pack and _packs(tensors.device, tensors.dtype))
        self.arena = Arena()
        self.kept: KeptWeights | None = None
        self.channels, self.qkv_order = channel_order(spec), qkv_order(spec)

    def norm(self, name: str, size: int | None = None, heads: int = 0, *, eps: float | None = None) -> Norm:
        """Return the norm `name` of `size` values, by default of a hidden state; or a norm for each head."""
        if heads:
            assert size is not None
            weights = self.tensors.load({f"{name}.{head}.weight": (size,) for head in range(heads)})
            return LayerNorm(weights.float().view(heads, size), None, self.spec.norm_eps)
        spec, shape = self.spec, (size or self.spec.hidden_size,)
        eps = eps or spec.norm_eps

        def load(kind: str) -> Tensor:
            values = self.tensors.load({f"{name}.{kind}": shape})
            if size is None or self.channels is None or values.is_meta:
                return values
            return values.view(-1, spec.head_dim)[:, self.channels.to(values.device)].flatten()

        weight = load("weight")
        if spec.layer_norms:
            bias = load("bias").float() if spec.norm_bias else None
            return LayerNorm(weight.float(), bias, eps)
        if spec.norm_offset or spec.norm_float32:
            weight = weight.float()
        offset = spec.norm_offset and not (spec.plain_last_norm and name == LAST_NORM)
        if offset and not weight.is_meta:  # there a sum would import PyTorch's compiler for seconds
            weight = weight + 1.0
        return RMSNorm(weight, eps, spec.norm_offset or spec.norm_float32)

    def learned_positions(self) -> Tensor | None:
        spec = self.spec
        if not spec.learned_positions:
            return None
        table = self.tensors.load({f"{POSITIONS}.weight": (spec.learned_positions, spec.hidden_size)})
        return table[spec.position_offset :]

    def embedding(self, head: Product) -> Tensor | RowSource:
        """Return the embedding: the head itself, where they are equal and the head can give its rows."""
        spec, quantised = self.spec, self.spec.quantisation
        rows, columns = spec.vocab_size, spec.hidden_size
        if spec.embedding_copies and isinstance(head, NativeCodes):
            return head
        if spec.tied:
            if is_native(head):
                return head
            if not self.packs or self.native:  # native on "meta", where only sizes count
                return head.dense()  # an ordinary weight itself
        coded = self.bits is not None and CodeFormat(self.bits).holds(columns)
        if self.native and (coded or (quantised is not None and quantised.embedding)):
            product = self.linear({EMBEDDING: rows}, columns)
            return product if is_native(product) else product.dense()
        weight = self.tensors.load({f"{EMBEDDING}.weight": (rows, columns)})
        if self.bits is not None and coded and not weight.is_meta:
            return quantise(weight, self.bits).expand(weight.dtype)
        return weight

    def linear(
        self,
        names: dict[str, int],
        columns: int,
        has_bias: bool = False,
        order: Tensor | None = None,
        *,
        few_bits: bool = True,
    ) -> Product:
        """Return one linear layer, fused from the named ones with their numbers of rows, in an order [M]."""
        make = partial(self._product, names, columns, has_bias, order, self.bits if few_bits else None)
        product: Any = make() if self.kept is None else self.kept.product(" ".join(names), make)
        inputs = inputs_of(names, columns, self.spec.quantisation)
        made: Product = product if inputs is None else replace(product, inputs=inputs)
        return made

    def _product(
        self, names: dict[str, int], columns: int, has_bias: bool, order: Tensor | None, bits: int | None
    ) -> Product:
        tensors = self.tensors
        weights: Shapes = {f"{name}.weight": (rows, columns) for name, rows in names.items()}
        # a head that is tied to the embedding has a bias of its own
        biases: Shapes = {f"{HEAD if name == EMBEDDING else name}.bias": (n,) for name, n in names.items()}
        bias = tensors.load(biases) if has_bias else None
        bias = None if bias is None else _in_order(bias, order)
        stored = tensors.codes(weights) if self.native and isinstance(tensors, CheckpointTensors) else None
        if stored is not None:
            if order is not None:
                stored = iter([Codes.gathered(len(order), stored).in_order(order)])
            return pack_pieces((sum(names.values()), columns), stored, tensors.dtype, bias, self.arena)
        weight = tensors.load_temporary(weights) if self.packs else tensors.load(weights)
        weight = _in_order(weight, order)
        if bits is not None and CodeFormat(bits).holds(columns) and not weight.is_meta:
            codes = quantise(weight, bits)
            if self.native:
                return pack_codes(codes, weight.dtype, bias, self.arena)
            weight = codes.expand(weight.dtype)
        if self.native and not weight.is_meta:
            return pack_native(weight, bias, self.arena)
        if not self.packs or weight.is_meta:
            return Linear(weight, bias)
        from foredraft.model.runner.compiled import pack

        return pack(weight, bias)

    def layer(self, index: int, *, mlp: bool = True) -> Layer:
        prefix = f"{LAYERS}.{index}"
        recurs = index in self.spec.recurrent_layers
        attention = self._recurrence(prefix) if recurs else self._attention(prefix, index)
        made = self._mlp(prefix, index, attention) if mlp and index not in self.spec.without_mlp else None
        own, hidden, size = None, self.spec.hidden_size, self.spec.layer_input_size
        if size:
            gate, output = f"{prefix}.per_layer_input_gate", f"{prefix}.per_layer_projection"
            norm = self.norm(f"{prefix}.post_per_layer_input_norm")
            own = LayerInput(self.linear({gate: size}, hidden), self.linear({output: hidden}, size), norm)
        if self.spec.layer_scalars:
            found = self.tensors.load({f"{prefix}.layer_scalar": (1,)})
            if not found.is_meta:
                return Layer(attention, made, own, found if found.requires_grad else float(found))
        return Layer(attention, made, own)

    def _attention(self, prefix: str, index: int) -> Attention:
        spec, norm, window = self.spec, self.norm, self.spec.windows[index]
        dim, stores = spec.head_dim_of(window), spec.stores(index)
        q_rows, kv_rows = spec.heads * dim, spec.kv_heads_of(window) * dim
        # with the gates
        stored_rows = 2 * q_rows if spec.gated_attention and not spec.gates_apart else q_rows
        own = "" if not stores else "k" if spec.joins_values(window) else "kv"
        projections = {f"{prefix}.self_attn.q_proj": stored_rows}
        projections |= {f"{prefix}.self_attn.{name}_proj": kv_rows for name in own}
        if spec.gates_apart:
            projections[f"{prefix}.self_attn.gate_proj"] = q_rows
        if spec.fused_qkv:
            projections = {f"{prefix}.self_attn.qkv_proj": q_rows + 2 * kv_rows}
        output = {f"{prefix}.self_attn.o_proj": spec.hidden_size}
        normed, after = spec.head_norms or spec.projection_norms, spec.post_norms or spec.sum_norms
        q_size, k_size = (q_rows, kv_rows) if spec.projection_norms else (dim, dim)
        q_heads, k_heads = (spec.heads, spec.kv_heads_of(window)) if spec.own_head_norms else (0, 0)

        def plain() -> Norm:
            return RMSNorm(torch.ones(dim, device=self.tensors.device), spec.norm_eps, offset=True)

        def head_norm(name: str, size: int, heads: int) -> Norm:
            return plain() if spec.plain_head_norms else norm(f"{prefix}.self_attn.{name}", size, heads)

        return Attention(
            norm=norm(f"{prefix}.input_layernorm") if spec.pre_norms else None,
            qkv=self.linear(projections, spec.hidden_size, spec.qkv_bias, self.qkv_order),
            output=self.linear(output, q_rows, spec.output_bias),
            post_norm=norm(f"{prefix}.post_attention_layernorm", eps=spec.post_norm_eps) if after else None,
            q_norm=head_norm("q_norm", q_size, q_heads) if normed else None,
            k_norm=head_norm("k_norm", k_size, k_heads) if normed and stores else None,
            v_norm=plain() if spec.value_norms and stores else None,
            window=window,
        )

    def _recurrence(self, prefix: str) -> Recurrence:
        makers = {"delta": self._delta, "mamba": self._mamba, "convolution": self._short_conv}
        assert self.spec.recurrent is not None
        return makers[self.spec.recurrent.kind](prefix)

    def _delta(self, prefix: str) -> Recurrence:
        spec, sizes, own = self.spec, self.spec.recurrent, f"{prefix}.linear_attn"
        assert sizes is not None
        qkv = {f"{own}.in_proj_qkv": sizes.channels, f"{own}.in_proj_z": sizes.values}
        rates = {f"{own}.in_proj_{name}": sizes.value_heads for name in "ba"}
        if sizes.by_key:
            qkv = {f"{own}.in_proj_qkvz": sizes.channels + sizes.values}
            rates = {f"{own}.in_proj_ba": 2 * sizes.value_heads}
        each, heads = (sizes.value_heads,), sizes.value_heads // sizes.key_heads
        values = heads * sizes.value_dim
        qkv_order = delta_order(sizes, sizes.key_dim, sizes.key_dim, values, values)
        taps = self._exact(f"{own}.conv1d.weight", (sizes.channels, 1, sizes.taps))
        return Delta(
            sizes=sizes,
            norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self.linear(qkv, spec.hidden_size, order=qkv_order),
            rates=self.linear(
                rates, spec.hidden_size, order=delta_order(sizes, heads, heads), few_bits=False
            ),
            taps=taps.view(sizes.channels, sizes.taps),
            decay=self._exact(f"{own}.A_log", each, _decay_of),
            bias=self._exact(f"{own}.dt_bias", each),
            output_norm=self._exact(f"{own}.norm.weight", (sizes.value_dim,)),
            eps=spec.norm_eps,
            output=self.linear({f"{own}.out_proj": spec.hidden_size}, sizes.values),
        )

    def _mamba(self, prefix: str) -> Recurrence:
        spec, sizes, own = self.spec, self.spec.recurrent, f"{prefix}.mamba"
        assert sizes is not None
        rows, each = mamba.stored_order(sizes), (sizes.value_heads,)
        channels = rows[: sizes.channels] - sizes.values
        taps = self._exact(f"{own}.conv1d.weight", (sizes.channels, 1, sizes.taps))
        return mamba.Mamba(
            sizes=sizes,
            norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self.linear({f"{own}.in_proj": len(rows)}, spec.hidden_size, order=rows),
            taps=_in_order(taps, channels).view(sizes.channels, sizes.taps),
            shift=_in_order(self._exact(f"{own}.conv1d.bias", (sizes.channels,)), channels),
            decay=self._exact(f"{own}.A_log", each, _decay_of),
            bias=self._exact(f"{own}.dt_bias", each),
            skip=self._exact(f"{own}.D", each),
            output_norm=self._exact(f"{own}.norm.weight", (sizes.values,)),
            eps=spec.norm_eps,
            output=self.linear({f"{own}.out_proj": spec.hidden_size}, sizes.values),
        )

    def _short_conv(self, prefix: str) -> Recurrence:
        spec, sizes, own = self.spec, self.spec.recurrent, f"{prefix}.conv"
        assert sizes is not None
        rows = short_conv.stored_order(sizes)
        taps = self._exact(f"{own}.conv.weight", (sizes.channels, 1, sizes.taps))
        return short_conv.ShortConv(
            sizes=sizes,
            norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self.linear({f"{own}.in_proj": len(rows)}, spec.hidden_size, order=rows),
            taps=taps.view(sizes.channels, sizes.taps),
            output=self.linear({f"{own}.out_proj": spec.hidden_size}, sizes.values),
        )

    def _exact(
        self, name: str, shape: tuple[int, ...], function: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        """Return a function of a tensor in float32, which its stored dtype may be, whatever others' is."""
        tensors = self.tensors
        if not isinstance(tensors, CheckpointTensors) or tensors.device.type == "meta":
            found = tensors.load({name: shape})
            return found if found.is_meta else function(found)
        return function(tensors.view(name, shape)).to(tensors.device, torch.float32, copy=True)

    def inputs(self) -> LayerInputs | None:
        """Return what makes the inputs that layers take of the tokens themselves; None in models without."""
        spec, size = self.spec, self.spec.layer_input_size
        if not size:
            return None
        width, dtype = spec.layers * size, self.tensors.dtype
        return LayerInputs(
            self.tensors.load({f"{LAYER_EMBEDDING}.weight": (spec.layer_input_rows, width)}),
            float(torch.tensor(size**0.5).to(dtype)),
            self.linear({LAYER_PROJECTION: width}, spec.hidden_size),
            spec.hidden_size**-0.5,
            self.norm("model.per_layer_projection_norm", size),
        )

    def _mlp(self, prefix: str, index: int, attention: Attention | Recurrence) -> MLP:
        spec, norm, inner = self.spec, self.norm, self.spec.inner_of(index)
        # without norms after sub-layers, Hugging Face calls the norm before the MLP "post attention"
        before = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        gate_up = {f"{prefix}.mlp.{name}_proj": inner for name in (("gate", "up") if spec.gated else ("up",))}
        if spec.fused_gate_up:
            gate_up = {f"{prefix}.mlp.gate_up_proj": 2 * inner}
        own = norm(f"{prefix}.{before}") if spec.pre_norms and not spec.shared_norm else None
        # the norm of the last sum is the final norm
        after = spec.post_norms or (spec.sum_norms and index < spec.layers - 1)
        return MLP(
            norm=attention.norm if spec.shared_norm else own,
            gate_up=self.linear(gate_up, spec.hidden_size, spec.mlp_bias),
            down=self.linear({f"{prefix}.mlp.down_proj": spec.hidden_size}, inner, spec.mlp_bias),
            post_norm=norm(f"{prefix}.post_feedforward_layernorm", eps=spec.post_norm_eps) if after else None,
        )


def _decay_of(exponents: Tensor) -> Tensor:
    """Return the rates at which states fade, of their logarithms, in float32 or the wider dtype of these."""
    return -torch.exp(exponents.to(torch.promote_types(exponents.dtype, torch.float32)))


def _in_order(stored: Tensor, order: Tensor | None) -> Tensor:
    """Return the rows of a stored tensor [M, ...] in another order; a copy, where there is one."""
    return stored if order is None or stored.is_meta else stored[order.to(stored.device)]
