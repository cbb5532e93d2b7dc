"""Snapshots of recurrent states: a text that resumes at one, in memory or on disk, has the bits of one read anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, Output
from foredraft.decode.prefix_cache import Part, PrefixCache
from foredraft.decode.scheduler import Rows
from foredraft.decode.sequence import State
from foredraft.llm.requests import Requests, Submission
from foredraft.loading import options_for
from foredraft.loading.capacity import Capacity
from foredraft.loading.checkpoints import find_target
from foredraft.loading.inspection import inspect_models
from foredraft.model.cache import KVCache
from foredraft.model.recurrent import RecurrentRows
from tests.exactness.test_hybrids import GREEDY, SEEDED, TEXTS, drafts, folder, tokens_of
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, assert_caught, caught_by, replaced
from tests.support.mutations import around, changed

LONG = replace(GREEDY, max_new_tokens=150, logprobs=2)
SHORT = replace(GREEDY, max_new_tokens=20, logprobs=2, drafter="none")


@cache
def loaded(native: bool = True, draft: str | None = None) -> LLM:
    asset: dict[str, Any] = {} if draft is None else {"draft": drafts(draft)}
    return foredraft.load(folder(), device="cpu", max_batch=3, max_length=1000, kernels=native, **asset)


def told(outputs: list[Output]) -> list[Any]:
    return [(each.token_ids, each.logprobs) for each in outputs]


@cache
def banned(native: bool, span: int) -> str:
    """A phrase of so many tokens that plain decoding of the first text writes."""
    llm = loaded(native)
    [plain] = llm.generate(TEXTS[:1], replace(LONG, drafter="none"))
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(plain.token_ids[20 : 20 + span])


def check_rollback(native: bool = True, draft: str | None = None) -> None:
    """Of few tokens, which the log reaches, and of more than it does, once and after a further snapshot."""
    llm = loaded(native, draft)
    for span in (2, 40, 100) if native else (2, 100):
        params = replace(LONG, ban=(banned(native, span),), ban_mode="rollback", drafter="none")
        with replaced(Rows, "keep_snapshot", lambda *given: None):  # each text is read from its beginning
            anew = llm.generate(TEXTS[:2], params)
        assert anew[0].token_ids != llm.generate(TEXTS[:1], replace(LONG, drafter="none"))[0].token_ids
        for drafter in engine_of(llm).drafters if draft else ("none", "lookup"):
            found = llm.generate(TEXTS[:2], replace(params, drafter=drafter, policy="fixed"))
            assert told(found) == told(anew), (span, drafter)


@pytest.mark.parametrize("native", [True, False])
def test_a_ban_takes_back_text(native: bool) -> None:
    check_rollback(native)


@pytest.mark.parametrize("draft", ["hybrid", "attention"])
def test_so_it_does_of_draft_models(draft: str) -> None:
    check_rollback(draft=draft)


def test_a_ban_reads_again_only_what_follows_a_snapshot() -> None:
    llm, reads = loaded(), list[int]()
    params = replace(LONG, ban=(banned(True, 40),), ban_mode="rollback", drafter="none")
    forward, prompt = llm.loaded.runner.forward, tokens_of(3, 300)

    def counted(cache: KVCache, tokens: Any, *given: Any, **more: Any) -> Any:
        reads.append(tokens.shape[1])
        return forward(cache, tokens, *given, **more)

    with replaced(llm.loaded.runner, "forward", counted):
        [output] = llm.generate([llm.encode(TEXTS[0])[0]], params)
    again = sum(read for read in reads if read > 1)
    assert 0 < again < 100 and len(output.token_ids) == 150, prompt


def check_samples(native: bool = True) -> None:
    """At once, after the first, and in the row of one that has ended; and the prompt is read once."""
    llm, prompt = loaded(native), tokens_of(2, 90)
    [alone] = llm.generate([prompt], replace(SEEDED, drafter="none"))
    prefill, reads = llm.loaded.runner.prefill, list[int]()

    def counted(cache: KVCache, row: int, tokens: list[int], *given: Any, **more: Any) -> Any:
        reads.append(len(tokens))
        return prefill(cache, row, tokens, *given, **more)

    with replaced(llm.loaded.runner, "prefill", counted):
        found = llm.generate([prompt], replace(SEEDED, logprobs=1), n=7)
    assert sum(reads) == 89
    with replaced(Requests, "sequences", apart):
        anew = llm.generate([prompt], replace(SEEDED, logprobs=1), n=7)
    assert told(found) == told(anew) and found[0].token_ids == alone.token_ids


def apart(requests: Requests, asked: Any, sequences: Any = Requests.sequences) -> list[Any]:
    made: list[Any] = sequences(requests, asked)
    for each in made:
        each.group = None  # so that each reads the prompt
    return made


@pytest.mark.parametrize("native", [True, False])
def test_samples_share_a_prompt(native: bool) -> None:
    check_samples(native)


TEXT = tokens_of(11, 700)
OTHER = tokens_of(12, 700)


def check_departures(native: bool = True, **more: Any) -> None:
    """Where a text departs from a kept one: in a chunk, at a border, within and after the reply, at once."""
    llm = loaded(native, more.pop("draft", None))
    engine, params = engine_of(llm), replace(SHORT, **more)
    with replaced(engine, "prefix_cache", PrefixCache(1 << 30)):
        [reply] = llm.generate([TEXT[:600]], params)
        whole = [*TEXT[:600], *reply.token_ids]
        places = (620, 619, 610, 600, 599, 598, 512, 511, 300, 256, 40, 0)
        texts = [whole[:at] + OTHER[: 700 - at] for at in (places if native else places[1::4])]
        for text in [*texts, *texts]:
            [found] = llm.generate([text], params)
            with replaced(engine, "prefix_cache", None):
                [cold] = llm.generate([text], params)
            assert told([found]) == told([cold])
            assert bool(found.stats.drafted) == (params.drafter != "none")
        assert engine.prefix_cache.hits == (13030 if native else 2560)


@pytest.mark.parametrize("native", [True, False])
def test_a_text_may_depart_anywhere(native: bool) -> None:
    check_departures(native)


@pytest.mark.parametrize("draft", ["hybrid", "attention"])
def test_so_may_texts_of_draft_models(draft: str) -> None:
    check_departures(draft=draft, drafter="draft-model", policy="fixed")


def test_states_are_kept_at_a_few_ends_alone() -> None:
    """The last border of a prompt, shortly before its end, its end and the reply's; where a second text departs."""
    llm = loaded()
    engine, lengths = engine_of(llm), list[int]()
    with replaced(engine, "prefix_cache", PrefixCache(1 << 30)):
        texts = TEXT[:600], TEXT[:600] + OTHER[:50], TEXT[:300] + OTHER[:400], TEXT[:300] + OTHER[:5]
        for text in texts:
            lengths.append(llm.generate([text], SHORT)[0].cached_tokens)
        ends = sorted(
            part.before.end + len(part.tokens)
            for part in engine.prefix_cache._parts.values()
            if part.kind == "states"
        )
    assert lengths == [0, 599, 0, 256]
    assert ends == [256, 288, 304, 324, 512, 512, 583, 599, 619, 633, 649, 669, 683, 699, 719]


class Jobs:
    """Requests of two clients to few rows: samples, bans that take text back, prompts that begin alike."""

    def __init__(self, llm: LLM, alone: LLM, seed: int) -> None:
        draw, texts = random.Random(seed), [llm.encode(text)[0] for text in TEXTS[1:3]]
        self.llm, self.expected, self.sequences = llm, list[Any](), list[Any]()
        for _ in range(10):
            prompt = draw.choice(texts)[: draw.randrange(1, 330)] + draw.choice(texts)[: draw.randrange(60)]
            params, n = (
                replace(draw.choice([GREEDY, SEEDED]), max_new_tokens=draw.randrange(60, 110), logprobs=1),
                draw.choice([1, 2, 4]),
            )
            if draw.random() < 0.7:
                [plain] = alone.generate([prompt], replace(params, drafter="none"))
                start = draw.randrange(50)
                word = llm.tokenizer.decode(plain.token_ids[start : start + draw.randrange(1, 40)])  # type: ignore[union-attr]
                params = replace(params, ban=(word,) if word else (), ban_mode="rollback")
            self.expected += told(alone.generate([prompt], replace(params, drafter="none"), n=n))
            asked = Submission(
                prompt,
                replace(params, drafter=draw.choice(["none", "draft-model"])),
                n,
                client=draw.choice("ab"),
            )
            self.sequences += llm.requests.sequences(asked)

    def run(self) -> tuple[int, int]:
        """Return how often a text that had begun was read again, and how often one waited without its row."""
        engine, again, parked = engine_of(self.llm), 0, 0
        for each in self.sequences:
            engine.submit(each)
        for step in itertools.count():
            engine.step()
            if step % 9 == 0 and engine.rows.sequences:
                engine.pause(engine.rows.sequences[-1])
            elif step % 9 == 5 or engine.scheduler.stalled:
                for each in self.sequences:
                    engine.resume(each)
            if engine.scheduler.idle:
                break
            again += sum(
                each.state is State.PREFILLING and each.started > 0 for each in engine.rows.sequences
            )
            parked += len(engine.scheduler._parked)
        assert told([self.llm.requests.output(each) for each in self.sequences]) == self.expected
        assert not any(each.snapshots for each in self.sequences)
        return again, parked


@pytest.mark.heavy
@pytest.mark.parametrize(
    "kinds", [("hybrid", "hybrid"), ("hybrid", "attention"), ("attention", "hybrid")], ids="-".join
)
def test_everything_together(kinds: tuple[str, str]) -> None:
    target, draft = (
        folder() if kinds[0] == "hybrid" else drafts("attention"),
        folder(layers=4) if kinds[1] == "hybrid" else drafts("attention"),
    )
    options: dict[str, Any] = {"device": "cpu", "max_length": 900}
    with (
        foredraft.load(target, max_batch=3, policy="fixed", draft=draft, **options) as llm,
        foredraft.load(target, max_batch=1, **options) as alone,
    ):
        engine_of(llm).prefix_cache = PrefixCache(1 << 22)
        counts = [Jobs(llm, alone, seed).run() for seed in (1, 2)]
    assert sum(again for again, _ in counts) > 0 and sum(parked for _, parked in counts) > 0


def test_info_and_the_memory_plan_count_a_snapshot() -> None:
    """As many bytes as are taken where a chunk ends, but for positions."""
    [target] = inspect_models(folder(), device="cpu").models
    llm = loaded()
    with replaced(engine_of(llm), "prefix_cache", PrefixCache(1 << 30)):
        llm.generate([TEXT[:513]], SHORT)
        parts = engine_of(llm).prefix_cache._parts.values()  # type: ignore[union-attr]
        [part] = [
            part for part in parts if part.kind == "states" and (part.before.end, part.tokens) == (512, [])
        ]
    bases, logs, *_ = part.spans[engine_of(llm).cache].states
    assert target.snapshot_bytes == bases.nbytes + logs.nbytes < target.state_bytes
    checkpoint = find_target(options_for(folder(), device="cpu"))
    row = Capacity(checkpoint, (), torch.device("cpu")).row_bytes(512)
    assert row == KVCache.bytes_per_row(checkpoint.spec, 512, checkpoint.dtype) + target.snapshot_bytes


def off(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    bases, logs, at, *rest = parts
    return (bases, logs, at + 1, *rest)


SHARED = [
    ("a token off", RecurrentRows.take, changed(off), (AssertionError, ValueError)),
    ("states of a neighbour", RecurrentRows.take, around(lambda take, rows, row, stop: (take(rows, 1 - row, stop)[0], *take(rows, row, stop)[1:]))),
    ("an old window", RecurrentRows.take, changed(lambda parts: (parts[0], parts[1].roll(1, 1), *parts[2:]))),
]  # fmt: skip
DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_departures: [
        *SHARED,
        ("a token is shared that is not", Part.shared, changed(lambda end: end + 1)),
        ("a part of a chunk is whole", Part.shared, around(lambda _, part, tokens: part.before.end + len(part.tokens))),
        ("a text's end has the states of its chunk's", PrefixCache._parts_after, changed(lambda parts: parts[:1])),
        ("states of another end", KVCache.take, around(lambda take, kept, row, start, stop, **more: replace(take(kept, row, start, stop, **more), base=0))),
        ("keys and values end early", KVCache.take, around(lambda take, kept, row, start, stop, **more: replace(take(kept, row, start, max(start, stop - 1), **more), stop=stop))),
    ],
    check_samples: [
        *SHARED,
        ("samples go on from the donor's states", Rows.cut, around(lambda _, rows, sequence, length: setting(rows, sequence.row, length)), (AssertionError, ValueError)),
    ],
    check_rollback: [
        *SHARED,
        ("states stay behind the cut", Rows.cut, around(lambda _, rows, sequence, length: setting(rows, sequence.row, length)), (AssertionError, ValueError)),
        ("a snapshot from behind the cut", Rows.cut, around(lambda cut, rows, sequence, length: cut(rows, sequence, length + 64)), (AssertionError, ValueError)),
        ("the rest is not read again", Rows.cut, around(lambda cut, rows, sequence, length: (cut(rows, sequence, length), setting(rows, sequence.row, length))), (AssertionError, ValueError)),
    ],
}  # fmt: skip


def setting(rows: Rows, row: int, length: int) -> None:
    for kept in rows.caches:
        kept.lengths[row] = length


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
