"""Calibration: tables come of real rounds, between requests only, and leave nothing behind."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.decode import calibration, rehearsal
from foredraft.decode import engine as engine_module
from foredraft.decode.calibration import KEPT, RARE, Calibration, Measured
from foredraft.decode.engine import Engine
from foredraft.decode.policy import PLAIN, Auto, Choice, CostTable
from foredraft.decode.policy.ledger import SHARE
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigError, RequestError
from tests.support.caches import dense
from tests.support.checkpoints import save_checkpoint, save_pair

GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = save_pair(tmp_path_factory.mktemp("pair"))
    return folder / "big", folder / "small"


def loaded(folders: tuple[Path, Path], **options: Any) -> foredraft.LLM:
    target, draft = folders
    return foredraft.load(
        target,
        **{"draft": draft, "dtype": "float32", "device": "cpu", "max_batch": 4, "max_length": 300} | options,
    )


def measure(engine: Engine, batch: int, longest: int, *, draws: bool = False) -> CostTable | None:
    measured = Measured.of(engine, batch, draws, longest)
    measured.take(engine)
    return measured.table()


def eager(llm: foredraft.LLM) -> Auto:
    """Its policy, with a table by which drafts cost next to nothing, and which nobody replaces."""
    policy = llm.engine.policy
    assert isinstance(policy, Auto)
    policy.table = CostTable(
        {1: {1: 1.0, 11: 1.01}}, {"draft-model": {1: (0.01, 0.01)}, "lookup": {1: (0.0, 0.0)}}
    )
    policy.calibrate = None
    return policy


def test_rounds_are_measured_and_leave_the_caches_as_they_were(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SECONDS", 600.0)  # all repeats: their medians are no hiccups
    llm = loaded(folders)
    engine = llm.engine
    for batch in (1, 4):
        table = measure(engine, batch, 5)
        assert table is not None
        assert [columns for columns, _ in table.passes[batch]] == [batch * n for n in (1, 2, 3, 5, 6)]
        assert all(0 < ms < math.inf for _, ms in table.passes[batch])
        assert table.drafts["lookup"] == {batch: (0.0, 0.0)}
        assert table.drafting("draft-model", batch, 5) > 0
    assert not engine.rows.sequences
    assert all(length == 0 for cache in engine.rows.caches for length in cache.lengths)
    lookup: Any = engine.drafters["lookup"]
    assert not lookup._indices
    assert all(dense(cache).isfinite().all() for cache in engine.rows.caches)


def test_a_text_is_read_when_the_device_has_read_it(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 3.2 s at all, and 0.1 s a token."""
    clock, pending = [0.0], [0.0]
    read = DraftModel.read

    def ahead(drafter: DraftModel, sequence: Any, start: int, end: int) -> None:
        pending[0] = 3.2 + 0.1 * (end - start)
        read(drafter, sequence, start, end)

    def wait(device: Any) -> None:
        clock[0] += pending[0]
        pending[0] = 0.0

    monkeypatch.setattr(calibration, "SECONDS", 600.0)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(rehearsal, "synchronise", wait)
    monkeypatch.setattr(DraftModel, "read", ahead)
    table = measure(loaded(folders).engine, 1, 5)
    assert table is not None
    assert table.reads == {"draft-model": pytest.approx(100.0)}


def test_a_cache_without_room_is_not_measured(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders, max_length=12)
    assert measure(llm.engine, 1, 5) is None
    assert len(llm.generate([5, 6], SamplingParams(temperature=0, max_new_tokens=6))[0].token_ids) <= 6


@pytest.mark.parametrize("context", [2, 3, 256])
def test_rounds_are_as_long_as_there_is_room(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """All of it in the midst of a text, of which only the end was read."""
    engine = loaded(folders, max_length=context + 4 * 6).engine
    starts: list[int] = []
    read: list[int] = []
    forward, prefill = engine.target.forward, engine.target.prefill

    def watched(cache: Any, tokens: Any, at: list[int], **named: Any) -> Any:
        starts.extend(at)
        return forward(cache, tokens, at, **named)

    def reading(cache: Any, row: int, tokens: list[int], start: int, **named: Any) -> Any:
        read.append(len(tokens))
        return prefill(cache, row, tokens, start, **named)

    monkeypatch.setattr(engine.target, "forward", watched)
    monkeypatch.setattr(engine.target, "prefill", reading)
    assert measure(engine, 2, 5) is not None
    assert min(starts) == context - 1
    assert set(read) == {1}
    assert all(length == 0 for cache in engine.rows.caches for length in cache.lengths)


def test_tables_change_between_requests_only(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(folders)
    policy: Any = llm.engine.policy
    made: list[int] = []
    busy: list[int] = []

    def noted(measured: Measured, engine: Engine) -> None:
        made.append(measured.batch)
        busy.append(len(engine.rows.sequences))
        measured.rounds[None, 0] = deque([1.0])

    monkeypatch.setattr(Measured, "take", noted)
    llm.generate([[5, 6]], GREEDY)
    before = policy.table
    llm.generate([[5, 6]], GREEDY)
    assert made == [1, 1], "the first took next to no time, so that there is more to measure at once"
    assert policy.table is not before
    monkeypatch.setattr(calibration, "RARE", 1e12)
    llm.generate([[5, 6]] * 3, GREEDY)
    assert made == [1, 1, 1, 4], "the power of two that holds them, or all rows"
    llm.generate([[5, 6]] * 3, GREEDY)
    assert made == [1, 1, 1, 4]
    policy.ledger.spent += 1e15
    llm.generate([[5, 6]], llm.params(drafter="none", max_new_tokens=4))
    assert made == [1, 1, 1, 4], "nobody drafts"
    llm.generate([[5, 6]], GREEDY)
    assert made == [1, 1, 1, 4, 1]
    policy.ledger.spent += 1e15
    step = llm.engine.round

    def later() -> Any:
        policy.ledger.spent += 1e15  # there is more to measure again
        return step()

    monkeypatch.setattr(llm.engine, "round", later)
    llm.generate([[5, 6]] * 6, GREEDY)  # two of them wait for a row while others run
    assert made == [1, 1, 1, 4, 1, 1, 4]
    assert not any(busy)


def test_what_draws_has_a_table_of_its_own(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(folders)
    policy: Any = llm.engine.policy
    made: list[tuple[int, bool]] = []

    def noted(measured: Measured, engine: Engine) -> None:
        made.append((measured.batch, measured.draws))
        measured.rounds[None, 0] = deque([2.0 if measured.draws else 1.0])

    monkeypatch.setattr(Measured, "take", noted)
    monkeypatch.setattr(calibration, "RARE", 1e12)
    drawn = replace(GREEDY, temperature=0.5)
    plain_steps = []
    for params in (GREEDY, drawn, GREEDY, [GREEDY, drawn], drawn):
        llm.generate([[5, 6], [7]], params)
        plain_steps.append(policy.table.verifying(1, 1))
    assert made == [(1, False), (2, False), (1, True), (2, True)]
    assert plain_steps == [1.0, 2.0, 1.0, 2.0, 2.0]
    policy.ledger.spent += 1e18  # there is more to measure of all
    llm.generate([[5, 6], [7]], GREEDY)
    assert made[4:] == [(1, False), (2, False)] and policy.table.verifying(1, 1) == 1.0


@pytest.mark.parametrize("draws", [False, True])
def test_rounds_draw_as_requests_do(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    laws: list[bool] = []
    made = engine_module.distribution_of

    def watched(*given: Any) -> Any:
        law, finite = made(*given)
        laws.append(law.all_one_hot)
        return law, finite

    monkeypatch.setattr(engine_module, "distribution_of", watched)
    assert measure(loaded(folders).engine, 2, 5, draws=draws) is not None
    assert set(laws) == {not draws}


def test_what_takes_long_is_measured_seldom(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four seconds each time: once before the first request, and then after 800 seconds of rounds."""
    llm = loaded(folders)
    clock, made = [0.0], []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])

    def slow(measured: Measured, engine: Engine) -> None:
        made.append(clock[0])
        clock[0] += 4.0
        measured.rounds[None, 0] = deque([1.0])

    monkeypatch.setattr(Measured, "take", slow)
    policy: Any = llm.engine.policy
    calibrate = policy.calibrate
    assert isinstance(calibrate, Calibration)
    waiting = Sequence(0, [5, 6], GREEDY, 0)
    for _ in range(100):
        calibrate(llm.engine, [waiting])
        clock[0] += 20
    assert len(made) == 1, "nothing went on meanwhile"
    for _ in range(100):
        policy.ledger.spent += 20_000.0
        calibrate(llm.engine, [waiting])
    assert len(made) == 1 + 100 * 20 // (4 * RARE)


def test_a_table_is_of_the_median_rounds_that_are_remembered(folders: tuple[Path, Path]) -> None:
    """The least of many is the luck of one, and the first of them are of another hour. Of two, the less is
    taken: only one was disturbed."""
    engine = loaded(folders).engine
    measured = Measured.of(engine, 1, False, 5)
    measured.take(engine)
    for _ in range(KEPT):
        measured.take(engine)
    assert {len(several) for several in measured.rounds.values()} == {KEPT}
    told: list[tuple[str | None, int]] = []
    assert min(measured.weighing) > 0
    measured.rounds.clear()
    measured.weighing.clear()

    class Told(rehearsal.Rehearsal):
        def round(self, trial: tuple[str | None, int], *, after_others: bool) -> float:
            told.append(trial)
            return 1.0 + len(told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "Rehearsal", Told)
        measured.begun = 1
        measured.take(engine)
        measured.take(engine)
    assert sorted(told[: len(told) // 2], key=str) == sorted(measured.trials, key=str)
    assert told[0] == measured.trials[1] and told[len(told) // 2] == measured.trials[2], (
        "who is first, changes"
    )
    measured.rounds = {
        (None, 0): deque([9.0, 2.0, 2.1, 1.0, 2.2]),
        ("filler", 1): deque([2.6, 7.0]),
        ("draft-model", 1): deque([3.0, 3.1, 3.2, 0.5]),
    }
    table = measured.table()
    assert table is not None
    assert table.passes[1] == [(1, 2.1), (2, 2.6)]
    assert table.drafting("draft-model", 1, 1) == pytest.approx(0.4)
    measured.rounds |= {("filler", 5): deque([3.0]), ("draft-model", 5): deque([4.0])}
    table = measured.table()
    assert table is not None
    assert table.drafts["draft-model"][1] == pytest.approx((0.4, 0.15))
    measured.rounds["draft-model", 5] = deque([6.0])
    table = measured.table()
    assert table is not None
    assert table.drafts["draft-model"][1] == pytest.approx((0.6, 0.6)), "the first step is never the cheaper"
    measured.weighing.extend([0.1, 0.6, 9.0])
    table = measured.table()
    assert table is not None
    took = {columns: pytest.approx(ms) for columns, ms in ((1, 2.1), (2, 2.8), (6, 3.2))}
    assert dict(table.passes[1]) == took, "what to choose takes, rounds that draft have alone"
    assert table.drafts["draft-model"][1] == pytest.approx((0.6, 0.6))


@pytest.mark.parametrize("batch", [1, 4])
def test_rounds_that_draft_are_weighed_as_in_a_request(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """By drafters that a request has; plain ones ask nobody."""
    weighed: list[list[set[str]]] = []
    weigh = Auto._weigh

    def counted(auto: Auto, rows: Any, *given: Any) -> Any:
        weighed.append([set(row.most) for row in rows])
        return weigh(auto, rows, *given)

    monkeypatch.setattr(Auto, "_weigh", counted)
    with rehearsal.Rehearsal(loaded(folders).engine, batch, 5) as rehearsed:
        rehearsed.round((None, 0), after_others=True)
        assert not weighed and not rehearsed.weighing
        for trial in (("draft-model", 5), ("filler", 3), ("draft-model", 1)):
            assert rehearsed.round(trial, after_others=False) > 0
        assert len(weighed) == len(rehearsed.weighing) >= 3
        assert all(len(rows) == batch and "filler" not in rows[0] for rows in weighed)
        reads = itertools.count()
        monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=lambda: next(reads)))
        assert rehearsed.round((None, 0), after_others=False) == 1e3
        assert rehearsed.round(("filler", 2), after_others=False) == 2e3, "but for the weighing"
        assert rehearsed.weighing[-1] == 1e3


@pytest.mark.parametrize(("ms", "before"), [(1.0, 5), (2.0, 3), (20.0, 1), (0.0, 16)])
def test_rounds_settle_before_one_is_timed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, ms: float, before: int
) -> None:
    """For five ms, by rounds that take so many; no more than 16 of them."""
    monkeypatch.setattr(rehearsal, "GROWTH", 60)  # no text has to be begun meanwhile
    engine = loaded(folders, max_length=700).engine
    clock, rounds = [0.0], list[tuple[str | None, int]]()
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: clock[0])
    with rehearsal.Rehearsal(engine, 2, 5) as rehearsed:
        step = rehearsed.engine.round

        def timed() -> Any:
            rounds.append(rehearsed.policy.trial)
            clock[0] += ms / 1e3
            return step()

        monkeypatch.setattr(rehearsed.engine, "round", timed)
        for trial in ((None, 0), ("filler", 5), ("draft-model", 5)):
            rounds.clear()
            assert rehearsed.round(trial, after_others=True) == pytest.approx(ms)
            assert rounds == [trial] * (before + 1)


def test_rounds_settle_in_texts_with_room_and_drafters_that_are_not_behind(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are."""
    monkeypatch.setattr(rehearsal, "SETTLE", 1e9)
    monkeypatch.setattr(rehearsal, "SETTLED", 60)
    with rehearsal.Rehearsal(loaded(folders).engine, 2, 5) as rehearsed:
        engine, room = rehearsed.engine, list[list[int]]()
        step = engine.round

        def watched() -> Any:
            room.append([s.remaining for s in engine.rows.sequences])
            return step()

        monkeypatch.setattr(engine, "round", watched)
        rehearsed.round(("filler", 5), after_others=True)
        assert len(room) > rehearsal.SETTLED and min(map(min, room)) > 6, "one token more than is drafted"
        for rounds in (2, 1):
            room.clear()
            rehearsed.round(("draft-model", 5), after_others=False)
            assert len(room) == rounds, "it has to read what others wrote first"


@pytest.mark.parametrize("seconds", [0.0, 0.04, 0.06, 0.2])
def test_the_first_time_of_each_counts_only_where_there_is_no_time_for_another(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """As long as each round takes: all repeats; the second ones in part, or not at all; not even all once."""
    clock, told = [0.0], list[tuple[str | None, int]]()

    class Told(rehearsal.Rehearsal):
        def round(self, trial: tuple[str | None, int], *, after_others: bool) -> float:
            warm = after_others or told[-1:] == [trial]
            clock[0] += seconds
            told.append(trial)
            return 1e3 * seconds + (0.0 if warm else 100.0)

    monkeypatch.setattr(calibration, "Rehearsal", Told)
    monkeypatch.setattr(calibration, "ROUNDS", 1.0)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    engine = loaded(folders).engine
    measured = Measured.of(engine, 1, False, 5)
    measured.take(engine)
    trials = measured.trials
    assert len(trials) == 7
    assert told == (trials + calibration.REPEATS * [trial for trial in trials for _ in range(2)])[: len(told)]
    assert len(told) == {0.0: 7 * (1 + 2 * calibration.REPEATS), 0.04: 13, 0.06: 9, 0.2: 3}[seconds]
    warm, cold = 1e3 * seconds, 1e3 * seconds + 100.0
    assert {trial: list(several) for trial, several in measured.rounds.items()} == {
        trial: [cold] if told.count(trial) == 1 else [warm] * (told.count(trial) - 1) for trial in told
    }


def test_what_there_was_no_time_for_at_first_is_remembered_no_longer(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(rehearsal.Rehearsal):
        def round(self, trial: tuple[str | None, int], *, after_others: bool) -> float:
            return float(measured.begun)

    monkeypatch.setattr(calibration, "Rehearsal", Told)
    engine = loaded(folders).engine
    measured = Measured.of(engine, 1, False, 5)
    measured.begun = 1  # there was no time for any
    for _ in range(KEPT + 3):
        measured.take(engine)
    assert {trial: list(several) for trial, several in measured.rounds.items()} == {
        trial: [float(time) for time in range(4, KEPT + 4)] for trial in measured.trials
    }


def test_a_large_model_is_not_held_up_by_its_table(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the count of its passes, each of which takes two seconds; what was not measured is assumed."""
    llm = loaded(folders, plan="skip:attn=0")
    clock, target = [0.0], llm.engine.target
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    for name, seconds in (("forward", 2.0), ("draft", 9.0)):
        whole = getattr(target, name)

        def slow(*args: Any, whole: Any = whole, seconds: float = seconds, **more: Any) -> Any:
            clock[0] += seconds
            return whole(*args, **more)

        monkeypatch.setattr(target, name, slow)
    table = measure(llm.engine, 1, 10)
    assert table is not None
    longest_round = 9.0 + 2.0
    assert clock[0] <= 2.0 * calibration.ROUNDS + longest_round + 2.0, "and the prompt"
    assert [columns for columns, _ in table.passes[1]][-1] == 11
    assert table.drafting("layer-skip", 1, 1) > 1000 * table.drafting("lookup", 1, 1) == 0
    clock[0] = 0.0
    monkeypatch.setattr(calibration, "ROUNDS", 1e9)
    measure(llm.engine, 1, 10)
    assert clock[0] > 2.0 * 8 + longest_round + 2.0, "else nothing was shown"


@pytest.mark.parametrize("drafter", ["auto", "draft-model"])
def test_auto_says_what_plain_decoding_says(folders: tuple[Path, Path], drafter: str) -> None:
    llm = loaded(folders, drafter=drafter, max_batch=3)
    eager(llm)
    prompts = [[5 + (i * n) % 90 for i in range(20 + 9 * n)] for n in range(1, 5)]
    plain = llm.generate(
        prompts, llm.params(temperature=0, max_new_tokens=40, ignore_eos=True, drafter="none")
    )
    outputs = llm.generate(prompts, GREEDY, trace=True)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.drafted for o in outputs) > 0
    seeded = SamplingParams(seed=3, max_new_tokens=30)
    without = SamplingParams(seed=3, max_new_tokens=30, drafter="none", acceptance="coupled")
    assert [o.token_ids for o in llm.generate(prompts, seeded)] == [
        o.token_ids for o in llm.generate(prompts, without)
    ]


def test_nobody_asks_a_policy_where_nobody_may_draft(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(folders)
    policy = eager(llm)
    asked: list[int] = []
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda rows: asked.append(len(rows)) or choose(rows))
    plain = llm.params(temperature=0, max_new_tokens=8, ignore_eos=True, drafter="none")
    llm.generate([[5, 6]], plain)
    assert not asked
    llm.generate([[5, 6], [7, 8]], [GREEDY, plain])
    assert asked and asked[0] == 2, "rows that decode plainly take part in a batch's costs"


def test_a_choice_not_to_draft_stands_without_being_asked_for(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(folders)
    policy = eager(llm)
    policy.table = CostTable({1: {1: 1.0, 2: 9.0}}, {})  # a draft cannot pay
    asked: list[int] = []
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda rows: asked.append(len(rows)) or choose(rows))
    (output,) = llm.generate([[5, 6]], GREEDY)
    assert output.stats.rounds == 40
    assert len(asked) == 2, "at first, and when one was tried again if it could pay"


def test_a_draft_model_reads_a_text_only_when_it_is_chosen(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders)
    policy = eager(llm)
    drafter: Any = llm.engine.drafters["draft-model"]
    policy.table = CostTable({1: {1: 1.0, 2: 9.0}}, {})  # a draft cannot pay
    llm.generate([[5 + i % 90 for i in range(50)]], GREEDY)
    assert drafter.draft_pass.runner.forwarded == 0


def test_a_policy_hears_what_a_lookup_has_and_how_sure_it_is(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders)
    policy = eager(llm)
    lookup: Any = llm.engine.drafters["lookup"]
    policy.table = CostTable({1: {1: 1.0, 11: 1.01}}, {})
    choose = policy.choose
    heard: list[tuple[dict[str, int], dict[str, float]]] = []

    def watched(rows: Any) -> Any:
        (row,) = rows
        has, sure = lookup.has(row.sequence, row.sequence.remaining - 1)
        assert (row.most, row.sure) == (({"lookup": has}, {"lookup": sure}) if has else ({}, {}))
        heard.append((row.most, row.sure))
        return choose(rows)

    policy.choose = watched  # type: ignore[method-assign]
    prompt = [5, 6, 7, 8, 9] * 3
    llm.generate([prompt], replace(GREEDY, drafter="lookup"))
    assert heard[0] == ({"lookup": 5}, {"lookup": 0.85})


def test_of_a_long_prompt_a_new_draft_model_reads_the_end(folders: tuple[Path, Path]) -> None:
    """And drafts what it would after that end alone; plain steps are left to read later on."""
    llm = loaded((folders[0], folders[0]), max_length=500)
    policy, prompt = eager(llm), [5 + i * i % 90 for i in range(290)]
    policy.table = CostTable(
        {1: {1: 1.0, 11: 1.01}}, {"draft-model": {1: (0.01, 0.01)}}, {"draft-model": 0.02}
    )
    drafter: Any = llm.engine.drafters["draft-model"]
    begun, drafts = [], []
    choose, verify = policy.choose, llm.engine._verify
    rounds = itertools.count()

    def watched(rows: Any) -> Any:
        if next(rounds) % 40 > 30:
            return [PLAIN]
        begun.append(drafter.began(rows[0].sequence))
        return choose(rows)

    def verified(inputs: Any, draft: Any) -> Any:
        drafts.append(draft.tokens[0].tolist())
        return verify(inputs, draft)

    policy.choose, llm.engine._verify = watched, verified  # type: ignore[method-assign]
    options = replace(GREEDY, max_new_tokens=200)
    (found,) = llm.generate([prompt], options)
    assert begun[0] == 0 and set(begun[1:]) == {290 - 1 - 128}
    assert max(found.stats.lengths) and any(count > 2 for count in map(len, drafts))
    policy.choose, llm.engine._verify = choose, verify  # type: ignore[method-assign]
    plainly = replace(options, drafter="none")
    assert llm.generate([prompt], plainly)[0].token_ids == found.token_ids
    first = next(draft for draft in drafts if draft)
    (after_its_end,) = llm.generate([prompt[161:]], replace(plainly, max_new_tokens=len(first)))
    assert after_its_end.token_ids == first


def test_what_another_tokenizer_has_to_read_is_counted(tmp_path: Path) -> None:
    """A draft model behind another tokenizer reads a text only once it is chosen, too."""
    target = save_checkpoint(tmp_path / "big", tokenizer=True, seed=1)
    foreign = save_checkpoint(tmp_path / "foreign", tokenizer=True, seed=3, vocab_size=300)
    llm = loaded((target, foreign))
    policy = eager(llm)
    policy.table = CostTable({1: {1: 1.0, 11: 1.01}}, {"retokenize": {1: (0.01, 0.01)}})
    choose = policy.choose
    behind: list[int] = []
    drafted: list[bool] = []

    def watched(rows: Any) -> Any:
        choices = choose(rows)
        behind.append(rows[0].behind["retokenize"])
        drafted.append(choices[0].budget > 0)
        return choices

    policy.choose = watched  # type: ignore[method-assign]
    prompt = [5 + i % 90 for i in range(200)]
    llm.generate([prompt], GREEDY)
    assert behind[0] == len(prompt) - 1
    assert drafted[0], "the text is cheap to read by this table"
    assert behind[1] <= 1
    policy.table = CostTable({1: {1: 1.0, 200: 50.0}}, {"retokenize": {1: (0.3, 0.3)}})
    policy._shared.clear()
    drafted.clear()
    llm.generate([prompt], GREEDY)
    assert not any(drafted), "nobody knows that it would earn its reading again"
    behind.clear()
    turns = itertools.cycle([Choice("retokenize", 3), PLAIN, PLAIN, PLAIN])
    choose = lambda rows: [next(turns)]  # noqa: E731
    llm.generate([prompt], GREEDY)
    assert max(behind[1:5]) == 3, "plain steps are left to read"


def test_a_request_without_drafts_is_not_held_up_by_others(folders: tuple[Path, Path]) -> None:
    """Beside it drafts that are always right, so that the batch as a whole would gain."""
    llm = loaded(folders, draft=folders[0])
    policy = eager(llm)
    policy.table = CostTable(
        {1: {1: 1.0, 11: 1.01}, 2: {2: 1.0, 12: 2.0}}, {"draft-model": {1: (0.01, 0.01)}}
    )
    held_up: list[Any] = []
    choose = policy.choose

    def watched(rows: Any) -> Any:
        held_up.extend(row.sequence for row in rows if not row.sequence.drafters)
        return choose(rows)

    policy.choose = watched  # type: ignore[method-assign]
    plain = llm.params(temperature=0, max_new_tokens=40, ignore_eos=True, drafter="none")
    outputs = llm.generate([[5, 6, 7], [8, 9, 10]], [GREEDY, plain])
    account = held_up[-1].policy_state.account
    assert outputs[0].stats.drafted > outputs[0].stats.accepted * 0.9 > 0
    assert (
        account.spent > 5
    )  # rounds in which nobody may draft are in no account, nor those since a choice was made
    assert account.lost <= SHARE * account.spent + 2 * account.largest


def test_the_trace_tells_who_drafted(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders, drafter="auto")
    eager(llm)
    prompt = [7, 8, 9, 10] * 6
    (output,) = llm.generate(
        [prompt], llm.params(temperature=0, max_new_tokens=60, ignore_eos=True), trace=True
    )
    assert output.trace is not None
    who = {r.drafter for r in output.trace}
    assert {"lookup", "draft-model"} <= who
    assert output.lossless


def test_auto_is_refused_where_nothing_chooses(folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        ConfigError,
        match="drafter is 'auto', but policy='fixed' cannot choose among drafters; give policy='auto'",
    ):
        loaded(folders, drafter="auto", policy="fixed")
    llm = loaded(folders, policy="fixed")
    with pytest.raises(
        RequestError, match="'auto', but policy='fixed' cannot choose among drafters; load with policy='auto'"
    ):
        llm.generate([[5]], SamplingParams(drafter="auto"))
