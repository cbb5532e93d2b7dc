"""A head's acceptance by position in decoding, beside what reading the model's own texts says without it.

Plain decoding writes texts, and target and head read them (`foredraft.doctor`), with a draft before every new
token. From the probabilities follow the rounds that decoding takes (`tune.expected_rounds`), and α at each
position of a draft. Then the same prompts are decoded with drafts of the same length, and what is kept of
them is counted. At temperature 0 both are the same rounds, so the figures have to be equal; at temperature 1
they are equal within their errors, which are those of a ratio of sums over texts.

    python -m benchmarks.head_acceptance --draft HEAD [--model FILE] [--name NAME]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch

import foredraft
from benchmarks.real_models import chat_and_code
from benchmarks.workload import fluent, machine, write
from foredraft import LLM, Output, SamplingParams
from foredraft.doctor.teacher_forced import Acceptance, ReadText, acceptance_of, head_drafts, read_text
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.heads.eagle3_head import Eagle3Head
from foredraft.tune.expected_rounds import ExpectedRounds, Floats

DRAFTS = 32  # of a text, for the figures that the doctor gives


def reached_and_kept(
    head: Eagle3Head, text: ReadText, first: int, new_tokens: int, length: int, greedy: bool
) -> Floats:
    """Return the drafts that reach each position, and those of them that are kept there, [2, K], as expected.

    Args:
        head: The head.
        text: The text, with at least K more new tokens than are decoded.
        first: Its first new token.
        new_tokens: Tokens that are decoded.
        length: K, tokens of a draft.
        greedy: At temperature 0, else 1.
    """
    drafts = head_drafts(head, text, length, len(text.tokens))
    given, any_ = np.zeros((2, new_tokens, length))  # min(1, q / p) of the text's own token, and Σ min(p, q)
    for row, place in enumerate(range(first, first + new_tokens)):
        p_logits, q_logits = text.logits[place - 1 : place - 1 + length].double(), drafts[place - 1].double()
        if greedy:
            given[row] = any_[row] = p_logits.argmax(-1) == q_logits.argmax(-1)
            continue
        p, q = p_logits.softmax(-1), q_logits.softmax(-1)
        own = torch.tensor(text.tokens[place : place + length])[:, None]
        given[row] = (q.gather(1, own) / p.gather(1, own)).clamp(max=1)[:, 0]
        any_[row] = torch.minimum(p, q).sum(-1)
    # a draft ends where one token is left, which the target writes itself
    allowed = np.arange(new_tokens)[:, None] + np.arange(length) < new_tokens - 1
    rounds = ExpectedRounds.from_acceptance((given * allowed)[None], np.array([new_tokens]))
    before = np.concatenate([np.ones((new_tokens, 1)), given.cumprod(1)[:, :-1]], 1)
    reached = rounds.starts[-1, 0][:, None] * before * allowed
    return np.stack([reached.sum(0), (reached * any_).sum(0)])


def counted(output: Output, length: int) -> Floats:
    """Return the drafts of a decoded text that reached each position, and those that were kept, [2, K]."""
    counts = np.zeros((2, length))
    for each in output.trace or ():
        drafted, accepted = len(each.draft), each.accepted
        counts[0, : min(drafted, accepted + 1)] += 1
        counts[1, :accepted] += 1
    return counts


def ratio(counts: Floats) -> dict[str, Any]:
    """Return α by position with its standard error, for counts [texts, 2, K] of drafts reached and kept."""
    reached, kept = counts.sum(0)
    alpha = kept / reached
    errors = np.sqrt(((counts[:, 1] - alpha * counts[:, 0]) ** 2).sum(0)) / reached
    return {"alpha": alpha.tolist(), "error": errors.tolist(), "drafts": reached.tolist()}


def compared(
    llm: LLM, asked: list[list[int]], length: int, new_tokens: int, temperature: float, seeds: int
) -> dict[str, Any]:
    """Return α by position as expected, as the doctor says, and as counted in decoding."""
    head = next(each for each in llm.loaded.engine.drafters.values() if isinstance(each, Eagle3)).head
    taps, greedy = sorted(set(head.record.taps or ())), temperature == 0
    texts, decoded, doctor = list[Floats](), list[Floats](), list[Acceptance]()
    for seed in range(1 if greedy else seeds):
        options = SamplingParams(
            temperature=temperature, ignore_eos=True, seed=2 * seed, acceptance="speculative"
        )
        plain = options.replace(max_new_tokens=new_tokens + length, drafter="none")
        for prompt, output in zip(asked, llm.generate(asked, plain), strict=True):
            text = read_text(llm.loaded.runner, [*prompt, *output.token_ids], taps)
            texts.append(reached_and_kept(head, text, len(prompt), new_tokens, length, greedy))
            doctor.append(acceptance_of(head_drafts(head, text, length, DRAFTS), text))
        drafting = options.replace(max_new_tokens=new_tokens, seed=2 * seed + 1)
        decoded += [counted(output, length) for output in llm.generate(asked, drafting, trace=True)]
    joined = reduce(Acceptance.joined, doctor)
    found = {"expected": ratio(np.stack(texts)), "decoded": ratio(np.stack(decoded))}
    sampled, at_zero = joined.by_position
    return {**found, "doctor": at_zero if greedy else sampled}


def rows(name: str, found: dict[str, Any]) -> Iterator[str]:
    for position, doctor in enumerate(found["doctor"]):
        one, other = (
            f"{found[kind]['alpha'][position]:.3f} ± {found[kind]['error'][position]:.3f}"
            for kind in ("expected", "decoded")
        )
        yield f"{name}, token {position + 1}: expected {one}, decoded {other}, doctor {doctor:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold a head's acceptance in decoding against its reading.")
    parser.add_argument("--model", help="the target; the demo target by default")
    parser.add_argument("--draft", required=True, help="the head's folder")
    parser.add_argument("--prompts", type=int, default=16, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each text")
    parser.add_argument("--length", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--seeds", type=int, default=4, help="texts of each prompt at temperature 1")
    parser.add_argument("--name", default="head_acceptance", help="of the result")
    given = parser.parse_args()
    llm = foredraft.load(
        given.model, draft=given.draft, drafter="eagle3", policy="fixed", max_draft=given.length, max_batch=8
    )
    asked = fluent(llm, given.prompts) if given.model is None else chat_and_code(llm, given.prompts)
    found = {
        str(temperature): compared(llm, asked, given.length, given.new_tokens, temperature, given.seeds)
        for temperature in (0, 1)
    }
    for name, each in found.items():
        print(*rows(f"temperature {name}", each), sep="\n")
    write(given.name, {"machine": machine(), "model": given.model or "demo", "temperatures": found})


if __name__ == "__main__":
    main()
