"""CUDA graphs: a replayed pass has the bits of an uncaptured one, in any order of passes."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft.model.cache import KVCache
from foredraft.model.runner import Forward, Resume, Runner, graphs
from foredraft.model.runner.graphs import CAPTURE_PASSES, CapturedGraph, Graphs, coarse_length
from foredraft.model.spec import Plan
from foredraft.model.weights import load_decoder
from foredraft.profiling.timing import TimedTurns
from tests.support.checkpoints import save_variant
from tests.support.recorder import Rerun

Runners = tuple[Runner, Runner]
ROWS, POSITIONS = 3, 1100


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runners:
    decoder = load_decoder(save_variant(tmp_path_factory.mktemp("model"), request.param))
    return Runner(decoder), Runner(decoder)


class Pair:
    def __init__(self, runners: Runners, capturer: Rerun | None = None) -> None:
        self.capturer = capturer or Rerun()
        self.captured, self.plain = runners
        self.captured.backend.graphs = Graphs(self.capturer)
        self.caches = [self.filled(runner) for runner in runners]
        self.layers = self.plain.decoder.spec.layers

    @staticmethod
    def filled(runner: Runner) -> KVCache:
        cache = runner.new_cache(ROWS, POSITIONS)
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
        return cache

    def both(self, batch: int, width: int, starts: list[int], seed: int, **options: Any) -> Forward:
        """Run a pass both ways, check that the results are equal, and return one."""
        tokens = torch.randint(3, 97, (batch, width), generator=torch.Generator().manual_seed(seed))
        got = self.captured.forward(self.caches[0], tokens, starts, **options)
        want = self.plain.forward(self.caches[1], tokens, starts, **options)
        assert_equal(got, want)
        assert torch.equal(self.caches[0].data, self.caches[1].data)
        return got


def assert_equal(got: Forward, want: Forward) -> None:
    assert (got.logits is None) == (want.logits is None)
    assert got.logits is None or torch.equal(got.logits, want.logits)
    assert torch.equal(got.hidden, want.hidden)
    assert got.aux_states.keys() == want.aux_states.keys()
    assert all(torch.equal(own, want.aux_states[depth]) for depth, own in got.aux_states.items())


def test_a_pass_is_captured_at_its_second_run_and_replayed_from_then_on(runners: Runners) -> None:
    """Results in a caller's hands are not overwritten."""
    pair, held = Pair(runners), []
    for run, (captures, replays) in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        out = pair.both(2, 3, [40 + 3 * run, 7 + run], seed=run, aux_layers=(1,))
        assert out.logits is not None
        held.append([(x, x.clone()) for x in (out.logits, out.hidden, out.aux_states[1])])
        assert (pair.capturer.captures, pair.capturer.replays) == (captures, replays)
    assert all(torch.equal(x, copy) for each in held for x, copy in each)


def test_plain_steps_across_attended_lengths(runners: Runners) -> None:
    """A text outgrows its attended length more than once, and is rolled back."""
    pair = Pair(runners)
    quantum = pair.plain.shapes.length_quantum
    for turn in range(2):
        for start in (*range(quantum - 4, quantum + 4), *range(2 * quantum - 3, 2 * quantum)):
            pair.both(1, 1, [start], seed=turn * 1000 + start)
    assert pair.capturer.captures == 2
    assert pair.capturer.replays > 10


@pytest.mark.heavy
def test_passes_of_any_kind_in_any_order(runners: Runners) -> None:
    pair = Pair(runners)
    dice, layers = random.Random(0), pair.layers
    without = Plan.full(layers).without
    options: list[Callable[[int, int], dict[str, Any]]] = [
        lambda batch, width: {},
        lambda batch, width: {"at": torch.tensor([dice.randrange(width) for _ in range(batch)])},
        lambda batch, width: {"aux_layers": (1, layers)},
        lambda batch, width: {"aux_layers": (2,), "want_logits": False},
        lambda batch, width: {"stop": 1},
        lambda batch, width: {"plan": without(attention=(1,))},
        lambda batch, width: {"plan": without(mlp=(1,))},
        lambda batch, width: {"invariant": False},
        lambda batch, width: {"idle": [False] + [dice.random() < 0.5 for _ in range(batch - 1)]},
        lambda batch, width: {"first_row": ROWS - batch},
        lambda batch, width: {
            "resume": Resume(1, torch.full((batch, width, 64), 0.1 * width), known(batch, width))
        },
    ]

    def known(batch: int, width: int) -> list[int]:
        return [dice.randrange(width + 1)] * batch

    for seed in range(80):
        batch, width = dice.choice([(1, 1), (1, 4), (2, 1), (2, 4), (3, 4)])
        starts = [dice.choice([5, 250, 700, 1000]) + dice.randrange(20) for _ in range(batch)]
        pair.both(batch, width, starts, seed, **dice.choice(options)(batch, width))
    assert pair.capturer.replays > 15


THREE = 3 * 2 * 4 * 1024  # bytes of 1024 numbers of float32 in, and as many out


@pytest.mark.parametrize(
    ("limits", "fits"),
    [({"kept_bytes": THREE}, True), ({"kept_bytes": THREE - 1}, False), ({"bound": 2}, False)],
    ids=["three fit", "two fit", "two graphs"],
)
def test_graphs_are_bounded(limits: dict[str, int], fits: bool) -> None:
    """The least recently used go, and what was dropped is captured again; the latest is kept in any case."""
    capturer, owner = Rerun(), torch.nn.Identity()
    kept = Graphs(capturer, **limits)

    def run(key: str, numbers: int = 1024) -> int:
        before = capturer.replays
        x = torch.full((numbers,), 3.0)
        assert torch.equal(kept.run(lambda x: 2 * x, x, owner=owner, key=key), 2 * x)
        return capturer.replays - before

    for key in ("a", "b", "a", "b", "c", "a", "c"):
        run(key)
    assert run("c") == run("a") == 1
    assert run("b") == fits, "the least recently used of three that do not fit"
    run("large", 2**14)
    assert run("large", 2**14) == run("large", 2**14) == 1
    if "kept_bytes" in limits:
        assert run("a") == 0 and run("a") == 1, "it made room"
        assert run("large", 2**14) == 0, "and so did the large one"


def test_a_failed_capture_is_tried_again_after_a_while(
    runners: Runners, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A while of passes, and twice as many after the next failure; then graphs are as they would have been."""
    monkeypatch.setattr(graphs, "FAILURE_PASSES", 4)
    pair, tries = Pair(runners, Rerun(fails=True)), list[int]()
    with caplog.at_level(logging.INFO):
        for turn in range(16):
            before = pair.capturer.captures
            pair.both(1 + turn % 2, 1, [40 + turn, 3][: 1 + turn % 2], seed=turn)
            tries += [turn] * (pair.capturer.captures - before)
    assert tries == [2, 6, 14], "a new shape is no reason to try sooner"
    [record] = caplog.records
    assert "a CUDA graph cannot be captured now (CUDA error: operation not permitted);" in record.message
    pair.capturer.fails = False
    for turn in range(16, 33):
        pair.both(1, 1, [40], seed=turn)
    assert (pair.capturer.captures, pair.capturer.replays) == (4, 3), "from turn 30 on"
    assert pair.captured.backend.graphs is not None and not pair.captured.backend.graphs.failures


def test_a_time_counts_once_its_passes_are_replayed(runners: Runners) -> None:
    pair, seeds = Pair(runners), iter(range(9))
    turns = TimedTurns({"pass": lambda: pair.both(2, 1, [40, 3], next(seeds))}, torch.device("cpu"))
    turns.take()
    assert (pair.capturer.captures, pair.capturer.replays) == (1, 2), "captured and run, then replayed"
    turns.take()
    assert pair.capturer.replays == 3
    assert len(turns.seconds["pass"]) == 2


def test_captures_are_paid_for_by_passes(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of new shapes is captured as far as passes were saved, then one for every so many passes."""
    monkeypatch.setattr(graphs, "SAVED_PASSES", 2 * CAPTURE_PASSES)
    pair = Pair(runners)
    for turn in range(2):
        for batch in (1, 2, 3):
            pair.both(batch, 1, [40] * batch, seed=turn)
    assert pair.capturer.captures == 2, "two are saved up, and six passes pay for no third"
    for seed in range(2 * CAPTURE_PASSES):
        pair.both(1, 1, [40], seed)
    pair.both(3, 1, [40] * 3, seed=9)
    assert pair.capturer.captures == 3


def test_an_error_of_the_caller_is_not_a_failed_capture(
    runners: Runners, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(runners)
    for _ in range(3):
        with pytest.raises(IndexError):
            pair.captured.forward(pair.caches[0], torch.tensor([[97]]), [3])
    assert not caplog.records


def test_prefill_and_ragged_passes_are_not_captured(runners: Runners) -> None:
    """Nor is any where the caller says so."""
    pair = Pair(runners)
    pair.captured.backend.gathers = True
    for _ in range(3):
        pair.captured.prefill(pair.caches[0], 0, [5, 6, 7], 0)
        pair.captured.forward(pair.caches[0], torch.ones(2, 3, dtype=torch.int64), [3, 3], counts=[3, 1])
    pair.captured.backend.gathers = None
    assert pair.capturer.captures == 0
    pair = Pair(runners)
    with pair.captured.uncaptured():
        for seed in range(3):
            pair.both(1, 1, [40], seed)
    assert pair.capturer.captures == 0
    for seed in range(2):
        pair.both(1, 1, [40], seed)
    assert pair.capturer.captures == 1


class Forgetful(Rerun):
    """A capturer whose graphs keep no reference to the pass, as CUDA graphs do not."""

    def capture(self, body: Callable[[], Forward]) -> CapturedGraph:
        self.captures += 1
        return CapturedGraph(lambda: None, body())


def test_a_tensor_that_was_looked_at_is_not_kept() -> None:
    """A circle of references would keep the logits of thousands of rounds until Python's collector comes."""
    gc.disable()
    try:
        logits = torch.ones(2)
        graphs.flattened({"a": [logits, 1]})
        seen = weakref.ref(logits)
        del logits
        assert seen() is None
    finally:
        gc.enable()


def test_each_cache_has_its_own_graphs_which_go_with_it(runners: Runners) -> None:
    pair = Pair(runners, Forgetful())
    graphs = pair.captured.backend.graphs
    assert graphs is not None
    tokens = torch.ones(1, 1, dtype=torch.int64)
    for captures in (1, 2):
        other = pair.filled(pair.captured)
        for _ in range(3):
            pair.captured.forward(other, tokens, [40])
        assert pair.capturer.captures == captures
    assert len(graphs._kept) == 1
    del other
    gc.collect()
    assert len(graphs._kept) == 0


def test_a_graph_keeps_the_rotary_tables_that_it_reads(runners: Runners) -> None:
    pair = Pair(runners, Forgetful())
    backend: Any = pair.captured.backend
    for _ in range(2):
        pair.captured.forward(pair.caches[0], torch.ones(1, 1, dtype=torch.int64), [40])
    table = weakref.ref(next(iter(backend._tables.values())))
    pair.captured.reserve_positions(2 * len(table()))  # the runner has other tables from now on
    gc.collect()
    assert table() is not None
    backend.graphs = None
    gc.collect()
    assert table() is None


@pytest.mark.parametrize("quantum", [64, 256, 512, 1024])
def test_graphs_use_few_lengths_per_doubling(quantum: int) -> None:
    lengths = range(quantum, 64 * quantum + 1, quantum)
    coarse = {length: coarse_length(length) for length in lengths}
    assert all(not found % quantum and length <= found <= 1.34 * length for length, found in coarse.items())
    assert len({*coarse.values()}) <= 4 + 4 * 4 + 4
