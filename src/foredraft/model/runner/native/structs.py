"""The C structures of a model, a pass and a fused draft, field by field as in kernels.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import accumulate
from typing import TypeAlias

from foredraft.kernels.vocab import pointer
from foredraft.model.cache import CacheLayers
from foredraft.model.layers import LayerNorm, Norm, Product, RowSource
from foredraft.model.recurrent import RecurrentRows
from foredraft.model.runner.native.products import CLinear, is_native
from foredraft.model.spec import ModelSpec

MAX_HEAD_DIM = 512  # the head dimension that buffers in kernels.c have room for
# runs of columns: (cache row, first position, number of columns, where the first one's key and value lie)
Groups: TypeAlias = Sequence[tuple[int, int, int, int]]


class CNorm(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        ("eps", c_float),
        *((name, c_int32) for name in ("wide", "centred", "apart")),
    )


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}  # of a spec -> of kernels.c
NORMS = ("before", "after", "q", "k", "v", "mlp_before", "mlp_after", "input_after")
PRODUCTS = ("qkv", "output", "gate_up", "down", "input_gate", "input_output")


KINDS = {"delta": 1, "mamba": 2, "convolution": 3}  # of recurrent sizes -> of kernels.c
MIXER_PARTS = ("shift", "decay", "bias", "skip", "output_norm")  # of a recurrence; a kind may lack some


class CMixer(ctypes.Structure):
    _fields_ = (
        ("rates", CLinear),
        *((name, c_void_p) for name in ("weights", *MIXER_PARTS)),
        *((name, c_int64) for name in ("kind", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("taps", "block", "numbers")),
        ("eps", c_float),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CNorm) for name in NORMS),
        *((name, CLinear) for name in PRODUCTS),
        *((name, c_int64) for name in ("window", "rope", "query_rope", "rotated")),
        *((name, c_int64) for name in ("kv_heads", "dim", "inner", "reads", "joined")),
        ("scalar", c_float),
        ("mixer", CMixer),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads")),
        *(
            (name, c_int64)
            for name in ("activation", "gated", "parallel", "together", "sums", "wide", "gates", "room")
        ),
        *((name, c_float) for name in ("scale", "softcap", "logit_softcap")),
        ("embedding", c_void_p),
        ("tied", CLinear),
        ("embedding_scale", c_float),
        ("learned", c_void_p),
        ("last_learned", c_int64),
        ("norm", CNorm),
        ("head", CLinear),
        ("layer", ctypes.POINTER(CLayer)),
        ("input_size", c_int64),
        ("input_layers", c_int64),
        ("inputs", c_void_p),
        ("input_scale", c_float),
        ("projection_scale", c_float),
        ("projection", CLinear),
        ("input_norm", CNorm),
        *((name, c_int64) for name in ("pairs", "residual", "recurs")),
        *((name, CNorm) for name in ("token_norm", "state_norm")),
        ("join", CLinear),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        ("groups", c_int64),
        *((name, c_void_p) for name in ("first", "count", "start", "row", "slot")),
        ("rotary", ctypes.POINTER(c_void_p)),
        ("cache", c_void_p),
        ("rows", c_int64),
        ("positions", c_int64),
        ("inputs", c_void_p),
        ("base", c_void_p),
        ("recurrent", c_void_p),
    )


class CRecurrent(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("bases", "log", "at"))


def recurrent_structs(spec: ModelSpec, rows: RecurrentRows) -> ctypes.Array[CRecurrent]:
    """Return what each layer keeps; nothing, where it attends."""
    made = (CRecurrent * spec.layers)()
    for index, layer in enumerate(spec.recurrent_layers):
        parts = rows.bases[index], rows.logs[index], rows.at[index]
        made[layer] = CRecurrent(*(part.data_ptr() for part in parts))
    return made


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "cut")


class CSampling(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in SAMPLING)


class CDraft(ctypes.Structure):
    _fields_ = (
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("columns", "steps")),
        *((name, c_void_p) for name in ("slot", "length", "sampling", "keys", "allowed")),
        *((name, c_void_p) for name in ("drawn", "finite", "probs")),
        ("exit_layer", c_int64),
        *((name, c_void_p) for name in ("states", "pairs", "left", "draft_vocab")),
        ("vocabulary", c_int64),
        ("choices", c_void_p),
        ("most", c_int64),
        ("further", c_void_p),
    )


def pass_struct(
    cache: CacheLayers,
    groups: Groups,
    rotary: Sequence[int],
    inputs: int | None = None,
    bases: Sequence[int] = (),
    recurrent: ctypes.Array[CRecurrent] | None = None,
) -> CPass:
    """Return a pass; bases: of recurrent layers, the positions to which those of each group move."""
    assert cache.blocked, "the kernels read keys in blocks"
    rows, starts, counts, slots = zip(*groups, strict=True)
    numbers = array("q", (*accumulate(counts[:-1], initial=0), *counts, *starts, *rows, *slots, *bases))
    address, _ = numbers.buffer_info()
    size = numbers.itemsize * len(groups)  # bytes of each of the five arrays
    pass_ = CPass(
        len(groups),
        *range(address, address + 4 * size, size),
        None if slots == starts else address + 4 * size,  # no group is a leaf
        (c_void_p * len(rotary))(*rotary),
        cache.pointers,
        cache.rows,
        cache.stored,
        inputs,
        address + 5 * size if bases else None,
        None if recurrent is None else ctypes.addressof(recurrent),
    )
    pass_.numbers, pass_.recurrent_rows = numbers, recurrent  # kept alive for their addresses
    return pass_


def norm_struct(norm: Norm | None) -> CNorm:
    if norm is None:
        return CNorm()
    if isinstance(norm, LayerNorm):
        apart = norm.weight.shape[1] if norm.weight.dim() == 2 else 0
        return CNorm(norm.weight.data_ptr(), pointer(norm.bias), norm.eps, True, True, apart)
    return CNorm(norm.weight.data_ptr(), None, norm.eps, norm.offset)


def linear_struct_of(product: Product | RowSource, scale: float | None = None) -> CLinear:
    """Return the C struct of a product that is packed for the kernels; `scale` is a factor on its results."""
    assert is_native(product)
    made = product.as_struct()
    made.scale = scale or 0.0
    return made
