"""POST /v1/chat/completions and /v1/completions: the replies, whole or in chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import foredraft
from foredraft.decode.stats import Stats
from foredraft.kinds.tables import PREDICTION
from foredraft.llm.output import Piece
from foredraft.serve import reply_types
from foredraft.serve.blocks import BlockEvent
from foredraft.serve.problems import Error, LengthFields, Problem
from foredraft.serve.replies import Event, Reply, Sample
from foredraft.serve.reply_types import Reason
from foredraft.serve.requests import ChatRequest, CompletionRequest
from foredraft.serve.scored_text import Offsets, Provenance

# Why the library ends a text -> finish_reason of the API.
FINISH: dict[str, Reason] = {
    "eos": "stop", "stop": "stop", "length": "length", "constraint": "content_filter", "cancelled": "stop",
}  # fmt: skip
FINGERPRINT = f"foredraft-{foredraft.__version__}"
SHORTEN = 'truncate_prompt "left"'


class _Reply(Reply):
    """Both shapes, but for the form of a text and of log-probabilities."""

    done = b"data: [DONE]\n\n"
    prefix: ClassVar[str]  # of ids
    objects: ClassVar[tuple[str, str]]  # kinds of a whole reply and of a chunk
    added_as: ClassVar[str]  # the field of a chunk's choice that has what it adds
    one_prompt: ClassVar[bool]  # the reply tells of its prompt, else each choice of its own
    silence: ClassVar[Any]  # what a chunk adds that has log-probabilities or provenance, but no text
    over: ClassVar[Any]  # what the last chunk of a choice adds

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(f"{self.prefix}-{id}", *args)
        self._begun: set[int] = set()  # samples of which something was shown
        self._provenance = [Provenance(self.texts.shown) for _ in self.samples]
        self.asked, options = self.job.request, self.job.request.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._tells_usage_so_far = bool(options and options.continuous_usage_stats)

    @staticmethod
    def failure(problem: Problem) -> Error:
        return problem.body

    def part(self, sample: Sample, pieces: list[Piece]) -> Iterator[Event]:
        first = sample.index not in self._begun
        steps = sample.take(pieces)
        scores, beside, end = self._shown(sample, pieces, first=first)
        added = self.added(sample, steps, first=first)
        if not added and (scores or any(beside.values())):
            added = [self.silence]
        parts = [self._part(sample, each) for each in added]
        if scores is not None:
            texts = (
                place for place, each in enumerate(added) if isinstance(each, str) or each.get("content")
            )
            parts[next(texts, 0)]["logprobs"] = scores
        if parts:
            parts[0] |= beside
        if end:
            parts.append(self._part(sample, self.over) | end)
        usage = self._usage() if self._tells_usage_so_far else None
        for place, part in enumerate(parts):
            chunk = self._head(1, [part])
            if first and not place and self.asked.return_token_ids and not (self.one_prompt and sample.index):
                (chunk if self.one_prompt else part)["prompt_token_ids"] = self._prompt_ids(sample)
            if part is parts[-1] and all(each.output is not None for each in self.samples):
                chunk["metrics"] = self._metrics()
            if self._tells_usage:
                chunk["usage"] = usage
            yield chunk

    def end(self) -> Iterator[Event]:
        if self._tells_usage:
            yield self._head(1, []) | {"usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        choices = []
        for sample in self.samples:
            pieces = self._come[sample.index]
            sample.take(pieces)
            scores, beside, end = self._shown(sample, pieces, first=True)
            choice = {"index": sample.index, **self.text(sample), "logprobs": scores, **end, **beside}
            choices.append(choice if self.one_prompt else choice | self._prompt(sample))
        whole = self._head(0, choices) | {"usage": self._usage(), "metrics": self._metrics()}
        return whole | self._prompt(self.samples[0]) if self.one_prompt else whole

    def _shown(self, sample: Sample, pieces: list[Piece], *, first: bool) -> tuple[Any, Any, Any]:
        """Return what pieces that the sample took show: scores, what stands beside them, and the end."""
        end: dict[str, Any] = {}
        if sample.output is not None:
            output = sample.ended()
            reason = FINISH[output.finish_reason]
            last = output.token_ids[-1] if output.token_ids else None
            stopped = output.finish_reason == "eos" and last in self.job.one.params.stop_token_ids
            end = {
                "finish_reason": "tool_calls" if reason == "stop" and sample.blocks.calls else reason,
                "stop_reason": last if stopped else output.stopped_by, "seed": output.seed,
                "lossless": output.lossless, "deterministic": output.deterministic,
            }  # fmt: skip
        beside: dict[str, Any] = {}
        scores = self.logprobs(sample, pieces, first=first)
        if self.asked.provenance:
            beside["provenance"], beside["trace"] = self._provenance[sample.index].add(pieces)
        if self.asked.return_token_ids:
            beside["token_ids"] = [id for piece in pieces for id in piece.token_ids]
        self._begun.add(sample.index)
        return scores, beside, end

    def _part(self, sample: Sample, added: Any) -> dict[str, Any]:
        return {"index": sample.index, self.added_as: added, "logprobs": None, "finish_reason": None}

    def _head(self, kind: int, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": self.objects[kind], "choices": choices,
        }  # fmt: skip

    @abstractmethod
    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[Any]:
        """Return what steps add to a choice, one item for each chunk; at least one the first time."""

    @abstractmethod
    def text(self, sample: Sample) -> dict[str, Any]:
        """Return the text of a choice of a whole reply."""

    @abstractmethod
    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> Any:
        """Return the log-probabilities of what the pieces just taken show; None where they show none."""

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        """Return what a reply tells of the prompt of a sample that has ended."""
        made: dict[str, Any] = {}
        if self.asked.return_token_ids:
            made["prompt_token_ids"] = self._prompt_ids(sample)
        if (top := self.asked.prompt_logprobs) is not None:
            made["prompt_logprobs"] = self.texts.prompt_scores(sample.ended().prompt_logprobs or (), top)
        return made

    def _prompt_ids(self, sample: Sample) -> list[int]:
        return self.generation.handles[sample.index // self.job.one.n].prompt

    def _usage(self) -> dict[str, Any]:
        """Return the tokens that the reply has used so far; the prompt's count once for all its samples."""
        new, stats = sum(sample.tokens for sample in self.samples), self._stats()
        cached = [0] * len(self.job.asked)
        for sample in self.samples:
            if sample.output is not None:
                place = sample.index // self.job.one.n
                cached[place] = max(cached[place], sample.output.cached_tokens)
        accepted = stats.accepted_by[PREDICTION]
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(sample.reasoning_tokens for sample in self.samples),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.steps[PREDICTION] - accepted,
            },
        }  # fmt: skip

    def _stats(self) -> Stats:
        return Stats.merge(sample.output.stats for sample in self.samples if sample.output is not None)

    def _metrics(self) -> dict[str, Any]:
        stats = self._stats()
        drafting = {
            "mean_acceptance_length": stats.mean_accepted_length,
            "draft_acceptance_rate": stats.acceptance_rate, "acceptance_histogram": stats.accepted_at,
            "num_spec_steps": sum(stats.drafts.values()), "num_draft_tokens": stats.drafted,
            "num_accepted_tokens": stats.accepted, "drafters": dict(stats.drafts),
        }  # fmt: skip
        return {"speculative_decoding": drafting, "tokens_per_second": stats.tokens_per_second}


class ChatReply(_Reply):
    """Of POST /v1/chat/completions."""

    request, types = ChatRequest, (reply_types.Chat, reply_types.ChatChunk)
    route, objects = "chat_completions", ("chat.completion", "chat.completion.chunk")
    lengths = LengthFields("messages", ("max_completion_tokens", "max_tokens"), SHORTEN)
    prefix, added_as, silence, over, one_prompt = "chatcmpl", "delta", {"content": ""}, {}, True

    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, block, text in steps:
            call = block.call
            if kind == "delta" and block.thinking:
                deltas.append({"reasoning_content": text, "reasoning": text})
            elif kind == "delta" and call is None:
                deltas.append({"content": text})
            elif call is not None and kind != "close":
                begun: dict[str, Any] = {"id": call.id, "type": "function"} if kind == "open" else {}
                function = {"name": call.name, "arguments": ""} if kind == "open" else {"arguments": text}
                deltas.append({"tool_calls": [{"index": call.index, **begun, "function": function}]})
        if first:
            deltas[:1] = [{"role": "assistant", **(deltas[0] if deltas else {"content": ""})}]
        return deltas

    def text(self, sample: Sample) -> dict[str, Any]:
        content, calls = sample.blocks.content, sample.blocks.calls
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := sample.blocks.reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]  # fmt: skip
        return {"message": message}

    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> Any:
        asked = first and sample.output is not None and self.job.one.params.logprobs is not None
        if not sample.shown and not asked:
            return None
        return {"content": self.texts.chat_logprobs(sample.shown), "refusal": None}


class CompletionReply(_Reply):
    """Of POST /v1/completions."""

    request, types = CompletionRequest, (reply_types.Completion, reply_types.CompletionChunk)
    route, operation, objects = "completions", "text_completion", ("text_completion", "text_completion")
    lengths = LengthFields("prompt", ("max_tokens",), SHORTEN)
    prefix, added_as, silence, over, one_prompt = "cmpl", "text", "", "", False

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(id, *args)
        self._offsets = [Offsets(self.texts) for _ in self.samples]
        # the prompts, with their texts where the client sent text
        self._sent = list(zip(self.job.prompts, self.asked.sent, strict=True))
        self._echoes = [self.texts.echoed(*each) if self.asked.echo else "" for each in self._sent]

    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[str]:
        begun = self._echoes[sample.index // self.job.one.n] if first else ""
        text = begun + "".join(step.text for step in steps)
        return [text] if text or first else []

    def text(self, sample: Sample) -> dict[str, Any]:
        echo = self._echoes[sample.index // self.job.one.n]
        return {"text": echo + sample.blocks.content}

    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> Any:
        top = self.job.one.params.logprobs
        if top is None:
            return None
        offsets, found = self._offsets[sample.index], None
        if first and self.asked.echo:
            sent = self._sent[sample.index // self.job.one.n]
            found = offsets.prompt(*sent, pieces[0].prompt_logprobs or (), top)
        if found is None and not sample.shown and not (first and sample.output is not None):
            return None
        new = offsets.logprobs(sample.shown)
        return new if found is None else {name: found[name] + new[name] for name in found}
