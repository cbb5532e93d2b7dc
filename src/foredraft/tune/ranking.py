"""Plans without search: where a search begins, and what it must beat.

- `every_other`: every second layer, whole;
- `greedy`: sub-layers by how little leaving each one out alone changes the states before the head;
- `clasp`: the dynamic programme of CLaSp (Chen et al. 2025, arXiv:2505.24196) over a few drafts' columns:

      D(i, j) = max(cos(h_i, g(i-1, j-1)),  cos(h_i, f_i(g(i-1, j))))

  where j of the first i sub-layers are left out, g(i, j) are the states of the better choice, f_i is the i-th
  sub-layer, and h_i is what the target has there. CLaSp does it for the last token of each round; here, once,
  the cosine's mean over columns decides.

Contract: sub-layers are numbered in the order in which they run: 2i is layer i's attention, 2i + 1 its MLP.
What comes back are, for a number of sub-layers, which to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.skips import Skips
from foredraft.model.decoder import Plan
from foredraft.model.runner import Resume
from foredraft.tune.teacher_forced import Block, TeacherForced

__all__ = ["clasp", "every_other", "greedy", "skips_of", "sub_layers_run"]

COLUMNS = 256  # that a plan is ranked on

Told = Callable[[int], None]  # through how many sub-layers the columns went


def _untold(count: int) -> None:
    return None


def skips_of(sub_layers: Iterable[int]) -> Skips:
    """By number -> by layer."""
    chosen = sorted(sub_layers)
    return Skips(tuple(i // 2 for i in chosen if i % 2 == 0), tuple(i // 2 for i in chosen if i % 2))


def every_other(layers: int) -> Skips:
    odd = tuple(range(1, layers, 2))
    return Skips(odd, odd)


def sub_layers_run(layers: int, most: int) -> int:
    """Through how many the columns go in `greedy` and in `clasp`, together."""
    numbers = range(2 * layers)
    return 2 * layers * (1 + len(numbers)) + sum(1 + min(number + 1, most + 1) for number in numbers)


@torch.inference_mode()
def greedy(teacher: TeacherForced, told: Told = _untold) -> list[int]:
    """All sub-layers, the one that changes least first."""
    sample = _Sample(teacher)
    layers = sample.layers
    whole = sample.run(sample.entering, 0, layers, Plan.full(layers))
    told(2 * layers)
    change = []
    for number in range(2 * layers):
        plan = skips_of([number]).plan(layers)
        change.append(1 - sample.cosine(whole, sample.run(sample.entering, 0, layers, plan)))
        told(2 * layers)
    return sorted(range(2 * layers), key=change.__getitem__)


@torch.inference_mode()
def clasp(teacher: TeacherForced, most: int, told: Told = _untold) -> list[tuple[int, ...]]:
    """For 0, 1, ..., `most` sub-layers: which to leave out."""
    sample = _Sample(teacher)
    target = sample.entering  # h_i
    states = [target]  # g(i, j) by j
    left_out: list[tuple[int, ...]] = [()]
    for number in range(2 * sample.layers):
        target = sample.sub_layer(target, number)
        ran = [sample.sub_layer(state, number) for state in states]
        made: list[Tensor] = []
        chosen: list[tuple[int, ...]] = []
        for count in range(min(len(states) + 1, most + 1)):
            kept = sample.cosine(target, ran[count]) if count < len(states) else -2.0
            skipped = sample.cosine(target, states[count - 1]) if count else -2.0
            better = skipped > kept
            made.append(states[count - 1] if better else ran[count])
            chosen.append((*left_out[count - 1], number) if better else left_out[count])
        told(1 + len(states))
        states, left_out = made, chosen
    return left_out


class _Sample:
    """One draft of each of the first texts, and passes over them from any layer to any other."""

    def __init__(self, teacher: TeacherForced) -> None:
        self.runner, self.cache = teacher.runner, teacher.cache
        self.layers = self.runner.decoder.spec.layers
        rows = max(1, min(len(teacher.texts), COLUMNS // teacher.longest))
        whole = teacher.blocks([0] * len(teacher.texts))[:rows]
        blocks: list[Block] = [own[len(own) // 2] for own in whole]  # away from both ends
        self.tokens, self.starts = teacher.inputs(blocks)
        self.counts = [count for _, _, count in blocks]
        width = self.tokens.shape[1]
        device = self.tokens.device
        self.real = torch.arange(width, device=device) < torch.tensor(self.counts, device=device)[:, None]
        self.entering = self.runner.decoder.embed(self.tokens)  # [B, T, D]
        teacher.restore()

    def run(self, hidden: Tensor, start: int, stop: int, plan: Plan) -> Tensor:
        """States entering layer `start` -> states entering layer `stop`, [B, T, D] both."""
        known = [self.tokens.shape[1]] * len(self.starts)
        return self.runner.forward(
            self.cache, self.tokens, self.starts, counts=self.counts, plan=plan, stop=stop,
            resume=Resume(start, hidden, known), want_logits=False, exact=False,
        ).hidden  # fmt: skip

    def sub_layer(self, hidden: Tensor, number: int) -> Tensor:
        """States before a sub-layer -> states after it."""
        layer, is_mlp = divmod(number, 2)
        only = tuple(index == layer for index in range(self.layers))
        none = (False,) * self.layers
        return self.run(hidden, layer, layer + 1, Plan(none, only) if is_mlp else Plan(only, none))

    def cosine(self, a: Tensor, b: Tensor) -> float:
        """The mean over all columns."""
        return float(F.cosine_similarity(a[self.real].float(), b[self.real].float(), dim=-1).mean())
