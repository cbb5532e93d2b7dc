"""Drafters, constraints and policies that put the protocols to the test. None is meant to be fast or useful."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
from torch import Tensor

from foredraft.decode.constraint import Constraint
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter, ModelFreeDrafter, Peek
from foredraft.decode.policy import Candidates, Decision, Policy, Signal
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.drafters.draft_model import DraftModel, VocabularyMap
from foredraft.drafters.layer_skip import LowBit
from foredraft.drafters.recent_texts import RecentTexts, Suffix, TextsFile
from foredraft.drafters.retokenize import Retokenize
from foredraft.model.runner import Resume
from foredraft.model.tokenizer import Tokenizer
from tests.support.tabular import DEPTH, WIDTH, Table, Tabular, TokenCache


def renamed(drafter: Any, name: str) -> Any:
    drafter.name = name
    return drafter


def looping(table: Table, rows: int, positions: int) -> DraftModel:
    """The shipped draft model over a tabular one, where a draft is one call."""
    return renamed(DraftModel(Tabular(table, loops=True), rows, positions), "looping")


def mapped(table: Table, rows: int, positions: int) -> DraftModel:
    """The same behind other ids: each is one further on, the target's last is lacking, and the first is extra."""
    size = table.vocabulary
    pairs = [(id, id + 1) for id in range(size - 1)]
    vocabulary = VocabularyMap(pairs, (size, size), 0, torch.device("cpu"))
    return renamed(DraftModel(Tabular(table), rows, positions, vocabulary), "mapped")


def retokenize(table: Table, rows: int, positions: int) -> Retokenize:
    """The shipped one, over a tabular model and two tokenizers of a few letters that cut a text differently."""
    model = Tabular(table)
    model.decoder.device = torch.device("cpu")
    size = table.vocabulary
    target = letters(size, ["ab", "ca", "abc", "bb"], special=size - 1)
    draft = letters(size, ["bc", "ba", "aa", "bca"], special=0)
    return Retokenize(model, rows, 4 * positions, target, draft)


def letters(size: int, merged: list[str], special: int) -> Tokenizer:
    """`size` tokens: one special, the letters a to c or as many more as fit, and merged ones as far as they go."""
    alphabet = string.ascii_letters + string.digits + string.punctuation
    pieces = [*alphabet[: max(3, size - 1 - len(merged))], *merged][: size - 1]
    pieces.insert(special, "<s>")
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [(piece[:-1], piece[-1]) for piece in pieces if piece in merged]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner)


class StepByStep:
    """A draft pass that is this function, without a fused draft."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.step(*args, **more)

    def fused(self, *args: Any) -> None:
        return None


def suffix(vocabulary: int) -> Suffix:
    """The shipped one without memory: what a request wrote would change the drafts of later paths."""
    return Suffix(RecentTexts(0), TextsFile(None, None, vocabulary))


def recalling(vocabulary: int) -> Suffix:
    """The same, with texts that stay as they are."""
    return renamed(Suffix(Planted(vocabulary), TextsFile(None, None, vocabulary)), "recalling")


class Planted(RecentTexts):
    """Two texts with most runs of three tokens, which go on in several ways."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(1 << 20)
        draw = random.Random(vocabulary)
        for _ in range(2):
            super().add(b"", [draw.randrange(vocabulary) for _ in range(min(3 * vocabulary**3, 400))])

    def add(self, scope: bytes, tokens: Seq[int]) -> None:
        """Keep nothing."""


def low_bit(target: Tabular, cache: TokenCache, table: Table) -> LowBit:
    """The shipped one, over a tabular copy that is as sick as the target."""
    sick = {"venom": target.venom, "drafter_nonfinite": target.drafter_nonfinite}
    return LowBit(Tabular(table, coded=True, **sick), cache)


class AuxStateStepper(AutoregressiveDrafter):
    """Drafts from the target's own lower level, and from an adapter that reads its auxiliary states.

    It hands on the states that the verifying pass resumes from, fewer than it has if it is `forgetful`, and asserts that
    every committed position comes exactly once and in order.
    """

    name = "aux-states"
    aux_layers = (DEPTH,)

    def __init__(self, target: Tabular, cache: TokenCache, table: Table, *, forgetful: bool = False) -> None:
        self.target, self.target_cache = target, cache
        self.adapter = Tabular(table)
        self.cache = self.adapter.new_cache(cache.rows, cache.positions)
        self.caches = (self.cache,)
        self.forgetful = forgetful
        self.joined: set[int] = set()
        self.observed = 0
        self._states: list[Tensor] = []  # of this round's steps, [B, 1, WIDTH] each
        self._known: list[int] = []

    def length(self, sequence: Sequence) -> int:
        return self.cache.lengths[sequence.row]

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        assert self.cache.lengths[sequence.row] >= stop, "it is never behind: the states feed it"

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor
    ) -> Tensor:
        assert tokens.shape[1] == 1
        assert counts == [1] * len(counts)
        if not self._states:
            self._known = [0] * len(starts)
        states = self.target.lower(self.target_cache, tokens, starts, idle, counts)
        self._states.append(states)
        self._known = [known + (not dummy) for known, dummy in zip(self._known, idle, strict=True)]
        forward = self.adapter.forward(self.cache, tokens, starts, idle=idle, counts=counts)
        return forward.logits[:, 0]

    def resume(self) -> Resume | None:
        if not self._states:  # a round broke off after the draft
            return None
        known = self._known
        if self.forgetful:
            known = [random.Random(f"{k} {b} {self.observed}").randint(0, k) for b, k in enumerate(known)]
        unknown = torch.full_like(self._states[0], float("nan"))  # must not be read
        hidden = torch.cat([*self._states, unknown], 1)  # the last token drafted was never read
        assert hidden.shape[2] == WIDTH
        self._states = []
        return Resume(DEPTH, hidden, known)

    def join(self, sequence: Sequence) -> None:
        assert sequence.id not in self.joined
        self.joined.add(sequence.id)
        assert self.length(sequence) == len(sequence.prompt) - 1, "the whole prompt was observed, or copied"

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        row, seen = sequence.row, states[DEPTH]
        assert self.cache.lengths[row] == start, "committed positions come once and in order"
        stop = start + len(seen)
        assert seen[:, 0].tolist() == sequence.tokens[start:stop]
        assert not seen[:, 3].any()
        self.cache.data[:, row, start:stop] = seen[:, 0].numpy()
        self.cache.lengths[row] = stop
        self.observed += len(seen)

    def rewind(self, sequence: Sequence) -> None:
        row = sequence.row
        self.cache.lengths[row] = min(self.cache.lengths[row], len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        self.joined.discard(sequence.id)


class ScriptedGuesser(ModelFreeDrafter):
    """Proposes the tokens that a function of the text gives, with a confidence that the text decides."""

    def __init__(self, script: Callable[[Sequence, int], list[int]], name: str = "script") -> None:
        self.script, self.name = script, name
        self.lengths: dict[int, int] = {}

    def join(self, sequence: Sequence) -> None:
        self.lengths[sequence.id] = len(sequence.tokens)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        for sequence, _ in requests:
            assert self.lengths.get(sequence.id) == len(sequence.tokens), "every commit is told"
        return [self.script(sequence, budget) for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        (guess,) = self.propose([(sequence, limit)])
        confidence = random.Random(f"sure {sequence.tokens}").choice((0.2, 0.6, 0.9))
        return Peek(min(limit, len(guess)), confidence)

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        raise AssertionError("it reads no states")

    def rewind(self, sequence: Sequence) -> None:
        self.lengths[sequence.id] = len(sequence.tokens)

    def leave(self, sequence: Sequence) -> None:
        self.lengths.pop(sequence.id, None)


def arbitrary(vocabulary: int) -> Callable[[Sequence, int], list[int]]:
    """Any tokens, more than asked for, fewer or none: a function of the text alone."""

    def script(sequence: Sequence, budget: int) -> list[int]:
        dice = random.Random(str(sequence.tokens))
        return [dice.randrange(vocabulary) for _ in range(dice.choice([0, 1, budget, budget + 2]))]

    return script


def foreseeing(
    outputs: Mapping[int, list[int]], right: int, vocabulary: int
) -> Callable[[Sequence, int], list[int]]:
    """Knows each request's output (by id): its next `right` tokens, then wrong ones."""

    def script(sequence: Sequence, budget: int) -> list[int]:
        output = outputs[sequence.id]
        done = len(sequence.tokens) - len(sequence.prompt)
        guess = output[done : done + min(right, budget)]
        while len(guess) < budget:
            place = done + len(guess)
            truth = output[place] if place < len(output) else 0
            guess.append((truth + 1) % vocabulary)
        return guess

    return script


class NoRepeat(Constraint):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def mask(self) -> Tensor | None:
        if not self.tokens:
            return None
        allowed = torch.ones(self.vocabulary, dtype=torch.bool)
        allowed[self.tokens[-1]] = False
        return allowed

    def roll_back(self, length: int) -> None:
        raise AssertionError("it asks for no rollback")

    def settled(self) -> int:
        return len(self.tokens)


class LateBan(Constraint):
    """Bans a run of tokens, finds out only at its last one, takes all of it back, and bars its first token there."""

    takes_back = True

    def __init__(self, vocabulary: int, run: tuple[int, ...]) -> None:
        super().__init__()
        self.vocabulary, self.run = vocabulary, run
        self.barred: dict[tuple[int, ...], set[int]] = {}  # text -> tokens that may not follow it
        self.rollbacks = 0

    def mask(self) -> Tensor | None:
        barred = self.barred.get(tuple(self.tokens))
        return barred and torch.tensor([token not in barred for token in range(self.vocabulary)])

    def advance(self, token: int) -> int:
        length = super().advance(token)
        return length - len(self.run) * (tuple(self.tokens[-len(self.run) :]) == self.run)

    def roll_back(self, length: int) -> None:
        first = self.tokens[length]
        self.rewind(length)
        self.barred.setdefault(tuple(self.tokens), set()).add(first)
        self.rollbacks += 1

    def settled(self) -> int:
        for n in range(min(len(self.run) - 1, len(self.tokens)), 0, -1):
            if tuple(self.tokens[-n:]) == self.run[:n]:
                return len(self.tokens) - n
        return len(self.tokens)


@dataclass(frozen=True)
class StopUnsure(Policy):
    """Stops drafting after a position where q has no probability above `least`: by q alone, not by the draw."""

    max_draft: int
    least: float = 0.5
    name: str = "stop-unsure"
    stops_by_content = True

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        if q.probs is None:
            return q.ids[:, 0] % 2 == position % 2
        return q.probs[:, 0].amax(-1) > self.least


@dataclass(frozen=True)
class RandomBudgets(Policy):
    max_draft: int
    name: str = "random"

    def budget(self, sequence: Sequence) -> int:
        return random.Random(f"{sequence.tokens} {sequence.round_count}").randint(0, self.max_draft)


class Fickle(Policy):
    """Drafts again if the last q but one of its draft was peaked: rejected noise, used again, would be biased."""

    name = "fickle"
    stops_by_content = True

    def __init__(self, max_draft: int, least: float = 0.6) -> None:
        self.max_draft, self.least = max_draft, least

    def __repr__(self) -> str:
        return f"Fickle({self.max_draft})"

    def start(self) -> list[bool]:
        return [True]

    def budget(self, sequence: Sequence) -> int:
        drafts = self.max_draft if sequence.policy_state[0] else 0
        sequence.policy_state[0] = True
        return drafts

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> None:
        if q.probs is None or position != self.max_draft - 2:
            return
        for sequence, top in zip(sequences, q.probs[:, 0].amax(-1).tolist(), strict=True):
            # only a whole draft of a row that is not idle, which does not depend on the other rows
            if sequence.remaining > self.max_draft and top < 1:
                sequence.policy_state[0] = top > self.least


class ArbitraryDecisions(Policy):
    """Decides anything as a function of all that a policy may see: text, draft, and confidence of the target."""

    name = "arbitrary"
    stops_by_content = True

    def __init__(
        self, max_draft: int, seed: int, signal: Signal | None = None, uses_costs: bool = False
    ) -> None:
        self.max_draft, self.seed = max_draft, seed
        self.target_signal, self.uses_costs = signal, uses_costs

    def start(self) -> list[float]:
        return [0.5]

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        decisions = []
        for row in rows:
            sequence = row.sequence
            sure = round(sequence.policy_state[0], 3)
            dice = random.Random(f"{self.seed} {sequence.tokens} {sequence.round_count} {sure}")
            name, budget = dice.choice([None, *row.limits]), dice.randint(0, self.max_draft)
            decisions.append(Decision(name, budget, dice.choice([None, 0, 1, 2, 9])))
        return decisions

    def _chances(self, kind: str, rows: Tensor) -> Tensor:
        keys = [[round(x, 3) for x in row] for row in rows.tolist()]
        return torch.tensor([random.Random(f"{self.seed} {kind} {key}").random() for key in keys])

    def may_draw(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        if random.Random(f"{self.seed} draws {position}").random() < 0.5:
            return None
        return self._chances("draws", logits[:, 0].softmax(-1)) < 0.7

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        if random.Random(f"{self.seed} {position}").random() < 0.3:
            return None
        return self._chances(f"{position}", q.dense(logits.shape[-1])[:, 0] + logits[:, 0].softmax(-1)) < 0.6

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        sequence.policy_state[0] = 0.5 if confidence is None else confidence


class _Unshared(dict[Any, Any]):
    def setdefault(self, kind: Any, default: Any = None) -> Any:
        self[kind] = default
        return default


class SolitaryAuto(Auto):
    _gained = property(lambda self: 0.0, lambda self, ms: None)

    def __init__(self, max_draft: int, table: CostTable) -> None:
        super().__init__(max_draft, table)
        self._pool = _Unshared()

    def took(self, seconds: float) -> None:
        """Learn nothing, so that a path can be replayed."""


def solitary(max_draft: int, drafters: Iterable[str]) -> Auto:
    table = CostTable({1: {1: 1.0, 8: 1.1}}, {name: {1: (0.05, 0.02)} for name in drafters})
    return SolitaryAuto(max_draft, table)
