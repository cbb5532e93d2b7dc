"""Texts: files of data, read into documents whose prompts do not count.

A text file is one document. A line of JSON, or a row of a Parquet table, is one document, too:

    {"text": ...}                       all of it counts
    {"prompt": ..., "response": ...}    the response counts
    {"messages": [...]}                 every reply of the assistant counts, in the model's chat template

A text as long as it may be is cut into pieces of `length` tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError, Option, RequestError
from foredraft.files import is_no_file
from foredraft.model.config import parse_json
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.packed_documents import Document
from foredraft.train.reply_spans import MAX_REPLIES, TooManyRepliesError, reply_spans, role_of

__all__ = ["Corpus", "Reader"]

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
SHAPES = 'a "text", a "prompt" with a "response", or "messages"'
EXAMPLE = 'give lines like {"prompt": "Hello", "response": "World"}'
TEXT_PROMPT = 64  # tokens of a piece of text that the target continues


class BadRecordError(ValueError):
    """A line or a row that holds no document."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """What the files hold.

    Attributes:
        documents: In the order of the files.
        skipped: Bad lines that were left out.
    """

    documents: list[Document]
    skipped: int


class Reader:
    """Reads files of data.

    Args:
        tokenizer: The target's.
        eos: Ends a response; None: nothing does.
        length: Tokens of a document at most.
        skip_bad_lines: Leave lines and rows out that hold no document, and count them.
        prompts_count: A "prompt" without a "response" is a text, all of which counts.
        option: The option that names the files, for errors.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: int | None,
        length: int,
        *,
        skip_bad_lines: bool = False,
        prompts_count: bool = False,
        option: str = "data",
    ) -> None:
        self.tokenizer, self.eos, self.length = tokenizer, eos, length
        self.skip_bad_lines, self.prompts_count, self.option = skip_bad_lines, prompts_count, option
        self.skipped = 0

    def corpus(self, files: Sequence[Path]) -> Corpus:
        """Return the documents of files.

        Raises:
            ConfigError: A file cannot be read or holds nothing, a line is bad, or nothing in them counts.
        """
        documents = [piece for record in self._records(files) for piece in self._pieces(*record)]
        if not documents:
            raise ConfigError(
                "has no token to learn from: no response, and no text of two tokens or more",
                option=self.option, value=" ".join(map(str, files)), remedy=f"give documents with {SHAPES}",
            )  # fmt: skip
        return Corpus(documents, self.skipped)

    def prompts(self, files: Sequence[Path]) -> list[list[int]]:
        """Return the prompts of the files' documents: of a text, the beginning of each piece.

        Raises:
            ConfigError: As `corpus`.
        """
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
                    if not self.skip_bad_lines or where is None:
                        raise self._bad(file, where, str(error)) from error
                    self.skipped += 1

    def _bad(self, file: Path, where: str | None, problem: str) -> ConfigError:
        place = "" if where is None else f"{where} "
        remedy: tuple[str | Option, ...] = (EXAMPLE,)
        if where is not None:
            remedy = ("correct it, or give ", Option("skip_bad_lines"))
        return ConfigError(f"{place}{problem}", option=self.option, value=str(file), remedy=remedy)

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
        try:
            spans = reply_spans(chat, messages, whole)
        except TooManyRepliesError as error:
            raise BadRecordError(
                f"has {error.args[0]:,} replies of the assistant, more than the {MAX_REPLIES} that are read"
                " where the chat template changes earlier turns"
            ) from error
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
    """Yield where each record of a file is, and the record; of a text file nowhere.

    Raises:
        ConfigError: The file cannot be read, is empty, or holds no text.
    """
    if is_no_file(file):
        raise ConfigError("which is no file", option=option, value=str(file), remedy="give a file")
    if file.suffix in PARQUET:
        yield from _rows(file, option)
        return
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")  # a byte order mark is no text
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})", option=option, value=str(file), remedy="give a file"
        ) from error
    except UnicodeDecodeError as error:
        raise _no_text(file, option) from error
    if not text.strip():
        raise ConfigError("which is empty", option=option, value=str(file), remedy="leave it out")
    if "\0" in text:
        raise _no_text(file, option)
    if file.suffix not in JSON_LINES:
        yield None, {"text": text}
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"line {number}", _parsed(line)


def _no_text(file: Path, option: str) -> ConfigError:
    return ConfigError(
        "which is not UTF-8 text", option=option, value=str(file),
        remedy="give text, JSON Lines (.jsonl) or a Parquet table (.parquet)",
    )  # fmt: skip


def _parsed(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return BadRecordError("is not JSON")


def _rows(file: Path, option: str) -> Iterable[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            "which needs the package pyarrow", option=option, value=str(file),
            remedy="pip install 'foredraft[train]'",
        ) from error  # fmt: skip
    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"which is no Parquet table ({first})", option=option, value=str(file), remedy="give another file"
        ) from error
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError as error:
        raise _no_text(file, option) from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", {name: value for name, value in row.items() if value is not None}
