"""Planted defects of the runner's passes: padding, gathering, recording, packing. Each check compares the logits
of many verifying passes, over rows of different lengths, with what transformers says of the same texts."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.model import attention, weights
from foredraft.model.runner import Runner, body, graphs, packed, passes
from foredraft.model.runner.body import Forward
from foredraft.model.runner.graphs import Graphs
from foredraft.model.runner.job import Job
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import reference_model, save_variant
from tests.support.planting import Mutant
from tests.support.recorder import Rerun

LENGTHS = (20, 505, 1015)  # of the prompts: the longer texts outgrow an attended length, whatever the quantum
TOTAL = 1130


@functools.cache
def texts(name: str) -> tuple[Tensor, Tensor]:
    """[B, P] ids, and the logits that transformers has for them [B, P, V]."""
    ids = torch.randint(3, 97, (len(LENGTHS), TOTAL), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return ids, reference_model(name)(ids).logits


def rounds(name: str, way: str) -> None:
    """Drafts of every length, kept in part, wrong ones and idle rows among them; every logit that counts."""
    ids, expected = texts(name)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(load_decoder(save_variant(Path(folder), name)))
    runner.gathers = way == "gathered"
    runner.graphs = Graphs(Rerun()) if way == "recorded" else None
    cache = runner.new_cache(len(LENGTHS), TOTAL)
    for row, length in enumerate(LENGTHS):
        for start in range(0, length, 256):
            end = min(start + 256, length)
            runner.prefill(cache, row, ids[row, start:end].tolist(), start)
    dice, starts = random.Random(1), list(LENGTHS)
    held: list[tuple[Forward, list[int], list[int]]] = []
    for _ in range(16):
        width = dice.choice((1, 4, 7))  # 7 is padded to 8
        counts = [dice.randint(1, width) for _ in starts]
        right = [dice.randint(1, count) for count in counts]  # columns whose tokens are the text's
        idle = [False, dice.random() < 0.3, dice.random() < 0.3]
        tokens = torch.full((len(starts), width), 1)
        for row, start in enumerate(starts):
            tokens[row, : right[row]] = ids[row, start : start + right[row]]
        out = runner.forward(cache, tokens, starts, counts=counts, idle=idle)
        held.append(
            (out, list(starts), [0 if skipped else n for n, skipped in zip(right, idle, strict=True)])
        )
        starts = [start + n for start, n in zip(starts, held[-1][2], strict=True)]
    for out, began, right in held:  # at the end, when they might have been overwritten
        assert out.logits is not None
        for row, (start, count) in enumerate(zip(began, right, strict=True)):
            got, want = out.logits[row, :count], expected[row, start : start + count]
            assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(expected.abs().max()))


def padded() -> None:
    rounds("gemma2", "padded")


def gathered() -> None:
    rounds("qwen2", "gathered")


def recorded() -> None:
    rounds("llama", "recorded")


def unpacked() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_fault", lambda dtype: "absent")
        rounds("qwen2", "padded")


MASKS, BUILD = attention.causal_masks, passes.build_pass
MUTANTS = [
    Mutant("padding attended to", ((MASKS, "keys <= last", "keys <= last[:, -1:].expand_as(last)"),), padded),
    Mutant(
        "attended length taken from the batch",
        (
            (
                MASKS,
                "positions.clamp(max=length - 1)[:, :, None]",
                "positions.amax(0, keepdim=True).expand_as(positions).clamp(max=length - 1)[:, :, None]",
            ),
        ),
        padded,
    ),
    Mutant(
        "attended length of the first row",
        ((Job.check, "max(self.starts[b] for b in self.active)", "self.starts[0]"),),
        padded,
    ),
    Mutant(
        "gathered keys where the padding would be",
        ((BUILD, "lanes[real]", "lanes[: len(real)]"),),
        gathered,
    ),
    Mutant(
        "gathered columns rotated in order",
        ((BUILD, "rows[real]", "rows[: len(real)]"),),
        gathered,
    ),
    Mutant(
        "gathered queries scattered in order",
        ((attention.attend, "index_copy_(0, pass_.real, q)", "index_copy_(0, torch.arange(len(q)), q)"),),
        gathered,
    ),
    Mutant(
        "gathered outputs taken in order",
        ((attention.attend, "out[pass_.real]", "out[: len(pass_.real)]"),),
        gathered,
    ),
    Mutant(
        "gathered tokens taken in order",
        ((body.Body._entering, "tokens.flatten()[real]", "tokens.flatten()[: len(real)]"),),
        gathered,
    ),
    Mutant(
        "gathered logits given out in order",
        (
            (
                body._columns,
                "index_copy_(0, real, computed)",
                "index_copy_(0, torch.arange(len(real)), computed)",
            ),
        ),
        gathered,
    ),
    Mutant(
        "columns counted without their padding",
        ((Job.real_columns, "b * queries + t", "b * self.tokens.shape[1] + t"),),
        gathered,
    ),
    Mutant(
        "a recording replayed with old starts",
        (
            (
                body.Inputs.fill,
                "zip(self._all(), other._all(), strict=True)",
                "zip(self._all()[1:], other._all()[1:], strict=True)",
            ),
        ),
        recorded,
    ),
    Mutant(
        "a recording replayed with an old length",
        (
            (
                graphs.Graphs.run,
                "(bucket, inputs.signature())",
                "((bucket.shape.batch, bucket.columns, bucket.head), inputs.signature())",
            ),
        ),
        recorded,
    ),
    Mutant(
        "a recording's outputs overwritten in a caller's hands",
        ((graphs._Entry.run, "self.graph.output.copied()", "self.graph.output"),),
        recorded,
    ),
    Mutant(
        "a packed weight kept for all of its shape",
        (
            (
                packed.pack,
                "return PackedLinear(_packed(weight.contiguous()), bias)",
                "return pack.__dict__.setdefault(weight.shape, PackedLinear(_packed(weight.contiguous()), bias))",
            ),
        ),
        padded,
    ),
    Mutant(
        "an ordinary weight in the buffer that the next one overwrites",
        (
            (
                weights._Builder.linear,
                "tensors.load_temporary(weights) if self.packs else tensors.load(weights)",
                "tensors.load_temporary(weights)",
            ),
        ),
        unpacked,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
