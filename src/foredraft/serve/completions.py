"""POST /v1/chat/completions and /v1/completions: the replies, whole or in chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Literal, NotRequired, TypeAlias, TypeVar

from typing_extensions import TypedDict

import foredraft
from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.kinds.tables import PREDICTION
from foredraft.llm.output import Output, Piece
from foredraft.serve.blocks import BlockEvent
from foredraft.serve.problems import Error, LengthFields, Problem, check_output
from foredraft.serve.replies import Reply, Sample
from foredraft.serve.requests import ChatRequest, CompletionRequest
from foredraft.serve.scored_text import Origin, Provenance, Round
from foredraft.serve.token_texts import ChatLogprobs, CompletionLogprobs, Offsets, PromptScore

Reason: TypeAlias = Literal["stop", "length", "content_filter", "tool_calls"]
# Why the library ends a text -> finish_reason of the API.
FINISH: dict[str, Reason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "constraint": "content_filter",
    "cancelled": "stop",
}
FINGERPRINT = f"foredraft-{foredraft.__version__}"
SHORTEN = 'truncate_prompt "left"'


class PromptTokens(TypedDict, closed=True):
    cached_tokens: int


class CompletionTokens(TypedDict, closed=True):
    """Those of the reasoning, and of the request's prediction in samples that have ended."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict, closed=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class Drafting(TypedDict, closed=True):
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafters: dict[str, int]


class RequestMetrics(TypedDict, closed=True):
    """How drafting went, in vLLM's shape."""

    speculative_decoding: Drafting
    tokens_per_second: float


class Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class WholeReply(Head):
    usage: Usage
    metrics: RequestMetrics


class Chunk(Head):
    metrics: NotRequired[RequestMetrics]
    usage: NotRequired[Usage | None]


class ReplyChoice(TypedDict):
    """A choice of a whole reply; what follows its reason is no part of the API.

    `stop_reason` is the stop string that ended the text, or the id of `stop_token_ids`.
    """

    index: int
    finish_reason: Reason
    stop_reason: str | int | None
    seed: int
    lossless: bool
    deterministic: bool
    token_ids: NotRequired[list[int]]
    provenance: NotRequired[list[Origin]]
    trace: NotRequired[list[Round]]


class ChunkChoice(TypedDict):
    """A choice of a chunk; the last one of a sample has the reason and what follows it."""

    index: int
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    seed: NotRequired[int]
    lossless: NotRequired[bool]
    deterministic: NotRequired[bool]
    token_ids: NotRequired[list[int]]
    provenance: NotRequired[list[Origin]]
    trace: NotRequired[list[Round]]


class CalledFunction(TypedDict, closed=True):
    name: str
    arguments: str


class ToolCall(TypedDict, closed=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict, closed=True):
    """A reply; its reasoning has both names that clients look for."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(ReplyChoice, closed=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class Chat(WholeReply, closed=True):
    """The reply of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptScore] | None]]


class FunctionPart(TypedDict, closed=True):
    name: NotRequired[str]
    arguments: str


class ToolCallPart(TypedDict, closed=True):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPart


class Delta(TypedDict, closed=True, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: str
    tool_calls: list[ToolCallPart]


class ChatPart(ChunkChoice, closed=True):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(Chunk, closed=True):
    """A chunk of a streamed chat. The one with the usage has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChoice(ReplyChoice, closed=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptScore] | None]]


class Completion(WholeReply, closed=True):
    """The reply of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionPart(ChunkChoice, closed=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(Chunk, closed=True):
    """A chunk of a streamed completion. The one with the usage has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionPart]


C = TypeVar("C", ChatChoice, CompletionChoice)
P = TypeVar("P", ChatPart, CompletionPart)


class _Reply(Reply, Generic[C, P]):
    """Both shapes, but for the form of a text and of log-probabilities."""

    done = b"data: [DONE]\n\n"
    prefix: ClassVar[str]  # of ids
    silence: ClassVar[Any]  # what a chunk adds that has log-probabilities or provenance, but no text
    over: ClassVar[Any]  # what the last chunk of a choice adds

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(f"{self.prefix}-{id}", *args)
        self._begun: set[int] = set()  # samples of which something was shown
        self._provenance = [Provenance(self.texts.shown) for _ in self.samples]

    @staticmethod
    def failure(problem: Problem) -> Error:
        return problem.body

    def part(self, sample: Sample, pieces: list[Piece]) -> Iterator[Chunk]:
        steps, output = sample.take(pieces), sample.output
        if output is not None:
            check_output(output)
        first = sample.index not in self._begun
        scores = self.logprobs(sample, pieces, first=first)
        origins, rounds = self._provenance[sample.index].add(pieces) if self.job.provenance else ([], [])
        ids = [id for piece in pieces for id in piece.token_ids] if self.job.token_ids else []
        self._begun.add(sample.index)
        added = self.added(sample, steps, first=first)
        if not added and (scores or origins or rounds or ids):
            added = [self.silence]
        parts = [self.choice_part(sample, each) for each in added]
        if scores is not None:
            parts[self.with_text(added)]["logprobs"] = scores
        if parts and self.job.provenance:
            parts[0]["provenance"], parts[0]["trace"] = origins, rounds
        if parts and self.job.token_ids:
            parts[0]["token_ids"] = ids
        if output is not None:
            last = self.choice_part(sample, self.over)
            last["finish_reason"] = _reason(sample, output)
            last["stop_reason"] = _stop_reason(output, self.job.params)
            last["seed"], last["lossless"] = output.seed, output.lossless
            last["deterministic"] = output.deterministic
            parts.append(last)
        usage = self._usage() if self.job.continuous_usage else None
        for place, part in enumerate(parts):
            chunk = self.chunk([part])
            if first and not place and self.job.token_ids:
                self.with_prompt(chunk, sample)
            if part is parts[-1] and all(each.output is not None for each in self.samples):
                chunk["metrics"] = self._metrics()
            if self.job.include_usage:
                chunk["usage"] = usage
            yield chunk

    def end(self) -> Iterator[Chunk]:
        if self.job.include_usage:
            chunk = self.chunk([])
            chunk["usage"] = self._usage()
            yield chunk

    def _choices(self) -> list[C]:
        choices = []
        for sample in self.samples:
            output, pieces = self.in_one_piece(sample)
            choice = self.choice(sample, output)
            choice["logprobs"] = self.logprobs(sample, pieces, first=True)
            if self.job.provenance:
                choice["provenance"], choice["trace"] = self._provenance[sample.index].add(pieces)
            if self.job.token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        return choices

    @abstractmethod
    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[Any]:
        """Return what steps add to a choice, one item for each chunk; at least one the first time."""

    @abstractmethod
    def choice_part(self, sample: Sample, added: Any) -> P:
        """Return the choice of a chunk, without log-probabilities."""

    @abstractmethod
    def choice(self, sample: Sample, output: Output) -> C:
        """Return the choice of a whole reply, without log-probabilities."""

    def with_text(self, added: list[Any]) -> int:
        """Return the place of the chunk that has the text, among what steps add to a choice."""
        return 0

    @abstractmethod
    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> Any:
        """Return the log-probabilities of what the pieces just taken show; None where they show none."""

    @abstractmethod
    def chunk(self, parts: list[P]) -> Chunk:
        """Return a chunk."""

    @abstractmethod
    def with_prompt(self, chunk: Any, sample: Sample) -> None:
        """Add the prompt's token ids to the first chunk of a sample."""

    def _prompt_scores(self, output: Output) -> list[dict[str, PromptScore] | None]:
        return self.texts.prompt_scores(output.prompt_logprobs or (), self.job.prompt_scores or 0)

    def _prompt(self, sample: Sample) -> list[int]:
        return self.generation.handles[sample.index // self.job.n].prompt

    def _usage(self) -> Usage:
        """Return the tokens that the reply has used so far; the prompt's count once for all its samples."""
        new, stats = sum(sample.tokens for sample in self.samples), self._stats()
        cached = [0] * len(self.job.prompts)
        for sample in self.samples:
            if sample.output is not None:
                place = sample.index // self.job.n
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

    def _metrics(self) -> RequestMetrics:
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
        }


class ChatReply(_Reply[ChatChoice, ChatPart]):
    """Of POST /v1/chat/completions."""

    request, types = ChatRequest, (Chat, ChatChunk)
    route = "chat_completions"
    lengths = LengthFields("messages", ("max_completion_tokens", "max_tokens"), SHORTEN)
    prefix, silence, over = "chatcmpl", {"content": ""}, {}
    read = ChatRequest.read

    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[Delta]:
        deltas = [delta for step in steps if (delta := _delta(step)) is not None]
        if first:
            begun: Delta = deltas[0] if deltas else {"content": ""}
            deltas[:1] = [{"role": "assistant", **begun}]
        return deltas

    def choice_part(self, sample: Sample, added: Delta) -> ChatPart:
        return {"index": sample.index, "delta": added, "logprobs": None, "finish_reason": None}

    def choice(self, sample: Sample, output: Output) -> ChatChoice:
        content, calls = sample.blocks.content, sample.blocks.calls
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
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
        return {
            "index": sample.index, "finish_reason": _reason(sample, output), "message": message,
            "logprobs": None,
            "stop_reason": _stop_reason(output, self.job.params), "seed": output.seed,
            "lossless": output.lossless, "deterministic": output.deterministic,
        }  # fmt: skip

    def with_text(self, added: list[Delta]) -> int:
        return next((place for place, each in enumerate(added) if each.get("content")), 0)

    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> ChatLogprobs | None:
        asked = first and sample.output is not None and self.job.params.logprobs is not None
        if not sample.shown and not asked:
            return None
        return {"content": self.texts.chat_logprobs(sample.shown), "refusal": None}

    def with_prompt(self, chunk: ChatChunk, sample: Sample) -> None:
        if not sample.index:  # there is one prompt
            chunk["prompt_token_ids"] = self._prompt(sample)

    def chunk(self, parts: list[ChatPart]) -> ChatChunk:
        return {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": "chat.completion.chunk", "choices": parts,
        }  # fmt: skip

    def whole(self) -> Chat:
        made: Chat = {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": "chat.completion", "choices": self._choices(), "usage": self._usage(),
            "metrics": self._metrics(),
        }  # fmt: skip
        sample = self.samples[0]
        if self.job.token_ids:
            made["prompt_token_ids"] = self._prompt(sample)
        if self.job.prompt_scores is not None and sample.output is not None:
            made["prompt_logprobs"] = self._prompt_scores(sample.output)
        return made


class CompletionReply(_Reply[CompletionChoice, CompletionPart]):
    """Of POST /v1/completions."""

    request, types = CompletionRequest, (Completion, CompletionChunk)
    route, operation = "completions", "text_completion"
    lengths = LengthFields("prompt", ("max_tokens",), SHORTEN)
    prefix, silence, over = "cmpl", "", ""
    read = CompletionRequest.read

    def __init__(self, id: str, *args: Any) -> None:
        super().__init__(id, *args)
        self._offsets = [Offsets(self.texts) for _ in self.samples]
        self._echoes: dict[int, str] = {}  # by the place of the prompt

    def added(self, sample: Sample, steps: list[BlockEvent], *, first: bool) -> list[str]:
        begun = self._echo(sample) if first else ""
        text = begun + "".join(step.text for step in steps)
        return [text] if text or first else []

    def choice_part(self, sample: Sample, added: str) -> CompletionPart:
        return {"index": sample.index, "text": added, "logprobs": None, "finish_reason": None}

    def choice(self, sample: Sample, output: Output) -> CompletionChoice:
        made: CompletionChoice = {
            "index": sample.index, "finish_reason": _reason(sample, output),
            "text": self._echo(sample) + sample.blocks.content, "logprobs": None,
            "stop_reason": _stop_reason(output, self.job.params), "seed": output.seed,
            "lossless": output.lossless, "deterministic": output.deterministic,
        }  # fmt: skip
        if self.job.token_ids:
            made["prompt_token_ids"] = self._prompt(sample)
        if self.job.prompt_scores is not None:
            made["prompt_logprobs"] = self._prompt_scores(output)
        return made

    def logprobs(self, sample: Sample, pieces: list[Piece], *, first: bool) -> CompletionLogprobs | None:
        if self.job.params.logprobs is None:
            return None
        offsets, found = self._offsets[sample.index], None
        if first and self.job.echo:
            scores = pieces[0].prompt_logprobs or ()
            found = offsets.prompt(*self._sent(sample), scores, self.job.params.logprobs)
        if found is None and not sample.shown and not (first and sample.output is not None):
            return None
        new = offsets.logprobs(sample.shown)
        return new if found is None else _joined(found, new)

    def with_prompt(self, chunk: CompletionChunk, sample: Sample) -> None:
        chunk["choices"][0]["prompt_token_ids"] = self._prompt(sample)

    def _sent(self, sample: Sample) -> tuple[list[int], str | None]:
        """Return the prompt of a sample, and its text where the client sent text."""
        place = sample.index // self.job.n
        return self.job.prompts[place], self.job.sent[place]

    def _echo(self, sample: Sample) -> str:
        """Return the prompt that the text of a sample begins with; "" where it begins with none."""
        if not self.job.echo:
            return ""
        place = sample.index // self.job.n
        if place not in self._echoes:
            self._echoes[place] = self.texts.echoed(*self._sent(sample))
        return self._echoes[place]

    def chunk(self, parts: list[CompletionPart]) -> CompletionChunk:
        return {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": "text_completion", "choices": parts,
        }  # fmt: skip

    def whole(self) -> Completion:
        return {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT,
            "object": "text_completion", "choices": self._choices(), "usage": self._usage(),
            "metrics": self._metrics(),
        }  # fmt: skip


def _delta(step: BlockEvent) -> Delta | None:
    """Return what a step adds to a message: a text, a call, or arguments; None if it adds nothing."""
    call = step.block.call
    if step.kind == "delta":
        if step.block.thinking:
            return {"reasoning_content": step.text, "reasoning": step.text}
        if call is None:
            return {"content": step.text}
        return {"tool_calls": [{"index": call.index, "function": {"arguments": step.text}}]}
    if step.kind == "close" or call is None:
        return None
    begun: ToolCallPart = {
        "index": call.index, "id": call.id, "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }  # fmt: skip
    return {"tool_calls": [begun]}


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _stop_reason(output: Output, params: SamplingParams) -> str | int | None:
    """Return the stop string that ended a text, or why its constraint did, or the stop token."""
    last = output.token_ids[-1] if output.token_ids else None
    if output.finish_reason == "eos" and last in params.stop_token_ids:
        return last
    return output.stopped_by


def _reason(sample: Sample, output: Output) -> Reason:
    reason = FINISH[output.finish_reason]
    return "tool_calls" if reason == "stop" and sample.blocks.calls else reason
