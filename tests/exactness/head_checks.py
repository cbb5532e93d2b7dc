"""What the suites of drafters with a head or an adapter check alike, on real forwards and on targets of few words."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.decode import drafting
from foredraft.decode.policy import Fixed, Policy
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.lookup import Lookup
from tests.exactness import test_conformance as conformance
from tests.exactness.test_bits import steps_of
from tests.exactness.test_enumeration import case, check_law
from tests.parity import test_heads as heads
from tests.support import coded
from tests.support.caches import held
from tests.support.checkpoints import reference_model
from tests.support.harness import ForkingEngine
from tests.support.head_formats import BLOCKS, FILE_FORMATS
from tests.support.loaded import engine_of

FUSED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"acceptance": "speculative"}, {"top_k": 4, "temperature": 0.7},
)  # fmt: skip


def drafter_of(llm: LLM) -> Any:
    return engine_of(llm).drafters[llm.default_drafter or ""]


def check_seeds(llm: LLM, kind: str, prompts: list[list[int]], new: int) -> None:
    engine_of(llm).policy = Fixed(4)
    params = [SamplingParams(seed=n, max_new_tokens=new, temperature=0.8) for n in range(len(prompts))]
    want, found = (llm.generate(prompts, [replace(p, drafter=d) for p in params]) for d in ("none", kind))
    assert [output.token_ids for output in found] == [output.token_ids for output in want]
    assert sum(output.stats.accepted for output in found) > new // 2


def check_fused_drafts(llm: LLM, kind: str, prompts: list[list[int]]) -> None:
    """Check that drafts by one call are those of single steps, to the bit, in a batch whose rows end early."""
    by_one_call, size, steps = drafting._fused_draft, llm.loaded.spec.vocab_size, 0

    def compared(*given: Any) -> Any:
        nonlocal steps
        draft, single = by_one_call(*given), drafting._draft_loop(*given, drafting._by_logits(*given))
        if draft is None:  # its first token has nothing to read
            return single
        assert draft.lengths.tolist() == single.lengths.tolist()
        assert draft.tokens.tolist() == single.tokens.tolist()
        if draft.q.probs is not None:
            for row, length in enumerate(draft.lengths.tolist()):
                assert torch.equal(draft.q.dense(size)[row, :length], single.q.dense(size)[row, :length])
        steps += draft.tokens.shape[1]
        return draft

    engine_of(llm).policy = Fixed(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "_fused_draft", compared)
        for more in FUSED:
            params = [
                SamplingParams(seed=n, max_new_tokens=9 + 3 * n, ignore_eos=True, drafter=kind, **more)
                for n in range(len(prompts))
            ]
            llm.generate(prompts, params)
    assert steps > 40


def rows_of(llm: LLM, kind: str, sequence: Any) -> list[Tensor]:
    """Return what a drafter's caches hold of all committed tokens, once it has read those that wait."""
    drafter: Any = engine_of(llm).drafters[kind]
    drafter.settle(sequence)
    row, length = sequence.row, len(sequence.tokens) - 1
    if isinstance(drafter, Eagle3):
        drafter._read(sequence, length)
    assert [cache.lengths[row] for cache in drafter.own] == [length] * len(drafter.own)
    first = int(isinstance(drafter, Eagle3))  # a slot that holds nothing
    return [held(cache, row, length)[..., first * (cache is drafter.cache) :, :] for cache in drafter.own]


def check_caches(llm: LLM, kind: str, policy: Policy, prompts: list[list[int]], new: int) -> None:
    """Check that a drafter's rows hold after rounds what they hold after a prefill of the same text."""
    for cache in engine_of(llm).rows.caches:
        for row in range(cache.rows):  # keys of an earlier text could stand in for missing ones
            cache.zero_row(row)
    engine_of(llm).policy = policy
    batch = [prompts[0], prompts[-1]]
    for prompt in prompts:
        for sequence in steps_of(llm, prompt, kind, new, batch):
            text, grown = list(sequence.tokens), rows_of(llm, kind, sequence)
            rounds = [turn for turn in sequence.rounds if turn.drafted]
        for sequence in steps_of(llm, text, kind, 1, batch):
            for one, other in zip(grown, rows_of(llm, kind, sequence), strict=True):
                shared = min(one.shape[-2], other.shape[-2])
                torch.testing.assert_close(one[..., :shared, :], other[..., :shared, :], rtol=2e-3, atol=2e-4)
        assert any(turn.accepted < turn.drafted for turn in rounds)
        assert policy.max_draft > 1 or any(turn.accepted for turn in rounds)


@functools.cache
def tiny(format: str) -> LLM:
    """A target of few words, few enough to enumerate its outputs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys = {**heads.KEYS, "vocab_size": coded.WORDS, "num_hidden_layers": 2}
        reference_model(**keys).save_pretrained(folder / "target")
        file_format, more = FILE_FORMATS[format], dict[str, Any]()
        if format == "block z-lab":
            more["config"] = {"num_target_layers": None}
            more["section"] = {"target_layer_ids": [0], "mask_token_id": 2}
        elif format in BLOCKS:
            more["config"] = {"aux_hidden_state_layer_ids": [0, 2], "mask_token_id": 2}
        elif file_format.drafter == "eagle3":
            more["config"] = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        draft_vocab = 3 if file_format.draft_vocab or format == "block rnn" else None
        file_format.save(folder / format, format, coded.WORDS, draft_vocab=draft_vocab, **more)
        return heads.load(folder, format, max_batch=8)


def fresh_engine(
    llm: LLM, policy: Policy, *, kind: str | None = None, rows: int = 2, noise: Any = None
) -> ForkingEngine:
    """Return an engine with caches and a drafter of a head, or of an adapter, that saw nothing."""
    loaded: Any = engine_of(llm)
    own, cache = loaded.drafters[kind or llm.default_drafter], loaded.target.new_cache(rows, coded.POSITIONS)
    weights = own.adapter if isinstance(own, Kangaroo) else own.head
    drafters = [Lookup(), type(own)(loaded.target, cache, weights)]
    return ForkingEngine(
        loaded.target, cache, policy, {drafter.name: drafter for drafter in drafters},
        vocabulary=loaded.vocabulary, vocab_ops=loaded.vocab_ops, noise=noise,
    )  # fmt: skip


def check_distribution(made: LLM, transform: str, constraint: Callable[[], Any] | None = None) -> None:
    one = case(transform, drafter_of(made).name, prompt=(3, 1))
    if constraint is not None:
        one = replace(one, constraint=constraint)
    check_law(functools.partial(fresh_engine, made), one, coded.after(made))


@dataclass(frozen=True)
class HeadWorld(conformance.World):
    made: LLM | None = None

    def engine(self) -> ForkingEngine:
        assert self.made is not None
        return fresh_engine(self.made, self.policy(conformance.GAMMA))
