"""Translation gives the same tokens however the text arrives, and encodes only the end of it again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.drafters.retokenize import LONG, SHORT, Translation, _cut
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets
from tests.support.checkpoints import TEXT
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import argument, holding

Function = Callable[..., Any]
CODECS = {name: ByteCodec(alphabets.make(name)) for name in alphabets.KINDS}
PAIRS = [pair for pair in itertools.product(CODECS, CODECS) if pair[0] != pair[1]]
PROSE = TEXT * 3 + "no spaces: " + "長" * 700 + " and\n\n   then  some.  " + TEXT[:90].replace(" ", "  ")


def texts_of(name: str) -> list[list[int]]:
    """Return ids of prose, of prose with special tokens in it, and random ids."""
    codec, dice = CODECS[name], random.Random(3)
    prose = [1, *codec.encode(PROSE)]
    marked = [id for id in prose[:300] for id in ([id, dice.choice([1, 2])] if dice.random() < 0.1 else [id])]
    return [prose, marked, [dice.randrange(380) for _ in range(400)]]


def translation(pair: tuple[str, str], tokens: list[int]) -> Translation:
    made = Translation(CODECS[pair[0]], CODECS[pair[1]])
    made.extend(tokens)
    return made


def assert_same(one: Translation, other: Translation) -> None:
    assert one.tokens() == other.tokens()
    assert one.held == other.held


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_tokens_do_not_depend_on_the_steps_in_which_a_text_arrives(pair: tuple[str, str]) -> None:
    for tokens in texts_of(pair[0]):
        dice = random.Random(7)
        grown = translation(pair, tokens[:1])
        for length in range(2, len(tokens) + 1):
            grown.extend(tokens[:length])
            if length % 61 == 0:
                assert_same(grown, translation(pair, tokens[:length]))
            if length % 47 == 0:  # roll back, read something else, roll back again
                back = dice.randint(max(1, length - 60), length)
                grown.keep(back)
                grown.extend([*tokens[:back], *range(40, 40 + dice.randrange(20))])
                grown.keep(back)
                grown.extend(tokens[:length])
                assert_same(grown, translation(pair, tokens[:length]))
        assert_same(grown, translation(pair, tokens))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_translated_tokens_have_the_bytes_of_the_text(pair: tuple[str, str]) -> None:
    source, reader = CODECS[pair[0]], CODECS[pair[1]]
    text = PROSE + "🙂"
    ids = source.encode(text)
    made = translation(pair, [1, *ids])
    assert made.tokens()[0] == 1, "the reader has its own BOS"
    assert reader.join(made.tokens()[1:]).decode() == " " * reader.pads + text
    assert translation(pair, ids).tokens() == made.tokens(), "with or without BOS"
    # where the last character is cut, its bytes are held
    for cut in range(1, 4):
        if source.join(ids).endswith(data := source.join(ids[-cut:])) and data in "🙂".encode()[1:]:
            short = translation(pair, ids[:-cut])
            assert short.held == "🙂".encode()[: -len(data)]
            assert reader.join(short.tokens()[1:]).decode().strip() == PROSE.strip()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_chunks_give_nearly_the_tokens_of_the_whole_text(pair: tuple[str, str]) -> None:
    reader = CODECS[pair[1]]
    made = translation(pair, CODECS[pair[0]].encode(TEXT * 4)).tokens()[1:]
    whole = reader.encode(TEXT * 4)
    pairs = {(a, b) for a, b in itertools.pairwise(whole)}
    different = sum((a, b) not in pairs for a, b in itertools.pairwise(made))
    assert different <= 0.03 * len(whole)
    assert abs(len(made) - len(whole)) <= 0.01 * len(whole)


def test_special_tokens_are_translated_by_name() -> None:
    inner = alphabets.byte_level()
    inner.add_special_tokens(["<user>", "<tool>"])
    source = ByteCodec(Tokenizer(inner))
    other = alphabets.sentencepiece()
    other.add_special_tokens(["<user>"])
    reader = ByteCodec(Tokenizer(other))
    user, tool = inner.token_to_id("<user>"), inner.token_to_id("<tool>")
    made = Translation(source, reader)
    made.extend([1, user, *source.encode("Hello <user>"), tool, *source.encode("there"), 2, user])
    ids = made.tokens()
    place = [at for at, id in enumerate(ids) if id == reader.specials["<user>"]]
    assert place == [1, len(ids) - 1], "the name of a special token within the text is plain text"
    assert ids[-2] == reader.specials["</s>"]
    assert reader.join(ids[2:]) == b" Hello <user>there"


def test_only_the_end_of_the_text_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = CODECS["byte-level"], CODECS["sentencepiece"]
    tokens = source.encode(PROSE * 6)
    made = Translation(source, reader)
    made.extend(tokens[:-50])
    encoded: list[int] = []
    spell = reader.spell
    monkeypatch.setattr(reader, "spell", lambda text: encoded.append(len(text)) or spell(text))
    for length in range(len(tokens) - 49, len(tokens) + 1):
        encoded.clear()
        made.keep(length - 1)
        made.extend(tokens[:length])
        made.tokens()
        assert 0 <= sum(encoded) <= 2 * LONG
    assert encoded


def closed_chunks_kept(keep: Function) -> Function:
    def mutated(made: Translation, count: int) -> None:
        closed = list(made._closed)
        keep(made, count)
        made._closed = closed

    return mutated


def as_complete(data: bytes) -> bytes:
    return data.decode(errors="replace").encode()


def cut_at_the_end(cut: Function) -> Function:
    return lambda text: cut(text) or (len(text) if len(text) > SHORT else None)


DEFECTS: list[tuple[str, Any, Mutation]] = [
    ("rollback keeps closed chunks", Translation.keep, closed_chunks_kept),
    ("checkpoints outlive their tokens", Translation.keep, argument(1, lambda count: count + 3)),
    ("an incomplete character is decoded", Translation._read, argument(1, as_complete)),
    ("chunks end where the text ends", _cut, cut_at_the_end),
    ("rollback loses the open chunk", Translation._save, holding(lambda made: (made, "_open", ""))),
]


@pytest.mark.parametrize(("name", "point", "mutation"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_defects_are_caught(name: str, point: Any, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        for pair in (("byte-level", "sentencepiece"), ("metaspace", "byte-level")):
            test_tokens_do_not_depend_on_the_steps_in_which_a_text_arrives(pair)
            test_translated_tokens_have_the_bytes_of_the_text(pair)

    assert_caught(defect(name, point, mutation, check), monkeypatch)
