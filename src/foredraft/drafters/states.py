"""States of the target that drafters read, and the base class of drafters that read them.

A state is addressed by its position, and its row follows the batch's as keys and values do, so that a text
may be cut, copied or parked anywhere. One half of a state lies where keys would, the other where values
would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.decode.drafter import AutoregressiveDrafter, DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import VocabularyMap
from foredraft.model.cache import KVCache
from foredraft.model.memory import on_host, upload
from foredraft.model.runner import FusedDraft, Resume, Runner
from foredraft.model.spec import ModelSpec


def states_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the spec of a cache that holds one state of a size at each position."""
    return replace(spec.plain_layer(), heads=1, kv_heads=1, head_dim=size // 2)


def keep(cache: KVCache, row: int, start: int, states: Tensor) -> None:
    """Store states [n, D] of one row at the positions from `start` on, with which the row ends."""
    one, other = states.view(len(states), 1, 2, -1).permute(2, 1, 0, 3)  # [1, n, D / 2] each
    cache.write(0, row, start, one, other)
    cache.lengths[row] = start + len(states)


def kept(cache: KVCache, rows: int | Tensor, positions: slice | Tensor) -> Tensor:
    """Return the states [n, D] at the positions [n] of a row, or each of a row of its own [n]."""
    return cache.layer(0)[:, rows, 0, positions].transpose(0, 1).flatten(1)


class KnownStates:
    """The states of a draft that enter layer `depth`, of all tokens but the last, which no step reads."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._states: list[Tensor] = []  # [B, steps, D] each
        self._known: list[int] = []  # [B]

    def add(self, states: Tensor, counts: Seq[int]) -> None:
        """Add states [B, steps, D], of which so many of each row [B] are known."""
        self._states.append(states)
        known = self._known or [0] * len(counts)
        self._known = [n + count for n, count in zip(known, counts, strict=True)]

    def add_fused(self, draft: FusedDraft, lengths: Seq[int]) -> None:
        """Add the states of a fused draft of at most `lengths` [B] tokens."""
        assert draft.states is not None
        known = list(lengths)
        if on_host(draft.tokens):  # elsewhere every row draws all of its tokens
            drawn = (draft.tokens >= 0).cumprod(1).sum(1).tolist()  # a row ends at one that it cannot draw
            known = [min(n, count + 1) for n, count in zip(lengths, drawn, strict=True)]
        self.add(draft.states, known)

    def take(self) -> Resume | None:
        """Return the states of the draft, and forget them; None without any."""
        if not self._states:
            return None
        resume = Resume(self.depth, torch.cat(self._states, 1), self._known)
        self.forget()
        return resume

    def forget(self) -> None:
        """Forget the states of a draft that an exception may have ended halfway."""
        self._states, self._known = [], []


MAX_WAITING = 128  # states of a row that wait for a draft: bounds their memory, and one pass reads them


@dataclass(slots=True)
class WaitingStates:
    """The states of one sequence that wait."""

    sequence: Sequence
    start: int  # the first position
    states: Tensor  # [n, D]; those of several layers lie side by side

    @property
    def stop(self) -> int:
        return self.start + len(self.states)

    @property
    def due(self) -> bool:
        """Whether they wait no longer: they are of a prompt that goes on, or as many as may wait."""
        return self.stop < len(self.sequence.prompt) or len(self.states) >= MAX_WAITING


class StateReader(AutoregressiveDrafter):
    """A drafter that reads the target's states of committed positions, which come at commit."""

    draft_pass: DraftPass
    own: tuple[KVCache, ...]  # caches that hold what it read; it alone writes them
    vocabulary: VocabularyMap | None = None  # from its draft vocabulary; None where it can draft all ids

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # it reads no tokens but in its steps

    def over_target(self, logits: Tensor, drafts: Seq[bool] = ()) -> Tensor:
        """Return logits over the target's ids; those of rows that have no state to draft from are uniform."""
        if self.vocabulary is not None:
            logits = self.vocabulary.columns(logits)
        return logits if all(drafts) else logits.masked_fill(~upload(drafts, logits.device)[:, None], 0.0)

    def end_draft(self) -> None:
        """Forget what the steps of a draft gave to each other."""
        raise NotImplementedError

    def resume(self) -> Resume | None:
        self.end_draft()
        return None

    def rewind(self, sequence: Sequence) -> None:
        self.end_draft()
        for cache in self.own:
            cache.lengths[sequence.row] = min(cache.lengths[sequence.row], len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        self.end_draft()


class WaitingReader(StateReader):
    """A reader whose states, but for a prompt's, wait for a draft, which reads those of all rows at once."""

    def __init__(self, aux_layers: Seq[int]) -> None:
        self.joined_layers = tuple(aux_layers)  # in the order in which their states lie side by side
        self.aux_layers = tuple(dict.fromkeys(aux_layers))
        self._waiting: dict[int, WaitingStates] = {}  # by sequence id

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Write what the drafter makes of waiting states, at least one, to its caches."""
        raise NotImplementedError

    @torch.inference_mode()
    def read_waiting(self, chosen: Callable[[Sequence], bool]) -> None:
        """Read the waiting states of the chosen sequences, which wait no longer."""
        waiting = [each for each in self._waiting.values() if chosen(each.sequence)]
        if waiting:
            self.read_states(waiting)
        for each in waiting:
            del self._waiting[each.sequence.id]

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Note copies of the target's states of newly committed positions."""
        joined = torch.cat([states[k] for k in self.joined_layers], -1)
        waiting = self._waiting.get(sequence.id)
        if waiting is None:
            waiting = self._waiting[sequence.id] = WaitingStates(sequence, start, joined)
        else:
            waiting.states = torch.cat([waiting.states[: start - waiting.start], joined])
        if waiting.due:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        self.read_waiting(lambda each: each is sequence)

    def rewind(self, sequence: Sequence) -> None:
        """Drop states of tokens that a ban took back, too."""
        super().rewind(sequence)
        waiting, stop = self._waiting.get(sequence.id), len(sequence.tokens) - 1
        if waiting is not None and waiting.stop > stop:
            waiting.states = waiting.states[: max(0, stop - waiting.start)]
            if not len(waiting.states):
                del self._waiting[sequence.id]

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._waiting.pop(sequence.id, None)


def by_row(waiting: Seq[WaitingStates]) -> tuple[int, list[WaitingStates | None]]:
    """Return the first row of waiting states, and what waits in each from there on."""
    rows = {each.sequence.row: each for each in waiting}
    return min(rows), [rows.get(row) for row in range(min(rows), max(rows) + 1)]


class LastStateReader(StateReader):
    """A reader of the target's last states, which go to its cache as they come."""

    def __init__(self, target: Runner, cache: KVCache) -> None:
        spec = target.decoder.spec
        self.aux_layers = (spec.layers,)
        self.states = cache.aligned(states_spec(spec, spec.hidden_size))
        self.caches = self.own = (self.states,)

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        keep(self.states, sequence.row, start, states[self.aux_layers[0]])

    def states_before(self, starts: Seq[int]) -> Tensor:
        """Return the state before each position, [B, hidden]; any for position 0, which has none."""
        device = self.states.device
        positions = upload([max(0, start - 1) for start in starts], device)
        return kept(self.states, torch.arange(len(starts), device=device), positions)
