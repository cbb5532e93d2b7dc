"""Medusa: independent heads over the target's last hidden state draft (Cai et al. 2024, arXiv:2401.10774).

Head k drafts the token in slot k from one state: that of the last committed position before the pending
token. No head reads what another one drafted, so the q of a slot is the head's marginal, whatever was drawn
before.

Ordinary rejection makes that exact, slot by slot: it needs a q that is fixed before the token is drawn, and
the target's p after the tokens before it. What q depends on besides does not matter: acceptance with
min(1, p / q) and the residual norm(max(p - q, 0)) give p for every q. A marginal q costs acceptance alone.

The states of all committed positions stand in a cache whose rows follow the batch's, since a ban may take a
text back to any of them. A draft runs no layer: each step costs one head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Found, Missing, Parts
from foredraft.drafters.heads.head_asset import HeadAsset
from foredraft.drafters.heads.medusa_files import MedusaFiles, is_medusa, read_medusa
from foredraft.drafters.heads.medusa_heads import MedusaHeads, load_medusa
from foredraft.drafters.heads.words import map_of
from foredraft.drafters.kept_states import keep, kept, states_spec
from foredraft.errors import Option
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Resume, Runner
from foredraft.model.transfers import upload
from foredraft.model.unread import Checkpoint

__all__ = ["ASSET", "Medusa", "MedusaPass"]


@dataclass(frozen=True, slots=True)
class MedusaPass(DraftPass):
    """The forward of a draft step over states that mean nothing, to be timed."""

    head: MedusaHeads = field(kw_only=True)

    @property
    def described(self) -> str:
        first = self.head.heads[0]
        return f"{len(first.blocks)} blocks and {first.output.shape[0]} words"

    def __call__(self, cache: CacheLayers, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        decoder = self.runner.decoder
        with torch.inference_mode():
            states = torch.zeros(
                len(starts), decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device
            )
            logits = self.head.heads[0](self.head.entering(states))
            return Forward(logits[:, None], states[:, None], {})

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        return None


class Medusa(Stepper):
    """A stepper over Medusa heads and the target's last hidden states.

    Args:
        target: The target's runner.
        cache: The target's KV cache.
        heads: The heads.
    """

    name = "medusa"
    draft_pass: DraftPass

    def __init__(self, target: Runner, cache: KVCache, heads: MedusaHeads) -> None:
        spec = target.decoder.spec
        self.head = heads
        self.planned = self.max_draft = len(heads.heads)
        self.depth = spec.layers
        self.taps = (self.depth,)
        self.states = cache.beside(states_spec(spec, spec.hidden_size))
        self.caches = (self.states,)
        self.draft_pass = MedusaPass(target, head=heads)
        self.vocabulary = map_of(heads.words, target.decoder)
        self._reads: Tensor | None = None  # what the heads of this draft read, [B, D]; None before a draft
        self._drafts: list[bool] = []  # rows of this draft that have a state
        self._slot = 0

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # there is nothing to read: the states come at commit

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._reads is None:
            # a text that began with one token has no state before it: its q is uniform
            self._drafts = [not is_idle and start > 0 for start, is_idle in zip(starts, idle, strict=True)]
            places = [start - 1 if has else 0 for start, has in zip(starts, self._drafts, strict=True)]
            rows, device = range(len(places)), self.states.device
            states = kept(self.states, upload([*rows], device), upload(places, device))
            self._reads, self._slot = self.head.entering(states), 0
        logits = self.head.heads[self._slot](self._reads)
        self._slot += 1
        if self.vocabulary is not None:
            logits = self.vocabulary.columns(logits)
        if not all(self._drafts):
            logits = logits.masked_fill(~upload(self._drafts, logits.device)[:, None], 0.0)
        return logits

    def resume(self) -> Resume | None:
        self._reads = None  # the draft ends
        return None

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        keep(self.states, sequence.row, start, states[self.depth])

    def rewind(self, sequence: Sequence) -> None:
        self._reads = None
        row = sequence.row
        self.states.lengths[row] = min(self.states.lengths[row], len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        self._reads = None


@dataclass(frozen=True, kw_only=True)
class FoundMedusa(Found):
    """Heads that fit the target.

    Attributes:
        files: The heads.
        target: The target.
    """

    files: MedusaFiles
    target: Checkpoint

    def row_bytes(self, positions: int) -> int:
        spec = self.target.spec
        return KVCache.bytes_per_row(states_spec(spec, spec.hidden_size), positions, self.target.dtype)

    def make(self, parts: Parts) -> Medusa:
        return Medusa(parts.target, parts.cache, load_medusa(self.files, parts.target))


class MedusaAsset(HeadAsset):
    """The heads of one model."""

    called = "Medusa heads"
    missing = Missing("needs Medusa heads of this model", ("give ", Option("draft"), ", their folder"))
    required = Missing("which needs Medusa heads of the model", missing.remedy)

    def knows(self, place: Path) -> bool:
        return is_medusa(place)

    def found(self, place: Path, target: Checkpoint) -> Found:
        files = read_medusa(place)
        files.check_target(target.spec)
        words = "" if files.words is None else f", {files.words} words"
        about = f"{len(files.heads)} Medusa heads of {place}, {files.parameters / 1e6:.1f} M weights{words}"
        return FoundMedusa(
            bytes=files.parameters * target.dtype.itemsize, planned=len(files.heads), about=about,
            files=files, target=target,
        )  # fmt: skip


ASSET = MedusaAsset()
