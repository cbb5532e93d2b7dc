"""Planted defects of the runner's passes: padding, ragged batches, captured graphs, packed weights.

Each check compares the logits of many verifying passes, over rows of different lengths, with those of transformers
for the same texts. A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns
the defective one.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model import attention, forward_context
from foredraft.model.checkpoint import CheckpointTensors, Shapes
from foredraft.model.forward_context import ForwardContext, PassInputs, PassShape
from foredraft.model.runner import Forward, Runner, graphs, packed, torch_backend
from foredraft.model.runner.graphs import Graphs
from foredraft.model.runner.passes import Pass
from foredraft.model.runner.torch_backend import TorchBackend
from foredraft.model.runner.trees import flattened
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import reference_model, save_variant
from tests.support.planting import Mutant, Spoiler, defect
from tests.support.recorder import Rerun

Function = Callable[..., Any]
LENGTHS = (20, 505, 1015)  # of the prompts: the longer texts outgrow an attended length, whatever the quantum
TOTAL = 1130


@functools.cache
def texts(name: str) -> tuple[Tensor, Tensor]:
    """Return token ids [B, P], and the logits of transformers for them [B, P, V]."""
    ids = torch.randint(3, 97, (len(LENGTHS), TOTAL), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return ids, reference_model(name)(ids).logits


def rounds(name: str, way: str) -> None:
    """Compare every logit of a real column: drafts of every length, kept in part, wrong tokens, idle rows."""
    ids, expected = texts(name)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(load_decoder(save_variant(Path(folder), name)))
    runner.backend.gathers = way == "gathered"
    runner.backend.graphs = Graphs(Rerun()) if way == "captured" else None
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
            if count:
                states = out.hidden[row : row + 1, :count]
                assert torch.allclose(runner.head(states)[0], got, rtol=0, atol=1e-3)


def padded() -> None:
    rounds("gemma2", "padded")


def gathered() -> None:
    rounds("qwen2", "gathered")


def captured() -> None:
    rounds("llama", "captured")


def unpacked() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_fault", lambda dtype: "absent")
        rounds("qwen2", "padded")


# --- spoilers -------------------------------------------------------------------------------------------


def masked_by(positions_of: Callable[[Tensor], Tensor]) -> Spoiler:
    """Build the masks of other positions [B, T]."""

    def spoiler(masks: Function) -> Function:
        return lambda spec, positions, *rest: masks(spec, positions_of(positions).expand_as(positions), *rest)

    return spoiler


def first_start(check: Function) -> Function:
    def spoilt(pass_: Pass, queries: int) -> int:
        check(pass_, queries)
        return pass_.starts[0]

    return spoilt


def built_with(*names: str) -> Spoiler:
    """Build a ragged pass with some attributes of the first columns of the padded one."""

    def spoiler(build: Function) -> Function:
        def spoilt(
            spec: Any, tables: Any, cache: Any, shape: Any, starts: Any, real: Tensor | None = None
        ) -> Any:
            ragged = build(spec, tables, cache, shape, starts, real)
            if real is None:
                return ragged
            padded = build(spec, tables, cache, shape, starts)
            first = {
                "write": {window: own[: len(ragged.write[window])] for window, own in padded.write.items()},
                "rotary": {
                    window: tuple(part[: len(real)] for part in parts)
                    for window, parts in padded.rotary.items()
                },
            }
            return replace(ragged, **{name: first[name] for name in names})

        return spoilt

    return spoiler


def in_order(real: Tensor | None) -> Tensor | None:
    """Return the first columns instead of the real ones."""
    return None if real is None else torch.arange(len(real))


def attended(
    queries: Function | None = None, outputs: Function | None = None
) -> tuple[tuple[Any, Spoiler], ...]:
    """Spoil queries or outputs of a ragged pass: each function gets the columns [B * T, ...] and the real ones."""
    contexts: list[ForwardContext] = []

    def remember(attend: Function) -> Function:
        def spoilt(spec: Any, layer: int, qkv: Tensor, context: ForwardContext) -> Tensor:
            contexts.append(context)
            out: Tensor = attend(spec, layer, qkv, context)
            contexts.clear()
            return out

        return spoilt

    def changed(x: Tensor, change: Function | None) -> Tensor:
        if change is None or not contexts or contexts[0].real is None:
            return x
        [context] = contexts
        batch, heads, _, dim = x.shape  # [B, Hk, T * G, D]
        columns = x.view(batch, heads, context.shape.queries, -1, dim).transpose(1, 2)  # [B, T, Hk, G, D]
        columns = change(columns.flatten(0, 1), context.real).view(columns.shape)
        return columns.transpose(1, 2).reshape(x.shape)

    def spoil_attention(sound: Function) -> Function:
        def spoilt(spec: Any, q: Tensor, *rest: Any) -> Tensor:
            return changed(sound(spec, changed(q, queries), *rest), outputs)

        return spoilt

    return (attention.attend, remember), (attention.masked_attention, spoil_attention)


def scattered_in_order(columns: Tensor, real: Tensor) -> Tensor:
    return torch.zeros_like(columns).index_copy_(0, torch.arange(len(real)), columns[real])


def taken_in_order(columns: Tensor, real: Tensor) -> Tensor:
    return columns.index_copy(0, real, columns[: len(real)])


def entering_in_order(entering: Function) -> Function:
    return lambda backend, shape, inputs: entering(
        backend, shape, replace(inputs, real=in_order(inputs.real))
    )


def given_out_in_order(columns: Function) -> Function:
    return lambda computed, shape, real: columns(computed, shape, in_order(real))


def old_starts(replay: Function) -> Function:
    return lambda entry, inputs: replay(entry, [entry.buffers[0], *inputs[1:]])


def results_of_the_graph(replay: Function) -> Function:
    def spoilt(entry: Any, inputs: list[Tensor]) -> Any:
        replay(entry, inputs)
        return entry.graph.output

    return spoilt


def old_length(run: Function) -> Function:
    first: dict[Any, Any] = {}

    def spoilt(
        graphs: Graphs, compute: Any, inputs: PassInputs, *, owner: Any, key: PassShape, alive: Any
    ) -> Any:
        like = id(owner), replace(key, length=0), flattened(inputs)[1]
        compute, key = first.setdefault(like, (compute, key))
        return run(graphs, compute, inputs, owner=owner, key=key, alive=alive)

    return spoilt


def one_packed_weight_per_shape(pack: Function) -> Function:
    kept: dict[Any, Any] = {}
    return lambda weight, bias=None: kept.setdefault(weight.shape, pack(weight, bias))


def in_the_temporary_buffer(load: Function) -> Function:
    def spoilt(checkpoint: CheckpointTensors, shapes: Shapes) -> Tensor:
        is_linear = all(name.endswith("_proj.weight") for name in shapes)
        return checkpoint.load_temporary(shapes) if is_linear else load(checkpoint, shapes)

    return spoilt


MASKS, BUILD = forward_context.causal_masks, forward_context.build_context
MUTANTS = [
    defect("padding attended to", MASKS, masked_by(lambda positions: positions[:, -1:]), padded),
    defect(
        "attended length taken from the batch",
        MASKS,
        masked_by(lambda positions: positions.amax(0, keepdim=True)),
        padded,
    ),
    defect("attended length of the first row", Pass.check, first_start, padded),
    defect("gathered keys where the padding would be", BUILD, built_with("write"), gathered),
    defect("gathered columns rotated in order", BUILD, built_with("rotary"), gathered),
    Mutant("gathered queries scattered in order", attended(queries=scattered_in_order), gathered),
    Mutant("gathered outputs taken in order", attended(outputs=taken_in_order), gathered),
    defect("gathered tokens taken in order", TorchBackend._entering, entering_in_order, gathered),
    defect("gathered logits given out in order", torch_backend._asked, given_out_in_order, gathered),
    defect(
        "columns counted without their padding",
        Pass.real_columns,
        lambda real_columns: lambda pass_, queries: real_columns(pass_, pass_.tokens.shape[1]),
        gathered,
    ),
    defect("a graph replayed with old starts", graphs._Entry.run, old_starts, captured),
    defect("a graph replayed with an old length", Graphs.run, old_length, captured),
    defect(
        "a graph's outputs overwritten in a caller's hands",
        graphs._Entry.run,
        results_of_the_graph,
        captured,
    ),
    defect("a packed weight kept for all of its shape", packed.pack, one_packed_weight_per_shape, padded),
    defect(
        "an ordinary weight in the buffer that the next one overwrites",
        CheckpointTensors.load,
        in_the_temporary_buffer,
        unpacked,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
