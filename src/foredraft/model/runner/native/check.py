"""The self-check of the C kernels: right values, and the same bits at every shape, for one model.

The source fixes the order of every sum; the check proves that the compiler kept it. Before the weights are
loaded, it runs one product for each inner width and for each format of codes, and the attention of one
layer at many shapes.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.kernels.compilation import kernel, library, unavailable_because
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation.codes import SUPER, CodeFormat, Codes, codebook_values
from foredraft.model.quantisation.scheme import rounded_to_integers
from foredraft.model.recurrent import unfit_sizes
from foredraft.model.runner.native.products import (
    WORD,
    fits,
    multiplies_integers,
    pack_codes,
    pack_native,
    suffix,
)
from foredraft.model.runner.native.structs import MAX_HEAD_DIM, CLayer, CModel, CPass, pass_struct
from foredraft.model.runner.probes import AttentionProbe, ProductProbe
from foredraft.model.spec import ModelSpec

ROWS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 64, 65, 100)  # full and partial tiles, and more than MAX_ROWS rows
REFERENCE = 8  # rows of the product that the others are compared with
OUTPUTS = 72  # of the probed products: two blocks and a partial one
CODE_FORMATS = (
    CodeFormat(4),
    CodeFormat(4, zeros=True),
    CodeFormat(8),
    CodeFormat(8, float8=True),
    CodeFormat(4, codebook="iq4"),
    CodeFormat(5),
    CodeFormat(5, unsigned=True, offsets=True),
    CodeFormat(2, group=16, unsigned=True, nested=True, offsets=True),
    CodeFormat(3, group=16, nested=True),
    CodeFormat(4, unsigned=True, nested=True, offsets=True),
    CodeFormat(6, group=16, nested=True),
    CodeFormat(6, group=16, nested=True, offsets=True),
    CodeFormat(8, group=16, nested=True, offsets=True),
)
# of probed attention: batch size, queries, place of the probed row
SHAPES = ((1, 1, 0), (1, 3, 0), (1, 16, 0), (1, 33, 0), (3, 1, 1), (4, 6, 2), (8, 5, 7))
QUERIES, CONTEXT = 33, 300  # of the reference: queries, and positions before the first of them
LENGTH = 1024  # positions of the cache that hold the probed row or garbage


@functools.lru_cache(maxsize=16)
def unserved_because(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the C kernels do not run a model, as a clause of an error; None where they run it."""
    if device.type != "cpu":
        return f"the kernels run on CPUs, and the device is {device}"
    if spec.recurrent is not None and (why := unfit_sizes(spec.recurrent)) is not None:
        return f"the kernels take recurrent layers whose {why}"
    if dtype not in WORD:
        return f"the kernels compute in float32, bfloat16 and float16, not in {dtype_name(dtype)}"
    kinds = [spec.plain_layer(window) for window in spec.windows_by_heads]
    inner = {spec.inner_of(layer) for layer in range(spec.layers)}
    inputs = {spec.layer_input_size} if spec.layer_input_size else set()
    heads = {spec.heads * kind.head_dim for kind in kinds}
    values = set() if spec.recurrent is None else {spec.recurrent.values}
    widths = sorted({spec.hidden_size, *heads, *inner, *inputs, *values})
    for width in widths:
        if not fits(dtype, width):
            return f"the kernels need an even width in {dtype_name(dtype)}, and a product has {width}"
    widest = max(kind.head_dim for kind in kinds)
    if widest > MAX_HEAD_DIM:
        return f"the kernels take head dimensions up to {MAX_HEAD_DIM}, and the model has {widest}"
    if library() is None:
        return unavailable_because()
    random, like = torch.Generator().manual_seed(0), torch.empty(0, dtype=dtype)
    exact = all(_product_is_exact(width, like, random) for width in widths)
    exact = exact and all(_coded_product_is_exact(code_format, like, random) for code_format in CODE_FORMATS)
    if exact and all(_attention_is_exact(kind, like, random) for kind in kinds):
        return None
    return "the kernels fail their self-check on this CPU"


def _product_is_exact(columns: int, like: Tensor, random: torch.Generator) -> bool:
    shape = OUTPUTS, columns
    probe = ProductProbe(lambda weight: pack_native(weight, None), shape, max(ROWS), like, random)
    if not all(probe.agrees(rows, REFERENCE) for rows in ROWS):
        return False
    weight, x = (torch.randn(n, columns, generator=random).to(like.dtype) for n in (OUTPUTS, 3))
    got, want = pack_native(weight, None)(x).double(), x.double() @ weight.double().T
    # A sum of n independent terms of size one grows to about n ** 0.5, and so do n errors of that size.
    tolerance = torch.finfo(like.dtype).eps * want.abs() + torch.finfo(torch.float32).eps * 2 * columns
    return bool(((got - want).abs() <= tolerance).all())


def _coded_product_is_exact(code_format: CodeFormat, like: Tensor, random: torch.Generator) -> bool:
    columns = 2 * SUPER
    high = code_format.lowest + 2**code_format.bits
    if code_format.float8:
        high -= 1  # the last number is NaN, and so is the last negative one

    def integers(first: int, stop: int, columns: int) -> Tensor:
        return torch.randint(first, stop, (OUTPUTS, columns), generator=random, dtype=torch.int8)

    codes = integers(code_format.lowest, high, columns)
    if code_format.codebook is not None:
        codes = codebook_values(code_format.codebook, codes - code_format.lowest)
    if code_format.float8:
        codes = codes.where(codes != -1, 0).view(torch.float8_e4m3fn)
    scales, offsets = (integers(1, 64, columns // code_format.group) for _ in range(2))
    if code_format.nested:
        step = torch.ones(OUTPUTS, columns // SUPER, dtype=torch.float16)
        weight = Codes(codes, scales, code_format.group, code_format, step, offsets, step)
    else:
        weight = Codes(codes, scales.bfloat16(), code_format.group, code_format, offsets=offsets.bfloat16())
    if not code_format.offsets:
        weight = replace(weight, offsets=None, offset_steps=None)
    product = pack_codes(weight, like.dtype, None)
    x = (torch.randn(max(ROWS), columns, generator=random) / 64).to(like.dtype)  # float16 holds the sums
    got = product(x)
    if not all(torch.equal(product(x[:rows]), got[:rows]) for rows in ROWS):
        return False
    scaled = codes.double() * scales.double().repeat_interleave(code_format.group, 1)
    shift = offsets.double().repeat_interleave(code_format.group, 1) * code_format.offsets
    if multiplies_integers(like.dtype) and not code_format.float8:
        x = rounded_to_integers(x)
    want, size = x.double() @ (scaled - shift).T, x.double().abs() @ (scaled.abs() + shift).T
    tolerance = torch.finfo(like.dtype).eps * want.abs() + torch.finfo(torch.float32).eps * 8 * size
    return bool(((got.double() - want).abs() <= tolerance).all())


def _attention_is_exact(spec: ModelSpec, like: Tensor, random: torch.Generator) -> bool:
    """Return whether a row's attention has the same bits in every pass, whatever follows its context."""
    probe = AttentionProbe(spec, CONTEXT, QUERIES, like, random, blocked=True)
    reference = _attention(probe, 1, QUERIES, 0, 1.0)
    return bool(reference.isfinite().all()) and all(
        torch.equal(_attention(probe, batch, queries, place, scale), reference[:queries])
        for batch, queries, place in SHAPES
        for scale in (0.0, 7.0)
    )


def _attention(probe: AttentionProbe, batch: int, queries: int, place: int, scale: float) -> Tensor:
    """Return the attention [T, H, D] of the probed row at `place` in a batch, garbage behind its context."""
    spec, cache = probe.spec, probe.cache
    probe.fill(batch, LENGTH, place, scale)
    q = probe.queries_of(batch, queries, place)  # [B, Hk, T * G, D]
    x = q.view(batch, spec.kv_heads, queries, spec.groups, spec.head_dim).transpose(1, 2)
    x = x.reshape(batch * queries, spec.heads * spec.head_dim)
    qkv = torch.nn.functional.pad(x, (0, 2 * spec.kv_heads * spec.head_dim))
    starts = [max(0, probe.context - 7 * abs(row - place)) for row in range(batch)]
    layer = CLayer(kv_heads=spec.kv_heads, dim=spec.head_dim)
    model = CModel(layers=1, heads=spec.heads)
    model.scale, model.softcap = spec.attention_scale, spec.attention_softcap or 0.0
    model.layer = ctypes.pointer(layer)
    pass_: CPass = pass_struct(cache, [(row, start, queries, start) for row, start in enumerate(starts)], ())
    out = torch.empty_like(x)
    attend = kernel(f"attend{suffix(q.dtype)}", *(ctypes.c_void_p,) * 4, ctypes.c_int)
    tensors = qkv.data_ptr(), out.data_ptr()
    attend(ctypes.addressof(model), ctypes.addressof(pass_), *tensors, torch.get_num_threads())
    return out.view(batch, queries, spec.heads, spec.head_dim)[place]
