"""Planted defects of the runner's passes; each check compares logits with those of transformers (form: `mutants`)."""

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

from foredraft.model import attention
from foredraft.model.attention import ForwardContext, PassInputs, PassShape
from foredraft.model.checkpoint import CheckpointTensors, Shapes
from foredraft.model.runner import Forward, Runner, compiled, graphs, torch_backend
from foredraft.model.runner.graphs import Graphs, flattened
from foredraft.model.runner.passes import Pass
from foredraft.model.runner.torch_backend import TorchBackend
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import reference_model, save_variant
from tests.support.mutation import Edit, Mutation, caught_by
from tests.support.mutations import Function, argument, around
from tests.support.recorder import Rerun

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
        held.append((out, list(starts), [0 if skip else n for n, skip in zip(right, idle, strict=True)]))
        starts = [start + n for start, n in zip(starts, held[-1][2], strict=True)]
    for out, began, right in held:  # at the end, when they might have been overwritten
        for row, (start, count) in enumerate(zip(began, right, strict=True)):
            got, want = out.logits[row, :count], expected[row, start : start + count]
            assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(expected.abs().max()))
            if count:
                states = out.hidden[row : row + 1, :count]
                assert torch.allclose(runner.head(states)[0], got, rtol=0, atol=1e-3)


padded = functools.partial(rounds, "gemma2", "padded")
gathered = functools.partial(rounds, "qwen2", "gathered")
captured = functools.partial(rounds, "llama", "captured")


def unpacked() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_fault", lambda dtype: "absent")
        rounds("qwen2", "padded")


def masked_by(positions_of: Callable[[Tensor], Tensor]) -> Mutation:

    def mutation(masks: Function) -> Function:
        return lambda spec, positions, *rest: masks(spec, positions_of(positions).expand_as(positions), *rest)

    return mutation


@around
def first_start(check: Function, pass_: Pass, queries: int) -> int:
    check(pass_, queries)
    return pass_.starts[0]


def built_with(*names: str) -> Mutation:
    """Build a ragged pass with some attributes of the first columns of the padded one."""

    @around
    def mutation(
        build: Function, spec: Any, tables: Any, cache: Any, shape: Any, starts: Any, real: Any = None
    ) -> Any:
        ragged = build(spec, tables, cache, shape, starts, real)
        if real is None:
            return ragged
        padded = build(spec, tables, cache, shape, starts)
        first = {
            "write": {window: own[: len(ragged.write[window])] for window, own in padded.write.items()},
            "rotary": {rope: tuple(x[: len(real)] for x in parts) for rope, parts in padded.rotary.items()},
        }
        return replace(ragged, **{name: first[name] for name in names})

    return mutation


def attended(queries: Function | None = None, outputs: Function | None = None) -> tuple[Edit, ...]:
    """Mutate a ragged pass's queries or outputs: each function gets columns [B * T, ...] and the real ones."""
    contexts: list[ForwardContext] = []

    @around
    def remember(attend: Function, spec: Any, layer: int, qkv: Tensor, context: ForwardContext) -> Tensor:
        contexts.append(context)
        out: Tensor = attend(spec, layer, qkv, context)
        contexts.clear()
        return out

    def changed(x: Tensor, change: Function | None) -> Tensor:
        if change is None or not contexts or contexts[0].real is None:
            return x
        [context] = contexts
        batch, heads, _, dim = x.shape  # [B, Hk, T * G, D]
        columns = x.view(batch, heads, context.shape.queries, -1, dim).transpose(1, 2)  # [B, T, Hk, G, D]
        columns = change(columns.flatten(0, 1), context.real).view(columns.shape)
        return columns.transpose(1, 2).reshape(x.shape)

    @around
    def mutate_attention(sound: Function, spec: Any, q: Tensor, *rest: Any) -> Tensor:
        return changed(sound(spec, changed(q, queries), *rest), outputs)

    return (attention.attend, remember), (attention.masked_attention, mutate_attention)


def in_order(real: Tensor | None) -> Tensor | None:
    return None if real is None else torch.arange(len(real))


scattered_in_order = attended(
    queries=lambda x, real: torch.zeros_like(x).index_copy_(0, in_order(real), x[real])
)
taken_in_order = attended(outputs=lambda columns, real: columns.index_copy(0, real, columns[: len(real)]))
tokens_in_order = argument(2, lambda inputs: replace(inputs, real=in_order(inputs.real)))
without_padding = around(lambda real_columns, pass_, queries: real_columns(pass_, pass_.tokens.shape[1]))
old_starts = around(lambda replay, entry, inputs: replay(entry, [entry.buffers[0], *inputs[1:]]))


@around
def results_of_the_graph(replay: Function, entry: Any, inputs: list[Tensor]) -> Any:
    replay(entry, inputs)
    return entry.graph.output


def old_length(run: Function) -> Function:
    first: dict[Any, Any] = {}

    def mutated(
        graphs: Graphs, compute: Any, inputs: PassInputs, *, owner: Any, key: PassShape, alive: Any
    ) -> Any:
        like = id(owner), replace(key, length=0), flattened(inputs)[1]
        compute, key = first.setdefault(like, (compute, key))
        return run(graphs, compute, inputs, owner=owner, key=key, alive=alive)

    return mutated


def one_packed_weight_per_shape(pack: Function) -> Function:
    kept: dict[Any, Any] = {}
    return lambda weight, bias=None: kept.setdefault(weight.shape, pack(weight, bias))


@around
def in_the_temporary_buffer(load: Function, checkpoint: CheckpointTensors, shapes: Shapes) -> Tensor:
    is_linear = all(name.endswith("_proj.weight") for name in shapes)
    return checkpoint.load_temporary(shapes) if is_linear else load(checkpoint, shapes)


MASKS, BUILD = attention.causal_masks, attention.build_context
TABLE = {
    padded: [
        ("padding attended to", MASKS, masked_by(lambda positions: positions[:, -1:])),
        ("attended length taken from the batch", MASKS, masked_by(lambda at: at.amax(0, keepdim=True))),
        ("attended length of the first row", Pass.check, first_start),
        ("a packed weight kept for all of its shape", compiled.pack, one_packed_weight_per_shape),
    ],
    gathered: [
        ("gathered keys where the padding would be", BUILD, built_with("write")),
        ("gathered columns rotated in order", BUILD, built_with("rotary")),
        ("gathered queries scattered in order", scattered_in_order),
        ("gathered outputs taken in order", taken_in_order),
        ("gathered tokens taken in order", TorchBackend._entering, tokens_in_order),
        ("gathered logits given out in order", torch_backend._asked, argument(2, in_order)),
        ("columns counted without their padding", Pass.real_columns, without_padding),
    ],
    captured: [
        ("a graph replayed with old starts", graphs._Entry.run, old_starts),
        ("a graph replayed with an old length", Graphs.run, old_length),
        ("a graph's outputs overwritten in a caller's hands", graphs._Entry.run, results_of_the_graph),
    ],
    unpacked: [("a weight in the next one's buffer", CheckpointTensors.load, in_the_temporary_buffer)],
}
MUTANTS = caught_by(TABLE)
