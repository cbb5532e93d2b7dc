"""Engines whose rounds are checked: over tabular models, before and after each round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.accept import Rule
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.round_draft import AcceptResult, Draft, RoundInputs, choices_of
from foredraft.decode.sequence import Sequence, State
from foredraft.drafters.asset import AssetSearch, Found, Parts
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.lookup import Lookup, PredictedOutputs
from foredraft.drafters.plan_files import Skips
from foredraft.kinds.compatibility import asset_options
from foredraft.kinds.tables import DRAFTERS as KINDS
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.runner import Forward
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec
from tests.support import parts
from tests.support.forking import PREDICTED, ForkingNoise
from tests.support.tabular import Table, Tabular, TokenCache
from tests.support.vocab_ops_choice import PRESENT

CPU = torch.device("cpu")
# The drafters of a tabular engine, and plain steps. Those that run models or parts of the target run tabular ones here.
DOUBLES = (None, "draft-model", "looping", "aux-states", "script", "lookup", "suffix", "recalling", "mapped")
DOUBLES += ("retokenize", "layer-skip", "early-exit", "low-bit")
# "aux-states" does as "kangaroo" and the heads do; "gemma4-assistant" has tests of its own, over real targets
OF_HEADS = {"kangaroo", "eagle3", "p-eagle", "eagle", "mtp", "medusa", "dflash", "dspark", "gemma4-assistant"}
DOUBLED = {*DOUBLES, *OF_HEADS, "prediction"}
TABLE = tuple(name for name, kind in KINDS.items() if kind.asset is not None and name not in DOUBLED)
DRAFTERS = (*DOUBLES, *TABLE)
CONFIG: dict[str, Any] = {  # of a model of the size of a table, for drafters that look at one
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


class ForkingEngine(Engine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if not isinstance(self.noise, ForkingNoise):
            return
        self.accept = self._judged(self.accept)
        for drafter in self.drafters.values():
            if isinstance(drafter, AutoregressiveDrafter):
                drafter.expect = self._expected(drafter.expect)
                drafter.step = self._noted(drafter.step)

    def _inputs(self, policy: Policy) -> RoundInputs:
        self.inputs = super()._inputs(policy)
        return self.inputs

    def _judged(self, accept: Rule) -> Rule:
        def judged(draft: Draft, *rest: Any) -> AcceptResult:
            verdict = accept(draft, *rest)
            if draft.siblings is not None:
                self.noise.idle = (draft.siblings.written(verdict) < 0).tolist()
            return verdict

        return judged

    def _expected(self, expect: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        def expected(budgets: list[int]) -> None:
            self.steps = 0
            expect(budgets)

        return expected

    def _noted(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(tokens: Tensor, starts: Any, counts: Any, idle: list[bool], at: Any) -> Tensor:
            self.noise.idle, self.noise.choices = list(idle), []
            for budget, siblings in zip(self.inputs.budgets, self.inputs.siblings, strict=True):
                further = choices_of([budget], [siblings])
                self.noise.choices.append(1 + sum(further[self.steps : self.steps + 1]))
            self.steps += 1
            return step(tokens, starts, counts, idle, at)

        return noted

    def _verify(self, inputs: RoundInputs, draft: Draft) -> Forward:
        lengths = draft.lengths.tolist()
        assert all(length <= budget for length, budget in zip(lengths, inputs.budgets, strict=True))
        for sequence, idle in zip(inputs.sequences, inputs.idle, strict=True):
            assert idle or self.cache.lengths[sequence.row] == len(sequence.tokens) - 1, "a draft moves none"
        if isinstance(self.noise, ForkingNoise):
            self.noise.lengths, self.noise.idle, self.noise.choices = lengths, inputs.idle, []
        beyond = torch.arange(draft.tokens.shape[1]) >= draft.lengths[:, None]
        assert not draft.tokens[beyond].any(), "padded with 0"
        check_siblings(inputs, draft)
        return super()._verify(inputs, draft)


def check_siblings(inputs: RoundInputs, draft: Draft) -> None:
    """The choices at a place are distinct, and no row has more siblings than the policy allows, nor beyond its draft."""
    if draft.siblings is None:
        return
    rows = zip(draft.siblings.tokens.tolist(), draft.siblings.places.tolist(), strict=True)
    for row, (tokens, places) in enumerate(rows):
        drafted = draft.tokens[row, : draft.lengths[row]].tolist()
        own = [(place, token) for place, token in zip(places, tokens, strict=True) if token >= 0]
        choices = [*enumerate(drafted), *own]
        assert len(set(choices)) == len(choices), "a choice stands twice at its place"
        assert all(place < len(drafted) for place, _ in own)
        assert len(own) <= inputs.siblings[row]


class CheckedEngine(ForkingEngine):
    def round(self) -> list[Sequence]:
        self.check()
        done = super().round()
        self.check()
        return done

    def check(self) -> None:
        rows = self.rows.sequences
        assert len(rows) <= self.rows.capacity
        for row, sequence in enumerate(rows):
            assert sequence.row == row
            if sequence.state is not State.RUNNING:
                continue
            length = len(sequence.tokens) - 1
            assert self.cache.lengths[row] == length, "the last token is pending, and nothing else"
            assert len(sequence.origins) == len(sequence.new_ids)
            _check_row(self.cache, row, sequence.tokens[:length])
            if sequence.constraint is not None:
                assert sequence.constraint.length == len(sequence.new_ids)
            for name in sequence.drafters:
                drafter = self.drafters[name]
                vocabulary = getattr(drafter, "vocabulary", None)
                first = drafter.context_start(sequence)
                for cache in drafter.caches:
                    assert first + cache.lengths[row] <= length
                    tokens = sequence.tokens[first : first + cache.lengths[row]]
                    if vocabulary is not None:
                        tokens = [vocabulary.draft_ids[token] for token in tokens]
                    _check_row(cache, row, tokens)
        own: Any = self.drafters["retokenize"]
        for row, tokens in enumerate(own._rows):  # its rows are its own affair
            _check_row(own.cache, row, tokens)
        assert not any(length for cache in self.rows.caches for length in cache.lengths[len(rows) :])
        assert not self.target.poisoned, "the target read a position that was never written"


def _check_row(cache: TokenCache, row: int, tokens: list[int]) -> None:
    assert (cache.data[:, row, : len(tokens)] == tokens).all(), "the cache holds the text"


def make_engine(
    target: Table | Tabular,
    draft: Table | None = None,
    policy: Policy | None = None,
    *,
    rows: int = 4,
    positions: int = 64,
    noise: Any = None,
    greedy_drafts: bool = False,
    forgetful: bool = False,
    script: Callable[[Sequence, int], list[int]] | None = None,
) -> CheckedEngine:
    model = target if isinstance(target, Tabular) else Tabular(target)
    draft = draft or model.table
    model.skipping = draft
    cache = model.new_cache(rows, positions)
    kinds = [
        DraftModel(Tabular(draft), rows, positions),
        parts.looping(draft, rows, positions),
        parts.AuxStateStepper(model, cache, draft, forgetful=forgetful),
        parts.ScriptedGuesser(script or parts.arbitrary(model.vocabulary)),
        Lookup(2),
        parts.suffix(model.vocabulary),
        parts.recalling(model.vocabulary),
        PredictedOutputs(),
        parts.mapped(draft, rows, positions),
        parts.retokenize(draft, rows, positions),
        LayerSkip(model, cache, Skips(attention=(0,))),
        parts.renamed(LayerSkip(model, cache, Skips(exit=1)), "early-exit"),
        parts.low_bit(model, cache, draft),
        *(of_the_table(name, model, cache, rows, positions) for name in TABLE),
    ]
    options = {"vocab_ops": PRESENT, "noise": noise, "greedy_drafts": greedy_drafts}
    drafters = {kind.name: kind for kind in kinds}
    return CheckedEngine(model, cache, policy or Fixed(3), drafters, vocabulary=model.vocabulary, **options)


def of_the_table(name: str, target: Tabular, cache: TokenCache, rows: int, positions: int) -> Drafter:
    asset = KINDS[name].asset
    spec = ModelSpec.from_hf({**CONFIG, "vocab_size": target.vocabulary})
    search = AssetSearch(
        target=Checkpoint(ModelSource(Path("tabular")), spec, None, torch.float32),
        device=CPU,
        options=dict.fromkeys(asset_options()),
        read_draft=lambda: pytest.fail("there is no draft model"),
        free_memory=lambda: 2**40,
    )
    found = asset().find(search)
    assert isinstance(found, Found), f"{name} {found.problem}; give it a double in DOUBLES and `make_engine`"
    return found.make(Parts(target=target, cache=cache, rows=rows, positions=positions))


_ids = itertools.count()


def request(prompt: Iterable[int] = (0,), drafter: str | None = None, **options: Any) -> Sequence:
    names = {"sample", "eos", "constraint", "group", "client", "drafters", "prediction"} & options.keys()
    own = {name: options.pop(name) for name in names}
    number, params = next(_ids), SamplingParams(**options)
    if drafter is not None:
        own.setdefault("drafters", (drafter,))
    own.setdefault("prediction", PREDICTED)
    return Sequence(number, list(prompt), params, number if params.seed is None else params.seed, **own)


def run(engine: Engine, sequences: list[Sequence], steps: int = 5_000) -> list[list[int]]:
    for sequence in sequences:
        engine.submit(sequence)
    for _ in range(steps):
        if engine.scheduler.idle:
            break
        engine.step()
    assert all(sequence.state is State.FINISHED for sequence in sequences), "it never ends"
    return [sequence.new_ids for sequence in sequences]


def rounds_until_done(engine: Engine) -> int:
    count = 0
    while not engine.scheduler.idle:
        engine.step()
        count += 1
        assert count < 5_000
    return count
