"""The kernels' self-check: right values, and the same bits at every shape, on this model's own operators.

Contract: the order of every sum is fixed by construction; this is the proof that the compiler left it so. It
runs before a model is loaded, on probes that cancel (`probes`): one product for each width of the model, and
one layer's attention at many shapes.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch import Tensor

from foredraft.kernels.compilation import library, unavailable_because
from foredraft.model.runner.native.linear import WORD, arrange, fits, suffix
from foredraft.model.runner.native.passes import WIDEST_HEAD, CLayer, CModel, CPass, pass_over
from foredraft.model.runner.probes import AttentionProbe, ProductProbe
from foredraft.model.spec import ModelSpec

__all__ = ["unserved_because"]

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 64, 65, 100)  # tiles full and not, and more rows than a block's
REFERENCE = 8
SHAPES = (
    (1, 1, 0),
    (1, 3, 0),
    (1, 16, 0),
    (1, 33, 0),
    (3, 1, 1),
    (4, 6, 2),
    (8, 5, 7),
)  # batch, queries, place
QUERIES, CONTEXT = 33, 300


@functools.lru_cache(maxsize=16)
def unserved_because(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run this model here; None where they do."""
    if device.type != "cpu":
        return f"they are for CPUs, and the device is {device}"
    if dtype not in WORD:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    widths = {spec.hidden_size, spec.heads * spec.head_dim, spec.intermediate_size}
    odd = [width for width in sorted(widths) if not fits(dtype, width)]
    if odd or spec.head_dim > WIDEST_HEAD:
        most = f"heads of at most {WIDEST_HEAD} channels"
        return f"they take no products of {odd[0]} columns" if odd else f"they take {most}"
    if library() is None:
        return unavailable_because()
    random, like = torch.Generator().manual_seed(0), torch.empty(0, dtype=dtype)
    if all(_right(width, like, random) for width in sorted(widths)) and _attends(spec, like, random):
        return None
    logger.warning("the kernels compiled for this CPU fail their check; PyTorch's operators serve")
    return "they fail their check"


def _right(columns: int, like: Tensor, random: torch.Generator) -> bool:
    """Whether products of so many columns have the reference's bits at all row counts, and its values."""
    probe = ProductProbe(lambda weight: arrange(weight, None), (72, columns), max(ROWS), like, random)
    if not all(probe.agrees(rows, REFERENCE) for rows in ROWS):
        return False
    weight, x = (torch.randn(n, columns, generator=random).to(like.dtype) for n in (72, 3))
    got, want = arrange(weight, None)(x).double(), x.double() @ weight.double().T
    # a sum of n independent terms of size one grows to about n ** 0.5, and so do n errors of that size
    tolerance = torch.finfo(like.dtype).eps * want.abs() + torch.finfo(torch.float32).eps * 2 * columns
    return bool(((got - want).abs() <= tolerance).all())


def _attends(spec: ModelSpec, like: Tensor, random: torch.Generator) -> bool:
    """Whether a row's attention has the same bits in every pass, whatever lies past it in the cache."""
    probe = AttentionProbe(spec, CONTEXT, QUERIES, like, random, blocked=True)
    reference = _attention(probe, 1, QUERIES, 0, 1.0)
    return bool(reference.isfinite().all()) and all(
        torch.equal(_attention(probe, batch, queries, place, scale), reference[:queries])
        for batch, queries, place in SHAPES
        for scale in (0.0, 7.0)
    )


def _attention(probe: AttentionProbe, batch: int, queries: int, place: int, scale: float) -> Tensor:
    """[T, heads, dim] of the probed row, at `place` in a batch, with garbage of `scale` past its context."""
    spec, cache = probe.spec, probe.cache
    probe.fill(batch, 1024, place, scale)
    q = probe.queries_of(batch, queries, place)  # [B, Hk, T * G, D]
    mixed = q.view(batch, spec.kv_heads, queries, spec.groups, spec.head_dim).transpose(1, 2)
    mixed = mixed.reshape(batch * queries, spec.heads * spec.head_dim)
    qkv = torch.nn.functional.pad(mixed, (0, 2 * spec.kv_heads * spec.head_dim))
    starts = [max(0, probe.context - 7 * abs(row - place)) for row in range(batch)]
    layer = CLayer()
    model = CModel(layers=1, heads=spec.heads, kv_heads=spec.kv_heads, dim=spec.head_dim)
    model.scale, model.softcap = spec.attention_scale, spec.attention_softcap or 0.0
    model.layer = ctypes.pointer(layer)
    pass_: CPass = pass_over(cache, [(row, start, queries) for row, start in enumerate(starts)], ())
    out = torch.empty_like(mixed)
    kernels = library()
    assert kernels is not None
    attend = getattr(kernels, "foredraft_attend" + suffix(q.dtype))
    attend(
        ctypes.byref(model),
        ctypes.byref(pass_),
        ctypes.c_void_p(qkv.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    return out.view(batch, queries, spec.heads, spec.head_dim)[place]
