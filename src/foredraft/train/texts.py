"""Texts: files of data, read into documents whose prompts do not count; the replies and the frequent tokens
in them.

A text file is one document; so is a line of JSON, or a row of a Parquet table:

    {"text": ...}                       all of it counts
    {"prompt": ..., "response": ...}    the response counts
    {"messages": [...]}                 every reply of the assistant counts, in the model's chat template

A reply counts where the conversation's text begins with all before it and with all up to its end: templates
change earlier turns at times, as those that drop reasoning. Rendering that for every reply takes time that
grows with the square of their number, so a longer conversation is read in windows: what a reply adds is
rendered after the opening messages and the exchange before it alone. Where all windows make up the
conversation's text, and whole texts of some replies agree, that holds; elsewhere whole texts decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError, Option, RequestError, Text
from foredraft.files import TEXT, errors_named, is_no_file
from foredraft.model.chat import ChatTemplate
from foredraft.model.config import parse_json
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.target import Document


def frequent_tokens(documents: Sequence[Document], size: int | None, spec: ModelSpec) -> Sequence[int] | None:
    """Return the tokens that are learned most often, those that end a text among them, in ascending order."""
    if size is None or size >= spec.vocab_size:
        return None
    counts: Counter[int] = Counter()
    for document in documents:
        pairs = zip(document.ids[1:], document.counts[1:], strict=True)
        counts.update(id for id, is_counted in pairs if is_counted)
    ends = list(spec.eos_token_ids)
    tokens = dict.fromkeys([*ends, *(id for id, _ in counts.most_common()), *range(spec.vocab_size)])
    return sorted(list(tokens)[:size])


FEW = 16  # replies of which whole texts are cheaper than windows
MAX_REPLIES = 500  # of which whole texts are rendered
MAX_WINDOW = 32  # messages of a window, and of those that open a conversation

Span = tuple[int, int]  # first character of a reply, and the one after its last


class BadRecordError(ValueError):
    """A line or a row that holds no document."""


def reply_spans(chat: ChatTemplate, messages: Sequence[Any], whole: str) -> list[Span]:
    """Return where the replies that count stand in a conversation's text."""
    replies = [at for at, message in enumerate(messages) if role_of(message) == "assistant"]
    if len(replies) > FEW:
        spans = _by_windows(chat, messages, replies, whole)
        if spans is not None:
            return [span for span in spans if span[0] < span[1]]
    if len(replies) > MAX_REPLIES:
        raise BadRecordError(
            f"has {len(replies):,} replies of the assistant, more than the {MAX_REPLIES} that are read where"
            " the chat template changes earlier turns"
        )
    found = (_by_whole_texts(chat, messages, at, whole) for at in replies)
    return [span for span in found if span is not None]


def role_of(message: Any) -> object:
    """Return the role of a message; None where it has none."""
    return message.get("role") if isinstance(message, Mapping) else None


def _by_whole_texts(chat: ChatTemplate, messages: Sequence[Any], at: int, whole: str) -> Span | None:
    """Return where the reply at a place stands; None where it does not count."""
    before = chat.render(messages[:at], add_generation_prompt=True) if at else ""
    after = chat.render(messages[: at + 1], add_generation_prompt=False)
    counts = whole.startswith(before) and whole.startswith(after) and len(before) < len(after)
    return (len(before), len(after)) if counts else None


def _by_windows(
    chat: ChatTemplate, messages: Sequence[Any], replies: Sequence[int], whole: str
) -> list[Span] | None:
    """Return where all replies stand; None where windows do not tell."""
    roles = [role_of(message) for message in messages]
    opening = roles.index("user") if "user" in roles else 0
    if opening > MAX_WINDOW:
        return None
    try:
        first = _by_whole_texts(chat, messages, replies[0], whole)
        if first is None:
            return None
        spans = [first]
        for former, at in pairwise(replies):
            start = _window_start(roles, opening, former)
            if at - start > MAX_WINDOW:
                return None
            window = [*messages[:opening], *messages[start : at + 1]]
            span = _next_span(chat, window, at - former, spans[-1][1], whole)
            if span is None:
                return None
            spans.append(span)
        if spans[-1][1] != len(whole):
            return None
        # the last reply, that in the middle, that in the middle before it, and so on
        last = len(replies) - 1
        places = [last >> halving for halving in range(last.bit_length())]
        agree = all(
            _by_whole_texts(chat, messages, replies[place], whole) == spans[place] for place in places
        )
    except RequestError:  # some templates refuse a conversation that begins in its middle
        return None
    return spans if agree else None


def _window_start(roles: Sequence[object], opening: int, former: int) -> int:
    """Return the place of the question before a reply, or one that is further away than `MAX_WINDOW`."""
    start = former
    while start > opening and roles[start] != "user" and former - start <= MAX_WINDOW:
        start -= 1
    return max(start, opening)


def _next_span(chat: ChatTemplate, window: Sequence[Any], since: int, end: int, whole: str) -> Span | None:
    """Return where the last reply of a window stands in the conversation's text; None where it does not."""
    former = chat.render(window[:-since], add_generation_prompt=False)
    before = chat.render(window[:-1], add_generation_prompt=True)
    after = chat.render(window, add_generation_prompt=False)
    if not (before.startswith(former) and after.startswith(before)):
        return None
    start = end + len(before) - len(former)
    fits = whole.startswith(after[len(former) :], end)
    return (start, start + len(after) - len(before)) if fits else None


JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
SHAPES = 'a "text", a "prompt" with a "response", or "messages"'
CORRECT: Text = "correct it, or give ", Option("skip_bad_lines")
EXAMPLE: Text = 'give lines like {"prompt": "Hello", "response": "World"}'
TEXT_PROMPT = 64  # tokens of a piece of text that the target continues


class DocumentReader:
    """Reads files of data."""

    def __init__(
        self,
        tokenizer: Tokenizer,  # the target's
        eos: int | None,  # ends a response; None: nothing does
        length: int,  # tokens of a document at most
        *,
        skip_bad_lines: bool = False,  # leave lines and rows out that hold no document, and count them
        prompts_count: bool = False,  # a "prompt" without a "response" is a text, all of which counts
        option: str = "data",  # the option that names the files, for errors
    ) -> None:
        self.tokenizer, self.eos, self.length = tokenizer, eos, length
        self.skip_bad_lines, self.prompts_count, self.option = skip_bad_lines, prompts_count, option
        self.skipped = 0

    def corpus(self, files: Sequence[Path]) -> list[Document]:
        """Return the documents of files, in order; `skipped` counts the bad lines that were left out."""
        documents = [piece for record in self._records(files) for piece in self._pieces(*record)]
        if not documents:
            raise ConfigError(
                "has no token to learn from: no response, and no text of two tokens or more",
                option=self.option, value=" ".join(map(str, files)), remedy=f"give documents with {SHAPES}",
            )  # fmt: skip
        return documents

    def prompts(self, files: Sequence[Path]) -> list[list[int]]:
        """Return the prompts of the files' documents: of a text, the beginning of each piece."""
        found: list[list[int]] = []
        for ids, counts in self._records(files):
            first = counts.index(True) if True in counts else len(ids)
            if first > 1:
                found.append(ids[: min(first, self.length)])
            else:
                found += [ids[at : at + TEXT_PROMPT] for at in range(0, len(ids), self.length)]
        return [prompt for prompt in found if prompt]

    def _records(self, files: Sequence[Path]) -> Iterator[tuple[list[int], list[bool]]]:
        """Yield the token ids of every document, and whether each counts."""
        self.skipped = 0
        for file in files:
            for where, record in _read(file, self.option):
                try:
                    yield self._encoded(record)
                except BadRecordError as error:
                    if where is not None and self.skip_bad_lines:
                        self.skipped += 1
                        continue
                    problem = str(error) if where is None else f"{where} {error}"
                    remedy = EXAMPLE if where is None else CORRECT
                    named = {"option": self.option, "value": str(file)}
                    raise ConfigError(problem, **named, remedy=remedy) from error

    def _encoded(self, record: Any) -> tuple[list[int], list[bool]]:
        if isinstance(record, BadRecordError):
            raise record
        try:
            match record:
                case {"messages": [*messages]}:
                    return self._chat(messages)
                case {"prompt": str(prompt), "response": str(response)}:
                    return self._exchange(prompt, response)
                case {"text": str(text)}:
                    return self._whole(text)
                case {"prompt": str(text)} if self.prompts_count:
                    return self._whole(text)
        except RequestError as error:
            raise BadRecordError(f"cannot be read: {error}") from error
        raise BadRecordError(f"is no object with {SHAPES}")

    def _whole(self, text: str) -> tuple[list[int], list[bool]]:
        ids = self.tokenizer.encode(text)
        return ids, [True] * len(ids)

    def _exchange(self, prompt: str, response: str) -> tuple[list[int], list[bool]]:
        before = self.tokenizer.encode(prompt)
        after = self.tokenizer.encode(response, add_special_tokens=False)
        after += [] if self.eos is None else [self.eos]
        return before + after, [False] * len(before) + [True] * len(after)

    def _chat(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
        """Encode a conversation; where the template changes earlier turns, the last reply alone counts."""
        chat = self.tokenizer.chat
        if chat is None:
            raise BadRecordError("has messages, but the model's folder has no chat template")
        last = max((at for at, each in enumerate(messages) if role_of(each) == "assistant"), default=None)
        if last is None:
            raise BadRecordError("has no message of the assistant")
        messages = messages[: last + 1]
        whole = chat.render(messages, add_generation_prompt=False)
        spans = reply_spans(chat, messages, whole)
        if not spans:
            raise BadRecordError("has no reply that the chat template writes after its own beginning of it")
        encoding = self.tokenizer.encoding(whole, add_special_tokens=False)
        return list(encoding.ids), _within(encoding.offsets, spans)

    def _pieces(self, ids: list[int], counts: list[bool]) -> Iterator[Document]:
        for start in range(0, len(ids), self.length):
            piece = slice(start, start + self.length)
            document = Document(tuple(ids[piece]), tuple(counts[piece]))
            if document.counted:
                yield document


def _within(tokens: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether a span holds each token; both are a first character and the one after the last."""
    ordered = sorted(spans)
    firsts = [first for first, _ in ordered]
    furthest = [-1, *accumulate((last for _, last in ordered), max)]  # of the spans before a place
    return [stop <= furthest[bisect_right(firsts, start)] for start, stop in tokens]


def _read(file: Path, option: str) -> Iterator[tuple[str | None, Any]]:
    """Yield where each record of a file is, and the record; of a text file nowhere."""

    def refused(problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"which {problem}", option=option, value=str(file), remedy=remedy)

    no_text = refused("is not UTF-8 text", "give text, JSON Lines (.jsonl) or a Parquet table (.parquet)")
    if is_no_file(file):
        raise refused("is no file", "give a file")
    if file.suffix in PARQUET:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise refused("needs the package pyarrow", "pip install 'foredraft[train]'") from error
        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except UnicodeDecodeError as error:
            raise no_text from error
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            first = next(iter(str(error).splitlines()), "")
            raise refused(f"is no Parquet table ({first})", "give another file") from error
        for number, row in enumerate(rows, 1):
            yield f"row {number}", {name: value for name, value in row.items() if value is not None}
        return
    with errors_named(file, option, "give a file", "which cannot be read"):
        content = file.read_bytes()
    try:
        text = content.decode(TEXT)
    except UnicodeDecodeError as error:
        raise no_text from error
    if not text.strip():
        raise refused("is empty", "leave it out")
    if "\0" in text:
        raise no_text
    if file.suffix not in JSON_LINES:
        yield None, {"text": text}
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = parse_json(line)
            except ValueError:
                record = BadRecordError("is not JSON")
            yield f"line {number}", record
