"""What a product by integers is, to the bit: the definition of `kernels/integers.inc`."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.quantisation import Codes
from foredraft.model.quantisation.codes import SUPER
from foredraft.model.quantisation.scheme import STEP_GROUP, integers_of


def integer_product(x: Tensor, weight: Codes) -> Tensor:
    """Return x [N, K] times a coded weight [M, K], in float32, to the bit."""
    integers, steps = integers_of(x)
    sums = torch.zeros(len(x), weight.shape[0])
    codes = weight.codes.double().view(weight.shape[0], -1, weight.group)
    scales, offsets = (
        None if part is None else part.float() if step is None else
        part.float() * step.float().repeat_interleave(SUPER // weight.group, 1)
        for part, step in ((weight.scales, weight.steps), (weight.offsets, weight.offset_steps))
    )  # fmt: skip
    for part, inputs in enumerate(torch.split(integers.double().flatten(-2), weight.group, -1)):
        step = steps[:, part * weight.group // STEP_GROUP]
        products = (inputs @ codes[:, part].T).float() * step
        sums = _multiply_add(products, scales[:, part], sums)
        if offsets is not None:
            sums = _multiply_add(-inputs.sum(-1, keepdim=True).float() * step, offsets[:, part], sums)
    return sums


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a b + c in float32, rounded once."""
    product, other = a.double() * b.double(), c.double()  # the product is exact
    found = product + other
    back = found - product
    error = (product - (found - back)) + (other - back)
    # A sum that was rounded becomes odd, so that the second rounding sees on which side of a tie it lay.
    bits = found.contiguous().view(torch.int64)
    away = torch.where((error > 0) == (found > 0), 1, -1)
    return (bits + away * ((error != 0) & (bits % 2 == 0))).view(torch.float64).float()
