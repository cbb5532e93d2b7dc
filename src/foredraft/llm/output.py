"""What comes of a request: its outputs, and the pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.decode.scores import Score
from foredraft.decode.stats import Stats
from foredraft.decode.trace import RoundTrace

__all__ = ["Output", "Piece"]


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample of one prompt became.

    Attributes:
        text: The new text; None without a tokenizer.
        token_ids: The new tokens only, the one that completed a stop string included.
        origins: Who wrote each token: "drafter", "target" or "bonus".
        finish_reason: "eos", "stop", "length", "cancelled" or "error".
        seed: The request's seed, or the fresh one that it got.
        sample: The sample's index under that seed.
        prompt_tokens: Tokens of the prompt, as it was read.
        stats: What it took.
        pieces: The text that each token completed; they join to `text`.
        stopped_by: The stop string, where the reason is "stop".
        logprobs: Scores of each new token, where asked for.
        prompt_logprobs: Scores of the prompt's tokens, where asked for; None in the first one's place.
        trace: What happened in each round, where asked for.
        error: What happened, where the reason is "error".
        lossless: The text has the model's own law; not where acceptance "bild" judged drafts.
        deterministic: And its bits do not depend on who drafts and who shares the batch.
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    finish_reason: str
    seed: int
    sample: int
    prompt_tokens: int
    stats: Stats
    pieces: list[str] | None = None
    stopped_by: str | None = None
    logprobs: list[Score] | None = None
    prompt_logprobs: list[Score | None] | None = None
    trace: list[RoundTrace] | None = None
    error: str | None = None
    lossless: bool = True
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive tokens of a stream.

    Attributes:
        text: What is certain now and was not before. It may lag behind the ids, by an incomplete character
            or by what may be the beginning of a stop string; None without a tokenizer.
        token_ids: The tokens.
        origins: Who wrote each: "drafter", "target" or "bonus".
        parts: The text again, each part with the index among the new tokens of the one that completed it.
        logprobs: Scores of the tokens, where asked for.
        output: On the last piece: all of it.
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    parts: list[tuple[int, str]] | None = None
    logprobs: list[Score] | None = None
    output: Output | None = None
