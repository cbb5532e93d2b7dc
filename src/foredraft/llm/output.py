"""Output and Piece: the result of a request, and the parts of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.decode.round_trace import RoundTrace
from foredraft.decode.scores import Score
from foredraft.decode.stats import Stats

__all__ = ["Output", "Piece"]


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one sample of one prompt.

    Attributes:
        text: The new text; None without a tokenizer.
        token_ids: The new tokens, including those of a stop string.
        origins: The source of each new token: "drafter", "target" or "bonus".
        finish_reason: "eos", "stop", "length", "constraint", "cancelled" or "error".
        seed: The request's seed, or the fresh seed that it got.
        sample: The sample's index under that seed.
        prompt_tokens: Tokens of the prompt as it was read.
        stats: Times and counts.
        pieces: The text that each token completed; joined they are `text`.
        stopped_by: The stop string, where `finish_reason` is "stop"; the constraint, and why it ended the
            text, where it is "constraint".
        logprobs: Scores of each new token, if the request asks for them.
        prompt_logprobs: Scores of the prompt's tokens, if the request asks for them; None for the first one.
        trace: One record for each round, if the request asks for them.
        error: What failed, where `finish_reason` is "error".
        lossless: The text has the target's own distribution. Acceptance rule "bild" does not guarantee it.
        deterministic: In addition, its bits do not depend on the drafter and the batch.
        why_plain: Why nothing was drafted, where a drafter might have; None where it drafted.
        cached_tokens: Tokens of the prompt that were not read, because an earlier request had read them.

    Examples:
        >>> [output] = llm.generate("def add(a, b):", SamplingParams(max_new_tokens=8, ignore_eos=True))
        >>> output.finish_reason, len(output.token_ids), output.stats.tokens
        ('length', 8, 8)
        >>> "".join(output.pieces) == output.text
        True
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
    why_plain: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive tokens of a stream.

    Attributes:
        text: The text that became final with these tokens. It may lag behind the tokens by an incomplete
            character or by a possible beginning of a stop string; None without a tokenizer.
        token_ids: The tokens.
        origins: The source of each token: "drafter", "target" or "bonus".
        parts: The text in parts, each with the index of the new token that completed it.
        logprobs: Scores of the tokens, if the request asks for them.
        prompt_logprobs: Scores of the prompt's tokens, on the first piece, if the request asks for them.
        trace: The rounds since the piece before, if the request asks for them.
        output: The whole result, on the last piece.

    Examples:
        >>> *pieces, last = llm.stream("def add(a, b):", SamplingParams(max_new_tokens=8))
        >>> all(piece.output is None for piece in pieces)
        True
        >>> "".join(piece.text for piece in [*pieces, last]) == last.output.text
        True
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    parts: list[tuple[int, str]] | None = None
    logprobs: list[Score] | None = None
    prompt_logprobs: list[Score | None] | None = None
    trace: list[RoundTrace] | None = None
    output: Output | None = None
