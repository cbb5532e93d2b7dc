"""Measure exported demo models on held-out modules, through `transformers` alone.

Contract: one JSON file with bits per byte of both models; alpha at temperature 0 (share of positions with
the same argmax) and 1 (mean of sum_v min(p, q)), on held-out text and on the target's own continuations;
the share of sampled completions of held-out functions that parse; the repetition of greedy outputs.

    python -m foredraft.demo.recipe.evaluate --models DIR --corpus DIR --prompts FILE --out FILE
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.ngrams import repeated

from .completions import parses
from .corpus import read_sources
from .prompts import Prompt

WINDOW = 1024


class Pair(NamedTuple):
    """Target and draft; both map ids [B, T] to `.logits` [B, T, V]."""

    target: Any
    draft: Any


def load_pair(folder: Path) -> Pair:
    """Both models in bfloat16."""
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16).eval()
        for name in ("target", "draft")
    ]
    return Pair(*models)


class Tally(NamedTuple):
    """Sums over positions."""

    target_nats: float = 0.0
    draft_nats: float = 0.0
    agreement: float = 0.0
    overlap: float = 0.0
    positions: float = 0.0

    def add(self, other: Tally) -> Tally:
        return Tally(
            self.target_nats + other.target_nats,
            self.draft_nats + other.draft_nats,
            self.agreement + other.agreement,
            self.overlap + other.overlap,
            self.positions + other.positions,
        )

    def alphas(self) -> dict[str, float]:
        return {
            "alpha_t0": round(self.agreement / self.positions, 4),
            "alpha_t1": round(self.overlap / self.positions, 4),
        }


@torch.no_grad()
def compare(pair: Pair, ids: Tensor, keep: Tensor | None = None) -> Tally:
    """Both models on the same text; `keep` marks the predicted positions that count."""
    p, q = (model(ids).logits[:, :-1].float().log_softmax(-1) for model in pair)  # [B, T-1, V]
    labels = ids[:, 1:].unsqueeze(-1)
    weight = torch.ones(labels.shape[:2]) if keep is None else keep[:, 1:].float()
    return Tally(
        target_nats=float((-p.gather(-1, labels).squeeze(-1) * weight).sum()),
        draft_nats=float((-q.gather(-1, labels).squeeze(-1) * weight).sum()),
        agreement=float(((p.argmax(-1) == q.argmax(-1)) * weight).sum()),
        overlap=float((torch.minimum(p, q).exp().sum(-1) * weight).sum()),
        positions=float(weight.sum()),
    )


def judge_text(pair: Pair, texts: Sequence[str], tokenizer: Tokenizer, windows: int = 2) -> dict[str, Any]:
    """Teacher-forced figures on the first windows of every text."""
    total, size = Tally(), 0
    for text in texts:
        ids = [0, *tokenizer.encode(text, add_special_tokens=False).ids]
        for start in range(0, min(len(ids) - 1, windows * WINDOW), WINDOW):
            window = ids[start : start + WINDOW + 1][:WINDOW]
            if len(window) > 1:
                total = total.add(compare(pair, torch.tensor([window])))
                size += len(tokenizer.decode(window[1:]).encode())
    bits = {
        f"{name}_bits_per_byte": round(nats / math.log(2) / size, 4)
        for name, nats in (("target", total.target_nats), ("draft", total.draft_nats))
    }
    return (
        bits
        | {
            "target_nats_per_token": round(total.target_nats / total.positions, 4),
            "tokens": int(total.positions),
            "bytes": size,
        }
        | total.alphas()
    )


class Continuation(NamedTuple):
    """A prompt's ids, what the target wrote, and whether the length limit cut it."""

    prompt: list[int]
    written: list[int]
    limited: bool


@torch.no_grad()
def continue_prompts(
    pair: Pair, prompts: Sequence[list[int]], temperature: float, tokens: int, batch: int = 50
) -> list[Continuation]:
    """The target's own continuations; plain ancestral sampling, greedy at temperature 0."""
    found: list[Continuation] = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = pair.target.generate(ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **how)
        for row, written in zip(rows, out[:, width:].tolist(), strict=True):
            ended = 0 in written
            found.append(Continuation(row, written[: written.index(0)] if ended else written, not ended))
    return found


def judge_continuations(pair: Pair, continuations: Sequence[Continuation]) -> Tally:
    """Both models on what the target wrote, prompts not counted."""
    total = Tally()
    for item in continuations:
        ids = torch.tensor([item.prompt + item.written])
        keep = torch.tensor([[0] * len(item.prompt) + [1] * len(item.written)])
        if item.written:
            total = total.add(compare(pair, ids, keep))
    return total


def evaluate(
    pair: Pair, texts: Sequence[str], prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> dict[str, Any]:
    """All figures."""
    torch.manual_seed(0)
    ids = [[0, *tokenizer.encode(item.prompt, add_special_tokens=False).ids] for item in prompts]
    sampled = continue_prompts(pair, ids, 0.7, 160)
    good = [
        parses(item.prompt, tokenizer.decode(done.written), item.name, done.limited)
        for item, done in zip(prompts, sampled, strict=True)
    ]
    greedy = continue_prompts(pair, ids, 0.0, 128)
    free = continue_prompts(pair, ids, 1.0, 96)
    repeats = [repeated(done.written) for done in greedy]
    return {
        "heldout": judge_text(pair, texts, tokenizer),
        "greedy_continuations": judge_continuations(pair, greedy).alphas()["alpha_t0"],
        "sampled_continuations_t1": judge_continuations(pair, free).alphas()["alpha_t1"],
        "completions": len(good),
        "completions_that_parse": round(sum(good) / len(good), 4),
        "greedy_repeated_4grams_mean": round(statistics.fmean(repeats), 4),
        "greedy_repeated_4grams_median": round(statistics.median(repeats), 4),
        "greedy_prompts_below_30_percent": sum(share < 0.3 for share in repeats),
        "parameters": {
            name: sum(weight.numel() for weight in model.parameters())
            for name, model in zip(pair._fields, pair, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo models.")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.models / "target" / "tokenizer.json"))
    texts = [source.text for source in read_sources(options.corpus / "heldout.jsonl")]
    prompts = [Prompt(**json.loads(line)) for line in options.prompts.read_text().splitlines()]
    figures = evaluate(load_pair(options.models), texts, prompts, tokenizer)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
