"""What drafts would have met along texts of the target: chains, their leaf siblings, and trees.

`Recorder` watches the rounds that an engine decodes by drafts of one length, under any rule. `replay` reads
a written text again and asks, at each of its tokens, how far a chain and an EAGLE-2 tree (Li et al. 2024,
arXiv:2406.16858) would have followed it. The drafter reads the tokens of the text itself, so that a walk
along it meets exactly the rounds of any shape. A leaf sibling is a further choice of the drafter beside a
chain's token, of which nothing is drafted further. Nothing is timed, and no text changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft import LLM
from foredraft.decode.accept import AcceptResult
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import AutoregressiveDrafter
from foredraft.decode.noise import COUPLED, DrawKeys
from foredraft.decode.round_draft import Draft

CHOICES = 4  # of the drafter at each place: the chain's token and three siblings; also a tree's children
BEAM = 4  # nodes of a tree that are drafted further, on each level
SIZES = (3, 5, 7, 9, 11, 15, 23, 31, 47, 59)  # nodes of a tree; EAGLE-2 verifies 59
MISSED = 10**6  # rank of what no shape holds


@dataclass(frozen=True, slots=True)
class Met:
    """How far the drafts from one place of a text would have gone."""

    hits: int  # leading tokens of the longest chain that are the target's
    # P(one of the first m siblings of the first wrong token is the target's), m = 0 to CHOICES - 1
    siblings: tuple[float, ...]
    # by length of a chain, its siblings that the drafter prefers to the right one; None where that is unknown
    order: tuple[int, ...] | None = None
    tree: tuple[tuple[int, ...], ...] | None = None  # by depth, the tokens that a tree of each of SIZES holds


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that two rules keep of one sampled draft, in expectation, by its length; without the next."""

    speculative: tuple[float, ...]
    block: tuple[float, ...]


def _met(choices: Sequence[Sequence[int]], values: Sequence[Sequence[float]], text: Sequence[int]) -> Met:
    """Return what a chain and its siblings met beside the target's tokens.

    `choices` are the drafter's at each place, the chain's token first, with their probabilities.
    """
    longest = len(choices)
    hits = next((j for j in range(longest) if choices[j][0] != text[j]), longest)
    missed = (0.0,) * CHOICES
    if hits == longest:
        return Met(hits, missed, (MISSED,) * (longest + 1))
    right = text[hits]
    rank = choices[hits].index(right) if right in choices[hits] else MISSED
    siblings = tuple(float(rank <= m) for m in range(CHOICES))
    if rank == MISSED:
        return Met(hits, siblings, (MISSED,) * (longest + 1))
    before, ranked = 1.0, list[tuple[int, float]]()  # (place, value) of every sibling
    for place in range(longest):
        ranked += [(place, before * value) for value in values[place][1:]]
        if place == hits:
            own = before * values[place][rank]
        before *= values[place][0]
    order = [
        sum(value > own for place, value in ranked if place < length) if length > hits else MISSED
        for length in range(longest + 1)
    ]
    return Met(hits, siblings, tuple(order))


class Recorder:
    """Notes what each round of one drafter met, except where the end of a text shortens the draft."""

    def __init__(self, llm: LLM, drafter: str, longest: int) -> None:
        self.engine: Any = llm.loaded.engine
        self.drafter: Any = self.engine.drafters[drafter]
        assert isinstance(self.drafter, AutoregressiveDrafter)
        self.longest = longest
        self.met: list[Met] = []  # by round
        self.sampled: list[Sampled] = []  # by round, under the `speculative` rule
        self._logits: list[Tensor] = []
        self._random = torch.Generator().manual_seed(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all rounds within the context."""
        accept, step, fused = self.engine.accept, self.drafter.step, self.drafter.fused_draft

        def stepped(*arguments: Any) -> Tensor:
            logits: Tensor = step(*arguments)
            self._logits.append(logits[0])
            return logits

        def judged(
            draft: Draft, p: Distribution, keys: DrawKeys | None, noise: Any, rules: Any, *more: Any
        ) -> AcceptResult:
            verdict: AcceptResult = accept(draft, p, keys, noise, rules, *more)
            if int(draft.lengths[0]) == self.longest:
                self._note(draft, p, keys, verdict, rules[0] == "coupled")
            self._logits = []
            return verdict

        self.engine.accept, self.drafter.step = judged, stepped
        self.drafter.fused_draft = lambda inputs: None
        try:
            yield
        finally:
            self.engine.accept, self.drafter.step, self.drafter.fused_draft = accept, step, fused

    def _note(
        self, draft: Draft, p: Distribution, keys: DrawKeys | None, verdict: AcceptResult, coupled: bool
    ) -> None:
        if p.probs is None:
            assert p.ids is not None
            q = torch.stack(self._logits).softmax(-1)
            top = q.topk(CHOICES)
            self.met.append(_met(top.indices.tolist(), top.values.tolist(), p.ids[0].tolist()))
            return
        assert keys is not None and draft.q.probs is not None
        q = draft.q.probs[0]
        if coupled:
            bits = keys.bits(COUPLED)[:1]
            text = keys.vocab_ops.gumbel_argmax(p.probs[:1], bits)[0].tolist()
            choices, left = [], q.clone()
            for _ in range(CHOICES):  # the race without its winner is the race for the next place
                choices.append(keys.vocab_ops.gumbel_argmax(left[None], bits[:, : self.longest])[0])
                left.scatter_(1, choices[-1][:, None], 0.0)
            order = torch.stack(choices, 1)
            self.met.append(_met(order.tolist(), q.gather(1, order).tolist(), text))
            return
        accepted = int(verdict.accepted[0])
        siblings = (0.0,) * CHOICES
        if accepted < self.longest:
            siblings = self._without_replacement(
                p.probs[0, accepted], q[accepted], int(draft.tokens[0, accepted])
            )
        self.met.append(Met(accepted, siblings))
        self.sampled.append(_kept(draft.tokens[0], p.probs[0], q))

    def _without_replacement(self, p: Tensor, q: Tensor, token: int) -> tuple[float, ...]:
        """Return the probability that recursive rejection keeps one of the next m choices, m = 0, 1, ..."""
        p, q = p.double(), q.double()
        found, kept = [0.0], 0.0
        for _ in range(CHOICES - 1):
            p, q = (p - q).clamp_min(0.0), q.clone()
            q[token] = 0.0
            if not (p.sum() > 0 and q.sum() > 0):
                found.append(kept)
                continue
            p, q = p / p.sum(), q / q.sum()
            kept += (1 - kept) * float(torch.minimum(p, q).sum())
            found.append(kept)
            rejected = (q - p).clamp_min(0.0)
            if rejected.sum() > 0:
                token = int(torch.multinomial(rejected, 1, generator=self._random))
        return tuple(found)


def _kept(tokens: Tensor, p: Tensor, q: Tensor) -> Sampled:
    """Return what both rules keep of a draft [K], in expectation, cut after each of its tokens."""
    ratios = (p[: len(tokens)].gather(1, tokens[:, None]) / q.gather(1, tokens[:, None]))[:, 0].tolist()
    speculative, block = [0.0], [0.0]
    alone, together = 1.0, 1.0
    for ratio in ratios:
        alone *= min(1.0, ratio)
        together = min(1.0, together * ratio)
        speculative.append(speculative[-1] + alone)
        block.append(block[-1] + together)
    return Sampled(tuple(speculative), tuple(block))


@torch.inference_mode()
def replay(llm: LLM, drafter: str, prompt: Sequence[int], text: Sequence[int], longest: int) -> list[Met]:
    """Return what drafts met at each token of a text that has `longest` more tokens after it.

    Row BEAM is the chain's; the others read a level of the tree. Every row reads its path anew.
    """
    loaded: Any = llm.loaded
    own = loaded.engine.drafters[drafter]
    reader = own.draft_pass.runner if own.whole_model else loaded.runner
    tokens = [*prompt, *text]
    cache = loaded.runner.new_cache(BEAM + 1, len(tokens) + 2 * longest)
    if own.whole_model:
        cache = reader.new_cache(BEAM + 1, len(tokens) + 2 * longest)
    _read(reader, cache, tokens[: len(prompt) - 1], 0)
    found = []
    for base in range(len(prompt) - 1, len(tokens) - longest - 1):
        ahead = tokens[base + 1 :]
        found.append(_grown(own.draft_pass, cache, tokens[base], base, ahead, longest))
        _read(reader, cache, tokens[base : base + 1], base)
    return found


def _read(reader: Any, cache: Any, tokens: Sequence[int], start: int) -> None:
    """Have every row read tokens from a position on."""
    for at in range(0, len(tokens), 8):
        part = torch.tensor([tokens[at : at + 8]]).expand(BEAM + 1, -1).contiguous()
        reader.forward(cache, part, [start + at] * (BEAM + 1))


def _grown(draft_pass: Any, cache: Any, pending: int, base: int, ahead: Sequence[int], longest: int) -> Met:
    """Return what the chain and the tree after one pending token met."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # paths and log-probabilities
    chain: tuple[int, ...] = ()
    pool: list[tuple[tuple[int, ...], float]] = []
    choices, values = [], []
    depths: list[tuple[int, ...]] = []
    for depth in range(1, longest + 1):
        paths = [path for path, _ in frontier]
        rows = [*paths, *[paths[0]] * (BEAM - len(paths)), chain]
        read = torch.tensor([[pending, *path] for path in rows])
        forward = draft_pass(cache, read, [base] * len(rows))
        logs = forward.logits[:, -1].log_softmax(-1)
        top = logs.topk(CHOICES)
        tokens, chances = top.indices.tolist(), top.values.tolist()
        level = [
            ((*path, token), value + chance)
            for row, (path, value) in enumerate(frontier)
            for token, chance in zip(tokens[row], chances[row], strict=True)
        ]
        choices.append(tokens[-1])
        values.append([math.exp(chance) for chance in chances[-1]])
        chain = (*chain, tokens[-1][0])
        pool += level
        frontier = sorted(level, key=lambda node: -node[1])[:BEAM]
        depths.append(_followed(pool, ahead, depth))
    met = _met(choices, values, ahead)
    return Met(met.hits, met.siblings, met.order, tuple(depths))


def _followed(
    pool: Sequence[tuple[tuple[int, ...], float]], ahead: Sequence[int], depth: int
) -> tuple[int, ...]:
    """Return how many tokens of the text a tree of each of SIZES holds: the likeliest nodes of the pool."""
    known = dict(pool)
    along = [known.get(tuple(ahead[:n]), -math.inf) for n in range(1, depth + 1)]
    ranks = [sum(value > own for _, value in pool) if own > -math.inf else MISSED for own in along]
    return tuple(next((n for n, rank in enumerate(ranks) if rank >= size), depth) for size in SIZES)
