"""A draft in one graph is that of single steps, by the same noise, whatever was captured before.

These tests fail where a step's tokens, starts, keys or penalties are those of the capture; where a row's second
token is not read; where a shorter row's tokens go on; and where a graph is kept without the numbers of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import SamplingParams
from foredraft.decode.noise import ACCEPT, DRAFT, HashedKeys, Noise, NoiseKeys
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.step_draws import StepDraws
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS
from foredraft.model.cache import KVCache
from foredraft.model.runner import DraftInputs, Runner
from foredraft.model.runner.graphs import Graphs
from foredraft.model.runner.trees import copied, flattened
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_variant
from tests.support.recorder import Rerun

CPU, NOISE = torch.device("cpu"), Noise()
TAP = 1
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
) -> Any:
    """Return tokens, distributions and tapped states of each row, a step of all rows at a time."""
    tokens: list[list[int]] = [[] for _ in LENGTHS]
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    states: list[list[Tensor]] = [[] for _ in LENGTHS]
    drawn = torch.zeros(len(LENGTHS), 0, dtype=torch.int64)
    own = read
    for _ in range(max(LENGTHS)):
        logits = []
        for row, ids in enumerate(own):
            forward = runner.forward(cache, torch.tensor([ids]), [starts[row]], first_row=row, taps=(TAP,))
            assert forward.logits is not None
            logits.append(forward.logits[:, -1:])
            states[row].append(forward.taps[TAP][0, -1])
        step = draws(torch.cat(logits), drawn)
        for row in range(len(LENGTHS)):
            tokens[row].append(int(step.token[row]))
            found[row].append(step.q.dense(logits[0].shape[2])[row, 0])
        starts = [start + len(ids) for start, ids in zip(starts, own, strict=True)]
        drawn = torch.cat([drawn, step.token], 1)
        own = [[row[-1]] for row in tokens]
    return tokens, found, states


@pytest.mark.parametrize("name", PARAMS)
def test_a_draft_is_that_of_single_steps(runner: Runner, name: str) -> None:
    capturer = Rerun()
    cache, other = filled(runner), filled(runner)
    backend: Any = runner.backend
    for turn, read in enumerate(
        [[[3], [0], [4, 5]], [[6, 7], [0], [8]], [[9], [0], [10]], [[11], [0], [12, 13]]]
    ):
        starts, draws = [20 + turn, 0, 7], draws_of(name, turn)
        backend.graphs = backend.graphs or Graphs(capturer)
        draft = runner.draft(cache, DraftInputs(read, starts, LENGTHS, draws=draws), tap=TAP)
        with runner.uncaptured():
            tokens, found, states = by_steps(runner, other, read, starts, draws)
        assert draft is not None and draft.states is not None and draft.drawn is not None
        for row, length in enumerate(LENGTHS):
            assert draft.tokens[row].tolist() == tokens[row][:length] + [0] * (max(LENGTHS) - length)
            assert draft.finite[row].tolist() == [step < length for step in range(max(LENGTHS))]
            for step in range(length):
                q = draft.drawn[step].q.dense(len(found[row][step]))[row, 0]
                torch.testing.assert_close(q, found[row][step])
                torch.testing.assert_close(draft.states[row, step], states[row][step])
    backend.graphs = None
    assert (capturer.captures, capturer.replays) == (1, 3)


def test_a_draft_that_one_call_cannot_take_is_refused(runner: Runner) -> None:
    cache, draws = (
        runner.new_cache(1, 64),
        StepDraws(
            1.0, SamplingTable.of([SamplingParams(temperature=0)], CPU), None, None, NOISE, greedy=False
        ),
    )
    one = DraftInputs([[1]], [3], [2], draws=draws)
    assert runner.draft(cache, one) is None, "without graphs"
    backend: Any = runner.backend
    backend.graphs = Graphs(Rerun())
    assert runner.draft(cache, one) is not None
    assert runner.draft(cache, DraftInputs([[1]], [3], [2], allowed=[None], draws=draws)) is None
    assert runner.draft(cache, DraftInputs([[1]], [cache.scratch - 3], [2], draws=draws)) is not None
    assert runner.draft(cache, DraftInputs([[1]], [cache.scratch - 2], [1], draws=draws)) is not None
    assert runner.draft(cache, DraftInputs([[1]], [cache.scratch - 1], [1], draws=draws)) is None
    backend.graphs = None


@dataclass(frozen=True)
class Inputs:
    numbers: tuple[Tensor, ...]
    factor: int
    named: dict[str, Tensor]


def scaled(inputs: Inputs) -> dict[str, Tensor]:
    return {"sum": sum(inputs.numbers, torch.zeros(2)) * inputs.factor + inputs.named["a"]}


def test_a_graph_has_no_number_of_other_inputs() -> None:
    capturer = Rerun()
    graphs, owner = Graphs(capturer), Noise()
    held: list[tuple[Tensor, Tensor]] = []
    for turn in range(12):
        numbers = tuple(torch.full((2,), float(turn + i)) for i in range(2))
        inputs = Inputs(numbers, turn % 3, {"a": torch.full((2,), float(turn))})
        found = graphs.run(scaled, inputs, owner=owner, key=scaled)["sum"]
        held.append((found, scaled(inputs)["sum"]))
    assert capturer.captures == 3 and capturer.replays == 9
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


def test_the_structure_of_a_tree_is_all_but_its_numbers() -> None:
    one = Inputs((torch.ones(2), torch.zeros(2)), 1, {"a": torch.ones(2)})
    tensors, structure = flattened(one)
    assert len(tensors) == 3
    again = copied(one)
    assert flattened(again)[1] == structure and again.numbers[0] is not one.numbers[0]
    assert all(map(torch.equal, flattened(again)[0], tensors))
    others = [
        Inputs((torch.ones(2), torch.zeros(2)), 2, {"a": torch.ones(2)}),
        Inputs((torch.ones(2), torch.zeros(3)), 1, {"a": torch.ones(2)}),
        Inputs((torch.ones(2), torch.zeros(2).double()), 1, {"a": torch.ones(2)}),
        Inputs((torch.ones(2),), 1, {"a": torch.ones(2), "b": torch.ones(2)}),
        Inputs((torch.ones(2), torch.zeros(2)), 1, {"b": torch.ones(2)}),
    ]
    assert structure not in [flattened(other)[1] for other in others]
