"""Replies: pieces of samples -> the objects of the OpenAI API, whole or in chunks."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import foredraft
from foredraft.decode.scores import Score
from foredraft.decode.stats import Stats
from foredraft.kinds import PREDICTION
from foredraft.llm.output import Output, Piece
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.calls import Call, CallReader
from foredraft.serve.problems import check_output
from foredraft.serve.provenance import Provenance, whole_provenance
from foredraft.serve.requests import Job

__all__ = ["Reply", "TokenTexts"]

# Why the library ends a text -> finish_reason of the API.
FINISH = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "constraint": "content_filter",
    "cancelled": "stop",
}


class TokenTexts:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._bytes = [] if tokenizer is None else ByteCodec(tokenizer).table(vocabulary)

    def joined(self, ids: list[int]) -> str:
        """Return the text of several tokens; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    def of(self, id: int) -> tuple[str, list[int]]:
        """Return a token's text, and its bytes."""
        if self._tokenizer is None:
            return f"token_id:{id}", []
        data = self._bytes[id] or self._tokenizer.text([id], False).encode()
        return data.decode("utf-8", "replace"), list(data)

    def shown(self, id: int) -> str:
        """Return a token's text; where it ends or begins within a character, its bytes, such as <0xE2>."""
        text, data = self.of(id)
        return "".join(f"<0x{byte:02X}>" for byte in data) if "\N{REPLACEMENT CHARACTER}" in text else text


class Reply:
    """The reply to one job.

    Args:
        id: Of the request.
        model: Name of the model.
        job: The job.
        texts: Of tokens.
    """

    def __init__(self, id: str, model: str, job: Job, texts: TokenTexts) -> None:
        self.job, self._texts = job, texts
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{id}"
        kind = "chat.completion" if job.chat else "text_completion"
        self._head = {
            "id": self.id, "created": int(time.time()), "model": model,
            "system_fingerprint": f"foredraft-{foredraft.__version__}",
        }  # fmt: skip
        self._whole_head = {**self._head, "object": kind}
        self._chunk_head = {**self._head, "object": f"{kind}.chunk" if job.chat else kind}
        self._started = [False] * job.samples
        self._tokens = [0] * job.samples
        self._offsets = [0] * job.samples
        # of the tokens' bytes: a character lies where its first token does, and an incomplete one nowhere
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(job.samples)]
        self._readers = [None if job.tools is None else job.tools.reader() for _ in range(job.samples)]
        self._provenance = [Provenance(texts.shown) for _ in range(job.samples)]
        self.outputs: dict[int, Output] = {}

    # --- chunks -----------------------------------------------------------------------------------------

    def chunks(self, taken: Iterable[tuple[int, Piece]], prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the chunks of what has come; pieces of one sample become one chunk.

        Raises:
            Problem: A sample failed while it ran.
        """
        by_sample: dict[int, list[Piece]] = {}
        for sample, piece in taken:
            by_sample.setdefault(sample, []).append(piece)
        made = []
        for sample, pieces in by_sample.items():
            made += self._chunks_of(sample, pieces, prompt_tokens)
        return made

    def _chunks_of(self, sample: int, pieces: list[Piece], prompt_tokens: int) -> list[dict[str, Any]]:
        output = pieces[-1].output
        if output is not None:
            self.outputs[sample] = output
            check_output(output)
        text = "".join(piece.text or "" for piece in pieces)
        ids = [token for piece in pieces for token in piece.token_ids]
        scores: list[Score | None] = [score for piece in pieces for score in piece.logprobs or ()]
        self._tokens[sample] += len(ids)
        made = []
        first = not self._started[sample]
        self._started[sample] = True
        if first and self.job.echo:
            text = self._prompt_text(sample) + text
            scores = [*self._prompt_scores(sample, pieces[0].prompt_logprobs), *scores]
        provenance = self._provenance[sample].fields(pieces) if self.job.provenance else {}
        deltas = self._deltas(sample, text, ended=output is not None)
        if not deltas and (scores or first or any(provenance.values())):
            deltas = [{"content": ""}]
        for delta in deltas:
            made.append(self._chunk(sample, delta, scores, None, first=first))
            scores, first = [], False
        if made:
            made[0]["choices"][0] |= provenance
        if output is not None:
            last = self._chunk(sample, {}, [], output)
            last["choices"][0] |= self._extras(output)
            if len(self.outputs) == self.job.samples:
                last["metrics"] = self._metrics()
            made.append(last)
        if self.job.include_usage:
            usage = self.usage(prompt_tokens) if self.job.continuous_usage else None
            for chunk in made:
                chunk["usage"] = usage
        return made

    def usage_chunk(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the chunk that ends a stream whose request asks for the usage."""
        return {**self._chunk_head, "choices": [], "usage": self.usage(prompt_tokens)}

    def _deltas(self, sample: int, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Return what a text adds to its message: content, calls, and arguments of calls."""
        reader = self._readers[sample]
        if reader is None:
            return [{"content": text}] if text else []
        deltas: list[dict[str, Any]] = []
        for event in [*reader.read(text), *(reader.end() if ended else [])]:
            if event[0] == "content":
                deltas.append({"content": event[1]})
            elif event[0] == "call":
                deltas.append({"tool_calls": [{"index": event[1].index, **_call(event[1], arguments="")}]})
            else:
                part = {"index": event[1].index, "function": {"arguments": event[2]}}
                deltas.append({"tool_calls": [part]})
        return deltas

    def _reason(self, output: Output, reader: CallReader | None) -> str:
        reason = FINISH[output.finish_reason]
        return "tool_calls" if reason == "stop" and reader is not None and reader.calls else reason

    def _chunk(
        self,
        sample: int,
        delta: dict[str, Any],
        scores: list[Score | None],
        output: Output | None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": sample}
        if self.job.chat:
            choice["delta"] = {"role": "assistant", **delta} if first else delta
        else:
            choice["text"] = delta.get("content", "")
        reason = None if output is None else self._reason(output, self._readers[sample])
        choice["logprobs"] = self._logprobs(sample, scores) if scores else None
        choice["finish_reason"] = reason
        return {**self._chunk_head, "choices": [choice]}

    # --- whole replies ----------------------------------------------------------------------------------

    def whole(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the reply in one object.

        Raises:
            Problem: A sample failed while it ran.
        """
        choices = []
        for sample in range(self.job.samples):
            output = self.outputs[sample]
            check_output(output)
            text = output.text or ""
            reader = None if self.job.tools is None else self.job.tools.read(text)
            choice: dict[str, Any] = {"index": sample, "finish_reason": self._reason(output, reader)}
            if self.job.chat:
                choice["message"] = _message(text, reader)
            else:
                choice["text"] = self._prompt_text(sample) + text if self.job.echo else text
            scores: list[Score | None] = list(output.logprobs or ())
            if self.job.echo:
                scores = [*self._prompt_scores(sample, output.prompt_logprobs), *scores]
            choice["logprobs"] = self._logprobs(sample, scores) if scores else None
            choice |= self._extras(output)
            if self.job.provenance:
                choice |= whole_provenance(output, self._texts.shown)
            choices.append(choice)
        return {
            **self._whole_head, "choices": choices, "usage": self.usage(prompt_tokens),
            "metrics": self._metrics(),
        }  # fmt: skip

    def take(self, taken: Iterable[tuple[int, Piece]]) -> None:
        """Keep the outputs among what has come, for `whole`."""
        for sample, piece in taken:
            self._tokens[sample] += len(piece.token_ids)
            if piece.output is not None:
                self.outputs[sample] = piece.output

    # --- parts ------------------------------------------------------------------------------------------

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the tokens that the reply has used so far; the prompt's count once for all its samples."""
        new = sum(self._tokens)
        cached = [0] * len(self.job.prompts)
        for sample, output in self.outputs.items():
            prompt = sample // self.job.n
            cached[prompt] = max(cached[prompt], output.cached_tokens)
        return {
            "prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
            "completion_tokens_details": self._predicted(),
        }  # fmt: skip

    def _predicted(self) -> dict[str, int]:
        """Return how many tokens of predictions were kept, and how many not, of the samples that ended."""
        stats = self._stats()
        accepted = stats.accepted_by[PREDICTION]
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": stats.steps[PREDICTION] - accepted,
        }

    def _stats(self) -> Stats:
        """Return the figures of all samples that ended."""
        return Stats.merge(output.stats for output in self.outputs.values())

    def _metrics(self) -> dict[str, Any]:
        """Return how drafting went, in vLLM's shape."""
        stats = self._stats()
        return {
            "speculative_decoding": {
                "mean_acceptance_length": stats.mean_accepted_length,
                "draft_acceptance_rate": stats.acceptance_rate,
                "acceptance_histogram": stats.accepted_at,
                "num_spec_steps": sum(stats.drafts.values()),
                "num_draft_tokens": stats.drafted,
                "num_accepted_tokens": stats.accepted,
                "drafters": dict(stats.drafts),
            },
            "tokens_per_second": stats.tokens_per_second,
        }  # fmt: skip

    def _extras(self, output: Output) -> dict[str, Any]:
        """Return what the API has no field for."""
        return {
            "stop_reason": output.stopped_by, "seed": output.seed, "lossless": output.lossless,
            "deterministic": output.deterministic,
        }  # fmt: skip

    def _prompt_text(self, sample: int) -> str:
        return self._texts.joined(self.job.prompts[sample // self.job.n])

    def _prompt_scores(self, sample: int, scores: list[Score | None] | None) -> list[Score | None]:
        """Return the scores that an echo shows; the first token has none, but a place."""
        if scores is None:
            return []
        first = Score(self.job.prompts[sample // self.job.n][0], math.nan, math.nan, [], [])
        return [first, *scores[1:]]

    def _logprobs(self, sample: int, scores: Sequence[Score | None]) -> dict[str, Any]:
        known = [score for score in scores if score is not None]
        return self._chat_logprobs(known) if self.job.chat else self._completion_logprobs(sample, known)

    def _chat_logprobs(self, scores: list[Score]) -> dict[str, Any]:
        def entry(id: int, logprob: float) -> dict[str, Any]:
            text, data = self._texts.of(id)
            return {"token": text, "logprob": _number(logprob), "bytes": data}

        content = [
            entry(score.token_id, score.logprob) | {"top_logprobs": [entry(*each) for each in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, sample: int, scores: list[Score]) -> dict[str, Any]:
        tokens, offsets = [], []
        for score in scores:
            text, data = self._texts.of(score.token_id)
            tokens.append(text)
            offsets.append(self._offsets[sample])
            self._offsets[sample] += len(self._decoders[sample].decode(bytes(data)) if data else text)
        return {
            "tokens": tokens,
            "token_logprobs": [_number(score.logprob) for score in scores],
            "top_logprobs": [
                {self._texts.of(id)[0]: _number(logprob) for id, logprob in score.top} if score.top else None
                for score in scores
            ],
            "text_offset": offsets,
        }


def _message(text: str, reader: CallReader | None) -> dict[str, Any]:
    if reader is None or not reader.calls:
        return {"role": "assistant", "content": text, "refusal": None}
    calls = [_call(call, call.arguments) for call in reader.calls]
    return {"role": "assistant", "content": reader.content or None, "refusal": None, "tool_calls": calls}


def _call(call: Call, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _number(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it: null for the first token of a prompt, which has none."""
    if math.isnan(logprob):
        return None
    return max(logprob, -9999.0)
