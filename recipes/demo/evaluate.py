"""Evaluate the exported demo models on held-out modules with `transformers`; the result is one JSON file.

It has bits per byte of both models; alpha at temperature 0 (share of positions with the same argmax) and 1
(mean of sum_v min(p, q)), on held-out text and on the target's own continuations; the share of sampled
completions that parse; and the repetition of greedy outputs.

    python -m recipes.demo.evaluate --models DIR --corpus DIR --prompts FILE --out FILE
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

from foredraft.drafters.lookup import repeated

from .bpe import END_OF_TEXT_ID
from .completions import parses
from .corpus import read_sources
from .prompts import Prompt

WINDOW = 1024  # tokens that a model sees at once: its number of positions


class ModelPair(NamedTuple):
    """Target and draft. Both map ids [B, T] to an output with `.logits` [B, T, V]."""

    target: Any
    draft: Any


def load_pair(folder: Path) -> ModelPair:
    """Load `target` and `draft` of a folder in bfloat16."""
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16).eval()
        for name in ("target", "draft")
    ]
    return ModelPair(*models)


class PairMetrics(NamedTuple):
    """Sums over positions."""

    target_nats: float = 0.0
    draft_nats: float = 0.0
    agreement: float = 0.0  # positions with the same argmax
    overlap: float = 0.0  # sum_v min(p, q)
    positions: float = 0.0

    def add(self, other: PairMetrics) -> PairMetrics:
        """Return the sums of both."""
        return PairMetrics(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def alphas(self) -> dict[str, float]:
        """Return alpha at temperatures 0 and 1."""
        return {
            "alpha_t0": round(self.agreement / self.positions, 4),
            "alpha_t1": round(self.overlap / self.positions, 4),
        }


@torch.no_grad()
def compare_models(pair: ModelPair, ids: Tensor, counted: Tensor | None = None) -> PairMetrics:
    """Run both models on the same text [B, T]; `counted` marks with 1 the predicted positions that count."""
    p, q = (model(ids).logits[:, :-1].float().log_softmax(-1) for model in pair)  # [B, T-1, V]
    labels = ids[:, 1:].unsqueeze(-1)
    weight = torch.ones(labels.shape[:2]) if counted is None else counted[:, 1:].float()
    return PairMetrics(
        target_nats=float((-p.gather(-1, labels).squeeze(-1) * weight).sum()),
        draft_nats=float((-q.gather(-1, labels).squeeze(-1) * weight).sum()),
        agreement=float(((p.argmax(-1) == q.argmax(-1)) * weight).sum()),
        overlap=float((torch.minimum(p, q).exp().sum(-1) * weight).sum()),
        positions=float(weight.sum()),
    )


def evaluate_text(
    pair: ModelPair, texts: Sequence[str], tokenizer: Tokenizer, windows: int = 2
) -> dict[str, Any]:
    """Return bits per byte and alphas, teacher-forced, on the first windows of every text."""
    total, size = PairMetrics(), 0
    for text in texts:
        ids = [END_OF_TEXT_ID, *tokenizer.encode(text, add_special_tokens=False).ids]
        for start in range(0, min(len(ids) - 1, windows * WINDOW), WINDOW):
            window = ids[start : start + WINDOW]
            if len(window) > 1:
                total = total.add(compare_models(pair, torch.tensor([window])))
                size += len(tokenizer.decode(window[1:]).encode())
    return {
        "target_bits_per_byte": round(total.target_nats / math.log(2) / size, 4),
        "draft_bits_per_byte": round(total.draft_nats / math.log(2) / size, 4),
        "target_nats_per_token": round(total.target_nats / total.positions, 4),
        "tokens": int(total.positions),
        "bytes": size,
    } | total.alphas()


class Continuation(NamedTuple):
    """Output of the target for one prompt."""

    prompt: list[int]
    output: list[int]  # without the end token
    truncated: bool  # by the length limit


@torch.no_grad()
def continue_prompts(
    pair: ModelPair, prompts: Sequence[list[int]], temperature: float, new_tokens: int, batch: int = 50
) -> list[Continuation]:
    """Continue prompts with the target, `batch` at a time; temperature 0 is greedy."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = {"max_new_tokens": new_tokens, "pad_token_id": END_OF_TEXT_ID, **sampling}
    found: list[Continuation] = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[END_OF_TEXT_ID] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        generated = pair.target.generate(ids, attention_mask=mask, **options)
        for row, output in zip(rows, generated[:, width:].tolist(), strict=True):
            ended = END_OF_TEXT_ID in output
            found.append(
                Continuation(row, output[: output.index(END_OF_TEXT_ID)] if ended else output, not ended)
            )
    return found


def evaluate_continuations(pair: ModelPair, continuations: Sequence[Continuation]) -> PairMetrics:
    """Run both models on the target's continuations; the prompts do not count."""
    total = PairMetrics()
    for prompt, output, _ in continuations:
        ids = torch.tensor([prompt + output])
        counted = torch.tensor([[0] * len(prompt) + [1] * len(output)])
        if output:
            total = total.add(compare_models(pair, ids, counted))
    return total


def evaluate(
    pair: ModelPair, texts: Sequence[str], prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return all figures of the model card, of held-out modules and of prompts from these."""
    torch.manual_seed(0)
    ids = [[END_OF_TEXT_ID, *tokenizer.encode(item.prompt, add_special_tokens=False).ids] for item in prompts]
    completions = continue_prompts(pair, ids, temperature=0.7, new_tokens=160)
    valid = [
        parses(item.prompt, tokenizer.decode(done.output), item.name, done.truncated)
        for item, done in zip(prompts, completions, strict=True)
    ]
    greedy = continue_prompts(pair, ids, temperature=0.0, new_tokens=128)
    sampled = continue_prompts(pair, ids, temperature=1.0, new_tokens=96)
    repetition = [repeated(done.output) for done in greedy]
    return {
        "heldout": evaluate_text(pair, texts, tokenizer),
        "greedy_continuations": evaluate_continuations(pair, greedy).alphas()["alpha_t0"],
        "sampled_continuations_t1": evaluate_continuations(pair, sampled).alphas()["alpha_t1"],
        "completions": len(valid),
        "completions_that_parse": round(sum(valid) / len(valid), 4),
        "greedy_repeated_4grams_mean": round(statistics.fmean(repetition), 4),
        "greedy_repeated_4grams_median": round(statistics.median(repetition), 4),
        "greedy_prompts_below_30_percent": sum(share < 0.3 for share in repetition),
        "parameters": {
            name: sum(weight.numel() for weight in model.parameters())
            for name, model in zip(pair._fields, pair, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the exported demo models.")
    parser.add_argument("--models", type=Path, required=True, help="folder that recipes.demo.export wrote")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="file that recipes.demo.prompts wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
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
