"""Files of data: what counts in them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ConfigError
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.batches import Batches, hold_out
from foredraft.train.packed_documents import Document
from foredraft.train.texts import Reader
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import assert_caught, defect

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_checkpoint(tmp_path_factory.mktemp("m"), tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = Tokenizer.from_folder(folder)
    assert made is not None
    return made


def lines(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return file


def counted_text(tokenizer: Tokenizer, document: Document) -> str:
    ids = [id for id, counts in zip(document.ids, document.counts, strict=True) if counts]
    return tokenizer.decode(ids, skip_special=True)


def read(tokenizer: Tokenizer, file: Path, length: int = 500, **more: Any) -> list[Document]:
    return Reader(tokenizer, EOS, length, **more).corpus([file]).documents


def test_of_an_exchange_the_response_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    check_exchange(tokenizer, tmp_path)


def check_exchange(tokenizer: Tokenizer, folder: Path) -> None:
    [document] = read(tokenizer, lines(folder, {"prompt": "a few tokens", "response": " ahead of it"}))
    assert counted_text(tokenizer, document) == " ahead of it"
    assert document.ids[-1] == EOS and document.counts[-1]
    prompt = tokenizer.encode("a few tokens")
    assert list(document.ids[: len(prompt)]) == prompt and not any(document.counts[: len(prompt)])


def test_prompt_tokens_that_count_are_caught(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_counts(exchange: Any) -> Any:
        def spoilt(reader: Reader, prompt: str, response: str) -> Any:
            ids, _ = exchange(reader, prompt, response)
            return ids, [True] * len(ids)

        return spoilt

    planted = defect(
        "prompt counts", Reader._exchange, all_counts, lambda: check_exchange(tokenizer, tmp_path)
    )
    assert_caught(planted, monkeypatch)


def test_of_a_conversation_every_reply_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "a token"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "the draft"},
        {"role": "user", "content": "unanswered"},
    ]
    [document] = read(tokenizer, lines(tmp_path, {"messages": messages}))
    text = counted_text(tokenizer, document)
    assert "a token" in text and "the draft" in text
    assert "guess" not in text and "more" not in text and "unanswered" not in tokenizer.decode(document.ids)


def test_a_template_that_drops_earlier_replies_leaves_the_last_one(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", tokenizer=True)
    source = "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    messages = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "last one"},
    ]
    [document] = read(tokenizer, lines(tmp_path, {"messages": messages}))
    assert counted_text(tokenizer, document).strip() == "last one"


def test_a_text_is_cut_into_pieces_that_count_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("the target checks all of them " * 9)
    whole = tokenizer.encode(file.read_text())
    pieces = read(tokenizer, file, length=20)
    assert [id for piece in pieces for id in piece.ids] == whole[: sum(len(p.ids) for p in pieces)]
    assert {len(piece.ids) for piece in pieces[:-1]} == {20} and all(all(piece.counts) for piece in pieces)


def test_an_exchange_longer_than_a_piece_keeps_what_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The pieces of its prompt alone hold nothing to learn."""
    record = {"prompt": "all of them " * 20, "response": "in one forward pass"}
    pieces = read(tokenizer, lines(tmp_path, record), length=16)
    assert "".join(counted_text(tokenizer, piece) for piece in pieces) == "in one forward pass"


def test_parquet_is_read_like_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": "a few", "response": " tokens", "text": None},
        {"prompt": None, "response": None, "text": "ahead"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    first, second = read(tokenizer, tmp_path / "data.parquet")
    assert counted_text(tokenizer, first) == " tokens" and all(second.counts)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ConfigError, match="is no Parquet table"):
        read(tokenizer, tmp_path / "broken.parquet")


BAD = {
    "broken line": ('{"text": "a b"}\n{"text": "a', "line 2 is not JSON"),
    "no object": ("[1, 2]", 'line 1 is no object with a "text"'),
    "other keys": ('{"prompt": "a"}', 'line 1 is no object with a "text"'),
    "a number": ('{"text": 3}', "line 1 is no object"),
    "no reply": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "line 1 has no message of the assistant",
    ),
    "lone surrogate": ('{"text": "\\ud800"}', "line 1 cannot be read"),
    "messages of text": ('{"messages": ["a"]}', "line 1 has no message of the assistant"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_or_counted(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    content, message = BAD[case]
    file = lines(tmp_path, content)
    with pytest.raises(ConfigError, match="skip_bad_lines") as caught:
        read(tokenizer, file)
    assert message in str(caught.value)
    good = lines(tmp_path, content, {"text": "a few tokens"}, name="more.jsonl")
    corpus = Reader(tokenizer, EOS, 100, skip_bad_lines=True).corpus([good])
    assert corpus.skipped == 1 and len(corpus.documents) == 1 + (case == "broken line")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "which is empty"),
        (b"  \n", "which is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a\0b", "not UTF-8"),
    ],
)
def test_a_file_without_text_is_refused(
    content: bytes, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tokenizer, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tokenizer, tmp_path / "none.txt")


def test_data_without_a_response_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "a", "response": ""})
    reader = Reader(tokenizer, None, 100)
    with pytest.raises(ConfigError, match="no token to learn from"):
        reader.corpus([file])


def test_prompts_are_what_comes_before_a_response_or_begins_a_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = lines(tmp_path, {"prompt": "a few", "response": "x"}, {"text": "the target checks " * 30})
    exchange, *texts = Reader(tokenizer, EOS, 100).prompts([file])
    assert exchange == tokenizer.encode("a few")
    assert texts[0] == tokenizer.encode("the target checks " * 30)[:64]


# --- batches --------------------------------------------------------------------------------------------------


def many() -> list[Document]:
    return [Document((n,) * (1 + n % 13), (True,) * (1 + n % 13)) for n in range(101)]


def test_every_epoch_has_every_document_once_in_another_order() -> None:
    batches = Batches(many(), 40, seed=3)
    orders = []
    for epoch in range(3):
        groups = [batches.group_at(epoch * len(batches) + place) for place in range(len(batches))]
        assert sorted(index for group in groups for index in batches.groups[group]) == list(range(101))
        orders.append(groups)
    assert orders[0] != orders[1] != orders[2]
    assert all(sum(len(d.ids) for d in batches.documents_of(group)) <= 40 for group in orders[0])
    again = Batches(many(), 40, seed=3)
    assert again.groups == batches.groups and again.group_at(70) == batches.group_at(70)
    assert Batches(many(), 40, seed=4).groups != batches.groups


def test_held_out_documents_are_in_no_group() -> None:
    rest, held_out = hold_out(many(), 0.05, 64, seed=1)
    assert len(held_out) == 5 and len(rest) == 96
    assert {d.ids for d in rest}.isdisjoint(d.ids for d in held_out)
    assert len(hold_out(many()[:2], 0.5, 64, seed=1)[1]) == 1
