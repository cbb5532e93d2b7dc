"""Temperature 0: the very tokens of plain decoding, and every place where a run can end."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.decode.drafter import DraftPass
from foredraft.decode.policy import Fixed, Heuristic, Policy, TargetConfidence
from foredraft.decode.sequence import Finish, Sequence, State, TokenOrigin
from tests.support import distributions
from tests.support.harness import DRAFTERS, CheckedEngine, make_engine, request, rounds_until_done, run
from tests.support.mutation import replaced
from tests.support.parts import Fickle, LateBan, NoRepeat, RandomBudgets, StepByStep, StopUnsure, foreseeing
from tests.support.tabular import Table, Tabular

V = 5
TARGET, DRAFT = Table(V, 11), Table(V, 12)
NEW = 24
PROMPTS = (
    (0,),
    (1, 2),
    (3, 1, 4),
    (2, 2, 2, 2),
    (4, 0, 1, 2, 3),
    (0, 1, 2, 3, 4, 0, 1, 2, 3),
    (1, 3) * 7,
)
POLICIES: list[Policy] = [
    Fixed(1),
    Fixed(3),
    Fixed(7),
    Heuristic(6),
    StopUnsure(5),
    RandomBudgets(6),
    Fickle(3),
    Fixed(3, siblings=4),
]
# drafters that give logits, so that their drafts have siblings
STEPPERS = ("draft-model", "looping", "aux-states", "mapped", "layer-skip", "early-exit", "low-bit")


def reference(prompt: Any, count: int = NEW, target: Table = TARGET, **more: Any) -> list[int]:
    return distributions.greedy(target.after, list(prompt), count, **more)


def greedy(prompt: Any = (0,), drafter: str | None = None, **more: Any) -> Sequence:
    return request(prompt, drafter, **{"temperature": 0, "max_new_tokens": NEW, **more})


@pytest.mark.heavy
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_tokens_are_those_of_plain_decoding(policy: Policy, rows: int) -> None:
    sequences = [greedy(prompt, drafter) for prompt in PROMPTS for drafter in DRAFTERS]
    engine = make_engine(TARGET, DRAFT, policy, rows=rows)
    assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
    assert any(turn.accepted < turn.drafted for s in sequences for turn in s.rounds)
    assert any(turn.accepted > 0 for s in sequences for turn in s.rounds)
    with_sibling = {s.drafters for s in sequences for turn in s.rounds if turn.sibling}
    assert with_sibling == ({(name,) for name in STEPPERS} if policy.siblings else set())


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("right", [0, 1, 2, 3, 5])
def test_drafts_accepted_in_part_or_whole(gamma: int, right: int) -> None:
    sequences = [greedy(prompt, "script") for prompt in PROMPTS]
    outputs = {s.id: reference(s.prompt) for s in sequences}
    engine = make_engine(TARGET, policy=Fixed(gamma), script=foreseeing(outputs, right, V))
    assert run(engine, sequences) == list(outputs.values())
    for sequence in sequences:
        for turn in sequence.rounds:
            assert turn.accepted == min(right, turn.drafted)
            assert turn.emitted == turn.accepted + 1


def test_each_row_verifies_its_own_guess_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [greedy(prompt, "script") for prompt in PROMPTS[:4]]
    engine = make_engine(TARGET, policy=Fixed(4), script=lambda s, budget: [1] * min(s.row, budget))
    seen: list[list[int]] = []
    forward = engine.target.forward

    def noted(*args: Any, **more: Any) -> Any:
        seen.append(more.get("counts") or [])  # none of a prompt
        return forward(*args, **more)

    monkeypatch.setattr(engine.target, "forward", noted)
    assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
    full = [counts for counts in seen if len(counts) == 4 and 0 not in counts]
    assert full and all(count <= 1 + row for counts in full for row, count in enumerate(counts))
    assert [1, 2, 3, 4] in full


@pytest.mark.parametrize("drafter", ["draft-model", "aux-states", "early-exit"])
def test_a_perfect_drafter_is_accepted_whole(drafter: str) -> None:
    """The draft model is the target: any position it is off by, or token it missed, would show."""
    sequences = [greedy(prompt, drafter, temperature=t) for prompt in PROMPTS for t in (0, 1.3)]
    engine = make_engine(TARGET, TARGET, Fixed(4), rows=3)
    run(engine, sequences)
    for sequence in sequences:
        assert all(turn.accepted == turn.drafted for turn in sequence.rounds)
        assert len(sequence.rounds) == 5  # 24 tokens by 5, the last round of 4


def test_origins_name_the_source_of_each_token() -> None:
    sequence = greedy((0,), "script", max_new_tokens=7)
    engine = make_engine(TARGET, policy=Fixed(2), script=foreseeing({sequence.id: reference((0,), 7)}, 2, V))
    run(engine, [sequence])
    drafted, bonus = [TokenOrigin.DRAFTER] * 2, [TokenOrigin.BONUS]
    assert sequence.origins == [*drafted, *bonus, *drafted, *bonus, TokenOrigin.TARGET]
    assert [(t.drafted, t.accepted, t.emitted) for t in sequence.rounds] == [(2, 2, 3), (2, 2, 3), (0, 0, 1)]


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("right", [0, 2, 4])
def test_eos_at_every_place_of_a_run(place: int, right: int) -> None:
    for prompt in PROMPTS:
        whole = reference(prompt)
        ends = frozenset({whole[place]})
        want = whole[: whole.index(whole[place]) + 1]
        sequence = greedy(prompt, "script", eos=ends)
        engine = make_engine(TARGET, policy=Fixed(4), script=foreseeing({sequence.id: whole}, right, V))
        assert run(engine, [sequence]) == [want]
        assert sequence.finish is Finish.EOS
        assert sum(turn.emitted for turn in sequence.rounds) == len(want)


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_limit_at_every_place_of_a_run(limit: int) -> None:
    sequences = [greedy((0, 3), drafter, max_new_tokens=limit) for drafter in DRAFTERS]
    outputs = {s.id: reference((0, 3)) for s in sequences}
    engine = make_engine(TARGET, DRAFT, Fixed(4), script=foreseeing(outputs, 9, V))
    for output, sequence in zip(run(engine, sequences), sequences, strict=True):
        assert output == reference((0, 3))[:limit]
        assert sequence.finish is Finish.LENGTH


def test_the_last_position_of_the_cache() -> None:
    """Prompt and limit fill a row to its end, with the longest draft on top."""
    sequences = [greedy((0, 3, 1), drafter, max_new_tokens=13) for drafter in DRAFTERS]
    engine = make_engine(TARGET, DRAFT, Fixed(11), positions=16)
    assert run(engine, sequences) == [reference((0, 3, 1), 13)] * len(DRAFTERS)


def test_a_draft_fits_the_verifying_pass_and_the_drafter() -> None:
    engine = make_engine(Tabular(TARGET, max_queries=4), DRAFT, Fixed(9))
    engine.drafters["script"].max_length = 10
    sequences = [greedy((0,), "draft-model"), greedy((0,), "script")]
    assert run(engine, sequences) == [reference((0,))] * 2
    assert max(turn.drafted for turn in sequences[0].rounds) == 3
    read = 0
    for turn in sequences[1].rounds:
        assert turn.drafted == 0 or 1 + read + turn.drafted <= 10
        read += turn.emitted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 2, 3, 7])
def test_choices_come_in_waves(drafter: str | None, rows: int, samples: int) -> None:
    engine = make_engine(TARGET, DRAFT, Fixed(2), rows=rows)
    prompt = (4, 0, 1, 2, 3, 1)
    shared: Any = {"group": 1, "seed": 5}
    group = [greedy(prompt, drafter, sample=i, max_new_tokens=5 + i % 3, **shared) for i in range(samples)]
    before, after = greedy((1, 2), drafter), greedy((2, 2), drafter)
    outputs = run(engine, [before, *group, after])
    assert outputs[1:-1] == [reference(prompt, s.params.max_new_tokens) for s in group]
    assert [outputs[0], outputs[-1]] == [reference((1, 2)), reference((2, 2))]


def test_a_prompt_is_prefilled_once_for_all_choices() -> None:
    target = Tabular(TARGET)
    engine = make_engine(target, DRAFT, rows=2)
    prompt = tuple([1, 0, 2] * 4)
    seen: list[int] = []
    target.prefill = lambda *a, f=target.prefill, **k: seen.append(len(a[2])) or f(*a, **k)  # type: ignore[method-assign]
    run(engine, [greedy(prompt, "draft-model", group=1, sample=i, seed=5) for i in range(6)])
    assert sum(seen) == len(prompt) - 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_broken_logits_end_one_request_alone(drafter: str | None) -> None:
    prompts = [(0, 1), (1, 2, 3), (2,)]
    for place in range(4):
        engine = make_engine(Tabular(TARGET, fatal=4, patience=7), DRAFT, Fixed(3), rows=4)
        sequences = [greedy(prompt, drafter) for prompt in prompts]
        bad = greedy((4, 0, 1), drafter)
        sequences.insert(place, bad)
        after = [greedy(p, d) for p, d in zip(itertools.cycle(prompts), DRAFTERS, strict=False)]
        run(engine, sequences + after)
        assert bad.finish is Finish.ERROR and "not finite" in str(bad.error)
        assert bad.new_ids == reference(bad.prompt)[: len(bad.new_ids)]
        for sequence in [s for s in sequences if s is not bad] + after:
            assert sequence.new_ids == reference(sequence.prompt), sequence.error


@pytest.mark.parametrize("broken", list(itertools.product([False, True], repeat=4)))
def test_several_rows_break_and_end_in_one_round(broken: tuple[bool, ...]) -> None:
    engine = make_engine(Tabular(TARGET, fatal=4, patience=1), DRAFT, Fixed(3), rows=4)
    ends = {"eos": frozenset(range(V))}
    first = [greedy((4,), **ends) if bad else greedy((0,), "draft-model", **ends) for bad in broken]
    run(engine, first)
    assert [s.finish for s in first] == [Finish.ERROR if bad else Finish.EOS for bad in broken]
    after = [greedy((3, 1, 0, 2, 1, 3, 0), d, max_new_tokens=6) for d in DRAFTERS]
    assert run(engine, after) == [reference(s.prompt, 6) for s in after]


def break_off(*args: Any, **more: Any) -> Any:
    raise RuntimeError("out of memory")


def test_a_failed_batch_leaves_clean_rows() -> None:
    engine = make_engine(Tabular(TARGET, fatal=4, patience=3), DRAFT, Fixed(3), rows=4)
    for prompt in ((0, 1, 1), (3, 0), (1, 2), (2,)):
        engine.submit(greedy(prompt, "draft-model"))
    engine.step()
    while engine.scheduler.prefilling is not None:
        engine.step()
    assert len(engine.rows.sequences) == 4

    with replaced(engine.target, "forward", break_off), pytest.raises(RuntimeError):
        engine.step()
    assert engine.drafters["draft-model"]._stepped, "the pass broke off after the draft"  # type: ignore[attr-defined]
    engine.cache.data[:, :, 20:] = float("nan")  # type: ignore[attr-defined]
    failed = list(engine.rows.sequences)
    engine.fail_batch("out of memory")
    assert [(s.finish, s.error) for s in failed] == [(Finish.ERROR, "out of memory")] * 4
    assert not engine.drafters["draft-model"]._stepped  # type: ignore[attr-defined]
    after = [greedy(p, d) for p in PROMPTS[:4] for d in DRAFTERS]
    assert run(engine, after) == [reference(s.prompt) for s in after]


def test_a_row_that_moves_before_its_first_round_leaves_nothing_behind() -> None:
    """NaN written by a prefill, before any logits could tell."""
    engine = make_engine(Tabular(TARGET, chunk=2, fatal=4, patience=2), DRAFT, Fixed(3), rows=2)
    engine.check = lambda: None  # type: ignore[method-assign]  # it would find the NaN before the engine does
    first, bad = greedy((0,), max_new_tokens=2), greedy((4, 0, 1, 2, 3, 0, 1, 2, 3))
    engine.submit(first)
    engine.submit(bad)
    while first.finish is None:
        engine.step()
    assert (bad.row, bad.state) == (0, State.PREFILLING)
    heir = greedy((3, 1, 2))
    assert run(engine, [heir]) == [reference(heir.prompt)]
    assert bad.finish is Finish.ERROR


def test_a_prompt_cancelled_while_it_is_read_leaves_nothing_behind() -> None:
    for drafter in (None, "draft-model", "script", "lookup"):
        engine = make_engine(Tabular(TARGET, chunk=2, fatal=4, patience=2), DRAFT, Fixed(3), rows=1)
        engine.check = lambda: None  # type: ignore[method-assign]
        bad = greedy((4, 0, 1, 2, 3, 0, 1, 2, 3), drafter)
        engine.submit(bad)
        engine.step()
        assert bad.state is State.PREFILLING
        engine.cancel(bad)
        heir = greedy((3, 1, 2), drafter)
        assert run(engine, [heir]) == [reference(heir.prompt)]


@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_a_draft_that_breaks_the_pass_costs_only_the_draft(drafter: str) -> None:
    """A token that the target would never say may have a state that is not finite."""
    table = Table(V, 21)
    table.logits[..., 4] = -40.0  # never the argmax; only the script proposes it
    want = [reference(p, target=table) for p in PROMPTS[:4] if 4 not in p]
    engine = make_engine(
        Tabular(table, venom=4), DRAFT, Fixed(3), rows=3, script=lambda sequence, budget: [1, 4, 2][:budget]
    )
    sequences = [greedy(p, drafter) for p in PROMPTS[:4] if 4 not in p]
    for sequence in sequences:
        sequence.traced = True
    assert run(engine, sequences, steps=200) == want
    for one in (one for s in sequences for one in s.trace):
        assert all(math.isfinite(x) for x in [*one.p, *one.q, one.next_p])
        assert one.discarded == (one.emitted == 0)
    given_up = any(turn.drafted and not turn.emitted for s in sequences for turn in s.rounds)
    assert given_up == (drafter not in ("lookup", "suffix", "mapped", "retokenize"))


def test_a_drafter_with_nonfinite_logits_is_reset_once_and_then_dropped() -> None:
    def engine_of(**broken: Any) -> CheckedEngine:
        engine = make_engine(TARGET, DRAFT, Fixed(3), rows=1)
        model: Any = engine.drafters["draft-model"]
        model.draft_pass = DraftPass(Tabular(DRAFT, **broken))  # type: ignore[arg-type]
        return engine

    engine = engine_of(fatal=0, patience=4)
    bad = greedy((0, 1), "draft-model")
    assert run(engine, [bad]) == [reference(bad.prompt)]
    assert bad.drafters == ()
    assert bad.finish is Finish.LENGTH
    heir = greedy((1, 0), "draft-model")
    assert run(engine, [heir]) == [reference(heir.prompt)]
    assert sum(turn.drafted for turn in heir.rounds) > 12
    # NaN of an earlier sequence in its row is no second fault
    engine = engine_of()
    engine.check = lambda: None  # type: ignore[method-assign]  # it would find the damage first
    engine.drafters["draft-model"].caches[0].data[:, 0, 40:] = float("nan")  # type: ignore[index]
    heir = greedy((1, 0), "draft-model")
    assert run(engine, [heir]) == [reference(heir.prompt)]
    assert heir.drafters == ("draft-model",)
    assert heir.drafter_faults == 1


@pytest.mark.parametrize("policy", [Fixed(3), TargetConfidence(3)], ids=lambda p: f"{p.name}")
@pytest.mark.parametrize("drafter", ["layer-skip", "early-exit", "low-bit"])
def test_a_target_with_nonfinite_self_drafts_continues_without_them(drafter: str, policy: Policy) -> None:
    """They wrote in its cache, but past the text, where the verifying pass writes in its turn."""
    engine = make_engine(Tabular(TARGET, drafter_nonfinite=True), DRAFT, policy, rows=3)
    sequences = [greedy(PROMPTS[2], drafter), greedy(PROMPTS[3]), greedy(PROMPTS[4], drafter)]
    assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
    for sequence in sequences[::2]:
        assert (sequence.drafters, sequence.drafter_faults) == ((), 2)
    assert all(turn.emitted for s in sequences for turn in s.rounds), "none was given up"


def test_a_draft_that_broke_off_leaves_no_states() -> None:
    """The second step fails: the next draft must not pass on the states of the first."""
    engine = make_engine(TARGET, DRAFT, Fixed(3), rows=2)
    engine.submit(greedy((0, 1), "early-exit"))
    drafter: Any = engine.drafters["early-exit"]
    passes = itertools.chain((drafter.draft_pass, break_off), itertools.repeat(drafter.draft_pass))
    drafter.draft_pass = StepByStep(lambda *args, **more: next(passes)(*args, **more))
    with pytest.raises(RuntimeError):
        engine.step()
    assert drafter._known._states
    engine.fail_batch("out of memory")
    heir = greedy((1, 2), "early-exit")
    assert run(engine, [heir]) == [reference(heir.prompt)]


def test_an_auxiliary_layer_below_the_resumed_depth_prevents_resuming() -> None:
    engine = make_engine(TARGET, DRAFT, Fixed(3), rows=2)
    low: Any = engine.drafters["script"]
    low.aux_layers, seen = (0,), []
    low.observe = lambda sequence, start, states: seen.append(start)
    forward = engine.target.forward

    def check(*args: Any, resume: Any = None, aux_layers: Any = (), **more: Any) -> Any:
        assert resume is None or min(aux_layers, default=resume.depth) >= resume.depth
        made = forward(*args, resume=resume, aux_layers=aux_layers, **more)
        return replace(made, aux_states={**made.aux_states, 0: made.hidden})

    engine.target.forward = check  # type: ignore[method-assign]
    engine.target.prefill = lambda cache, row, tokens, start, aux_layers=(): engine.target.forward(  # type: ignore[method-assign]
        cache, torch.tensor([tokens]), [start], first_row=row, aux_layers=aux_layers
    )
    sequences = [greedy((0, 1), "script"), greedy((1, 2), "aux-states")]
    assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
    assert seen


def test_cancelling_keeps_the_text_and_is_final() -> None:
    engine = make_engine(TARGET, DRAFT, Fixed(3), rows=2)
    sequences = [greedy(p, d) for p, d in zip(PROMPTS, itertools.cycle(DRAFTERS))]
    waiting = sequences[-1]
    for sequence in sequences:
        engine.submit(sequence)
    engine.cancel(waiting)
    assert (waiting.finish, waiting.new_ids) == (Finish.CANCELLED, [])
    for _ in range(2):
        engine.step()
    running = next(s for s in engine.rows.sequences if s.state is State.RUNNING)
    engine.cancel(running)
    assert running.finish is Finish.CANCELLED
    assert running.new_ids == reference(running.prompt)[: len(running.new_ids)]
    rounds_until_done(engine)
    rest = [s for s in sequences if s not in (waiting, running)]
    assert [s.new_ids for s in rest] == [reference(s.prompt) for s in rest]
    for sequence in sequences:
        engine.cancel(sequence)
    assert [s.finish for s in rest] == [Finish.LENGTH] * len(rest), "the end is the end"


def test_a_rollback_across_three_rounds() -> None:
    for drafter in DRAFTERS:
        free = reference((0,), 12)
        ban = LateBan(V, tuple(free[2:6]))
        sequence = greedy((0,), drafter, constraint=ban, max_new_tokens=12)
        engine = make_engine(TARGET, DRAFT, Fixed(0))
        assert run(engine, [sequence], steps=50) == [reference((0,), 12, constraint=LateBan(V, ban.run))]
        assert ban.rollbacks
        assert min(turn.emitted for turn in sequence.rounds) == -3
        assert all(sequence.attempts[p] >= 1 for p in range(3, 7))


class OnlyLast(NoRepeat):
    def mask(self) -> torch.Tensor:
        return torch.arange(self.vocabulary) == self.vocabulary - 1


def test_a_drafter_without_an_allowed_token_is_not_dropped() -> None:
    """A mask may leave it nothing; its own logits are as finite as ever."""
    target, draft = Table(V, 1), Table(V, 2)
    draft.logits[..., V - 1] = -float("inf")
    sequence = request(drafter="draft-model", constraint=OnlyLast(V), temperature=0, max_new_tokens=8)
    assert run(make_engine(target, draft, Fixed(3)), [sequence]) == [[V - 1] * 8]
    assert (sequence.drafters, sequence.drafter_faults) == (("draft-model",), 0)
