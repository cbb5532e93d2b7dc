"""POST /v1/chat/completions and /v1/completions: the replies, whole or in chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import foredraft
from foredraft.decode.stats import Stats
from foredraft.kinds.tables import PREDICTION
from foredraft.serve import reply_types
from foredraft.serve.problems import LengthFields, Problem
from foredraft.serve.replies import Event, Part, Reply, Sample
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
    nothing: ClassVar[Any]  # what a chunk adds that has log-probabilities or provenance, but no text
    over: ClassVar[Any]  # what the last chunk of a choice adds

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(f"{self.prefix}-{id}", *args)
        self._provenance = [Provenance(self.texts.shown) for _ in self.samples]
        self.asked, options = self.job.request, self.job.request.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._tells_usage_so_far = bool(options and options.continuous_usage_stats)

    @staticmethod
    def failure(problem: Problem) -> Event:
        return problem.body

    def part(self, part: Part) -> Iterator[Event]:
        (scores, beside, end), added, sample = self._shown(part), self.added(part), part.sample
        if not added and (scores or any(beside.values())):
            added = [self.nothing]
        choices: list[dict[str, Any]] = [
            {"index": sample.index, self.added_as: each, "logprobs": None, "finish_reason": None}
            for each in (*added, *([self.over] if end else ()))
        ]
        if scores is not None:
            texts = (at for at, each in enumerate(added) if isinstance(each, str) or each.get("content"))
            choices[next(texts, 0)]["logprobs"] = scores
        if added:
            choices[0] |= beside
        if end:
            choices[-1] |= end
        usage = self._usage() if self._tells_usage_so_far else None
        tells_ids = part.first and self.asked.return_token_ids and not (self.one_prompt and sample.index)
        for place, choice in enumerate(choices):
            chunk = self._head(1, [choice])
            if tells_ids and not place:
                (chunk if self.one_prompt else choice)["prompt_token_ids"] = self._prompt_ids(sample)
            if choice is choices[-1] and all(each.output is not None for each in self.samples):
                chunk["metrics"] = self._metrics()
            if self._tells_usage:
                chunk["usage"] = usage
            yield chunk

    def end(self) -> Iterator[Event]:
        if self._tells_usage:
            yield self._head(1, []) | {"usage": self._usage()}

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        choices = []
        for part in parts:
            scores, beside, end = self._shown(part)
            choice = {"index": part.sample.index, **self.text(part.sample), "logprobs": scores} | end | beside
            choices.append(choice if self.one_prompt else choice | self._prompt(part))
        whole = self._head(0, choices) | {"usage": self._usage(), "metrics": self._metrics()}
        return whole | self._prompt(parts[0]) if self.one_prompt else whole

    def _shown(self, part: Part) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the scores of a part, what stands beside its text, and what its end tells."""
        end: dict[str, Any] = {}
        if (output := part.output) is not None:
            reason = FINISH[output.finish_reason]
            last = output.token_ids[-1] if output.token_ids else None
            stopped = output.finish_reason == "eos" and last in self.job.one.params.stop_token_ids
            end = {
                "finish_reason": "tool_calls" if reason == "stop" and part.sample.blocks.calls else reason,
                "stop_reason": last if stopped else output.stopped_by, "seed": output.seed,
                "lossless": output.lossless, "deterministic": output.deterministic,
            }  # fmt: skip
        beside: dict[str, Any] = {}
        if self.asked.provenance:
            provenance = self._provenance[part.sample.index]
            beside["provenance"], beside["trace"] = provenance.add(part.pieces)
        if self.asked.return_token_ids:
            beside["token_ids"] = [id for piece in part.pieces for id in piece.token_ids]
        return self.logprobs(part), beside, end

    def _head(self, kind: int, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": self.objects[kind], "choices": choices,
        }  # fmt: skip

    @abstractmethod
    def added(self, part: Part) -> list[Any]:
        """Return what a part adds to a choice, one item for each chunk; at least one the first time."""

    @abstractmethod
    def text(self, sample: Sample) -> dict[str, Any]:
        """Return the text of a choice of a whole reply."""

    @abstractmethod
    def logprobs(self, part: Part) -> Any:
        """Return the log-probabilities of what a part shows; None where it shows none."""

    def _prompt(self, part: Part) -> dict[str, Any]:
        """Return what a whole reply tells of the prompt of a sample."""
        made: dict[str, Any] = {}
        if self.asked.return_token_ids:
            made["prompt_token_ids"] = self._prompt_ids(part.sample)
        if (top := self.asked.prompt_logprobs) is not None:
            scores = () if part.output is None else part.output.prompt_logprobs or ()
            made["prompt_logprobs"] = self.texts.prompt_scores(scores, top)
        return made

    def _prompt_ids(self, sample: Sample) -> list[int]:
        return self.generation.handles[sample.index // self.job.one.n].prompt

    def _usage(self) -> dict[str, Any]:
        """Return the tokens that the reply has used so far; the prompt's count once for all its samples."""
        new, stats = sum(sample.tokens for sample in self.samples), self._stats()
        ended = [0 if each.output is None else each.output.cached_tokens for each in self.samples]
        cached = [max(ended[at : at + self.job.one.n]) for at in range(0, len(ended), self.job.one.n)]
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
    request, types = ChatRequest, (reply_types.Chat, reply_types.ChatChunk)
    route, objects = "chat_completions", ("chat.completion", "chat.completion.chunk")
    lengths = LengthFields("messages", ("max_completion_tokens", "max_tokens"), SHORTEN)
    prefix, added_as, nothing, over, one_prompt = "chatcmpl", "delta", {"content": ""}, {}, True

    def added(self, part: Part) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, block, text in part.steps:
            call = block.call
            if kind == "delta" and block.thinking:
                deltas.append({"reasoning_content": text, "reasoning": text})
            elif kind == "delta" and call is None:
                deltas.append({"content": text})
            elif call is not None and kind != "close":
                begun: dict[str, Any] = {"id": call.id, "type": "function"} if kind == "open" else {}
                function = {"name": call.name, "arguments": ""} if kind == "open" else {"arguments": text}
                deltas.append({"tool_calls": [{"index": call.index, **begun, "function": function}]})
        if part.first:
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

    def logprobs(self, part: Part) -> Any:
        asked = part.first and part.output is not None and self.job.one.params.logprobs is not None
        if not part.shown and not asked:
            return None
        return {"content": self.texts.chat_logprobs(part.shown), "refusal": None}


class CompletionReply(_Reply):
    request, types = CompletionRequest, (reply_types.Completion, reply_types.CompletionChunk)
    route, operation, objects = "completions", "text_completion", ("text_completion", "text_completion")
    lengths = LengthFields("prompt", ("max_tokens",), SHORTEN)
    prefix, added_as, nothing, over, one_prompt = "cmpl", "text", "", "", False

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(id, *args)
        self._offsets = [Offsets(self.texts) for _ in self.samples]
        # the prompts, with their texts where the client sent text
        self._sent = list(zip(self.job.prompts, self.asked.sent, strict=True))
        self._echoes = [self.texts.echoed(*each) if self.asked.echo else "" for each in self._sent]

    def added(self, part: Part) -> list[str]:
        begun = self._echoes[part.sample.index // self.job.one.n] if part.first else ""
        text = begun + "".join(step.text for step in part.steps)
        return [text] if text or part.first else []

    def text(self, sample: Sample) -> dict[str, Any]:
        echo = self._echoes[sample.index // self.job.one.n]
        return {"text": echo + sample.blocks.content}

    def logprobs(self, part: Part) -> Any:
        top = self.job.one.params.logprobs
        if top is None:
            return None
        offsets, found = self._offsets[part.sample.index], None
        if part.first and self.asked.echo:
            sent = self._sent[part.sample.index // self.job.one.n]
            found = offsets.prompt(*sent, part.pieces[0].prompt_logprobs or (), top)
        if found is None and not part.shown and not (part.first and part.output is not None):
            return None
        new = offsets.logprobs(part.shown)
        return new if found is None else {name: found[name] + new[name] for name in found}
