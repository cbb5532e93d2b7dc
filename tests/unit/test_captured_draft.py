"""A draft in one graph is that of single steps, by the same noise, whatever was captured before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import SamplingParams
from foredraft.decode.noise import ACCEPT, DRAFT, HashedKeys, Noise, NoiseKeys
from foredraft.decode.sampling import PenaltyContext, SamplingTable
from foredraft.decode.step_draws import StepDraws
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS
from foredraft.model.cache import KVCache
from foredraft.model.runner import DraftInputs, Runner
from foredraft.model.runner.graphs import Graphs
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_variant
from tests.support.recorder import Rerun

CPU, NOISE = torch.device("cpu"), Noise()
EXIT = 1
LENGTHS = [3, 0, 2]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"top_p": 0.9},
    "typical": {"typical_p": 0.8},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(load_decoder(save_variant(tmp_path_factory.mktemp("model"), request.param)))


def filled(runner: Runner) -> KVCache:
    cache = runner.new_cache(len(LENGTHS), 64)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def draws_of(name: str, turn: int) -> StepDraws:
    params = [SamplingParams(**PARAMS[name])] * len(LENGTHS)
    table = SamplingTable.of(params, CPU)
    keys = None
    if not table.all_greedy:
        base, steps = torch.arange(len(LENGTHS)) + 50 * turn, torch.arange(max(LENGTHS))
        whole = NoiseKeys(base, steps.expand(len(LENGTHS), -1), None, base)
        keys = HashedKeys(base, TORCH_VOCAB_OPS, whole.bits(DRAFT))
    penalties = None
    if table.penalties is not None:
        said = torch.tensor([[5, 6 + turn], [7, 8], [9, 10]])
        penalties = PenaltyContext(
            said, torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.tensor([2] * 3)
        )
    return StepDraws(1.0, table, penalties, keys, NOISE, greedy=False)


def by_steps(
    runner: Runner, cache: KVCache, read: list[list[int]], starts: list[int], draws: StepDraws
) -> list[list[tuple[int, Tensor, Tensor]]]:
    """Return the tokens, distributions and exit states of each row, by a step of all rows at a time."""
    found: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in LENGTHS]
    drawn, own = torch.zeros(len(LENGTHS), 0, dtype=torch.int64), read
    for _ in range(max(LENGTHS)):
        forwards = [
            runner.forward(cache, torch.tensor([ids]), [starts[row]], first_row=row, aux_layers=(EXIT,))
            for row, ids in enumerate(own)
        ]
        logits = [each.logits[:, -1:] for each in forwards if each.logits is not None]
        step = draws(torch.cat(logits), drawn)
        dense = step.q.dense(logits[0].shape[2])
        for row, forward in enumerate(forwards):
            found[row].append((int(step.token[row]), dense[row, 0], forward.aux_states[EXIT][0, -1]))
        starts = [start + len(ids) for start, ids in zip(starts, own, strict=True)]
        drawn = torch.cat([drawn, step.token], 1)
        own = step.token.tolist()
    return found


READ = [[[3], [0], [4, 5]], [[6, 7], [0], [8]], [[9], [0], [10]], [[11], [0], [12, 13]]]  # in turn


@pytest.mark.parametrize("name", PARAMS)
def test_a_draft_is_that_of_single_steps(runner: Runner, name: str) -> None:
    capturer = Rerun()
    cache, other = filled(runner), filled(runner)
    backend: Any = runner.backend
    for turn, read in enumerate(READ):
        starts, draws = [20 + turn, 0, 7], draws_of(name, turn)
        backend.graphs = backend.graphs or Graphs(capturer)
        draft = runner.draft(cache, DraftInputs(read, starts, LENGTHS, draws=draws), exit=EXIT)
        with runner.uncaptured():
            found = by_steps(runner, other, read, starts, draws)
        assert draft is not None and draft.states is not None and draft.drawn is not None
        for row, length in enumerate(LENGTHS):
            tokens = [token for token, *_ in found[row][:length]]
            assert draft.tokens[row].tolist() == tokens + [0] * (max(LENGTHS) - length)
            assert draft.finite[row].tolist() == [step < length for step in range(max(LENGTHS))]
            for step, (_, q, state) in enumerate(found[row][:length]):
                torch.testing.assert_close(draft.drawn[step].q.dense(len(q))[row, 0], q)
                torch.testing.assert_close(draft.states[row, step], state)
    backend.graphs = None
    assert (capturer.captures, capturer.replays) == (1, 3)


def test_a_draft_that_one_call_cannot_take_is_refused(runner: Runner) -> None:
    table = SamplingTable.of([SamplingParams(temperature=0)], CPU)
    cache, draws = runner.new_cache(1, 64), StepDraws(1.0, table, None, None, NOISE, greedy=False)

    def drafts(start: int = 3, length: int = 2, **more: Any) -> bool:
        inputs = DraftInputs([[1]], [start], [length], draws=draws, **more)
        return runner.draft(cache, inputs) is not None

    assert not drafts(), "without graphs"
    backend: Any = runner.backend
    backend.graphs = Graphs(Rerun())
    assert drafts() and not drafts(allowed=[None])
    assert drafts(cache.scratch - 3, 2) and drafts(cache.scratch - 2, 1)
    assert not drafts(cache.scratch - 1, 1)
    backend.graphs = None


@dataclass(frozen=True)
class Inputs:
    numbers: tuple[Tensor, ...]
    factor: int
    named: dict[str, Tensor]


def scaled(inputs: Inputs) -> dict[str, Tensor]:
    return {"sum": sum(inputs.numbers, torch.zeros(2)) * inputs.factor + inputs.named["a"]}


def test_a_graph_has_no_number_of_other_inputs() -> None:
    """There is one for each structure of the inputs, which is all of them but the numbers."""
    capturer = Rerun()
    graphs, owner = Graphs(capturer), Noise()
    held: list[tuple[Tensor, Tensor]] = []
    for turn in range(3):
        two = torch.full((2,), float(turn))
        for inputs in (
            Inputs((two, two + 1), 1, {"a": two}),
            Inputs((two, two + 1), 2, {"a": two}),
            Inputs((two, two[:1]), 1, {"a": two}),
            Inputs((two, two.double()), 1, {"a": two}),
            Inputs((two,), 1, {"a": two, "b": two}),
            Inputs((two,), 1, {"a": two, "c": two}),
        ):
            found = graphs.run(scaled, inputs, owner=owner, key=scaled)["sum"]
            held.append((found, scaled(inputs)["sum"]))
    assert capturer.captures == 6 and capturer.replays == 12
    assert all(torch.equal(found, want) for found, want in held)


def accepting_bits(keys: NoiseKeys) -> Tensor:
    return keys.bits(ACCEPT)


def test_a_graph_computes_anew_what_an_object_of_its_inputs_keeps() -> None:
    """Noise keys keep their hashes; those of the runs before a capture are no part of it."""
    capturer = Rerun(warm_up=2)
    graphs, owner = Graphs(capturer), Noise()
    for turn in range(4):
        base = torch.tensor([turn])
        keys = [NoiseKeys(base, torch.tensor([[3 + turn]]), None, base) for _ in range(2)]
        found = graphs.run(accepting_bits, keys[0], owner=owner, key=accepting_bits)
        assert torch.equal(found, accepting_bits(keys[1]))
    assert (capturer.captures, capturer.replays) == (1, 3)
