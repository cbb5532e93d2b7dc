"""How long masks may take, which honest grammars must pass all limits, and masks of whole vocabularies."""

from __future__ import annotations

import json
import queue
import random
import string
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import demo
from foredraft.constraints import ConstraintFactory, grammar
from foredraft.constraints.grammar import (
    PATIENCE,
    SECONDS_PER_MASK,
    Grammars,
    MaskThreads,
    Pace,
    check_grammar,
)
from foredraft.decode.params import SamplingParams
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets
from tests.support.panics import panic, raising


class Masks:
    def __init__(self, compute: Callable[[], bytes]) -> None:
        self.compute_bitmask = compute


def of(compute: Callable[[], bytes]) -> Any:
    return Masks(compute)


def running() -> int:
    return sum(each.name == "foredraft-masks" for each in threading.enumerate())


def wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    before, found = running(), MaskThreads()
    yield found
    found._idle = queue.SimpleQueue()  # as it is with the garbage
    wait(lambda: running() <= before)


def test_a_thread_serves_one_mask_after_the_other(threads: MaskThreads) -> None:
    for place in range(5):
        mask, seconds = threads.compute(of(lambda place=place: b"%d" % place))  # type: ignore[misc]
        assert mask == b"%d" % place and 0 <= seconds < 5
    assert threads._idle.qsize() == 1 and threads.overdue == 0


def test_an_idle_thread_keeps_no_grammar_alive(threads: MaskThreads) -> None:
    matcher = of(lambda: b"")
    gone = weakref.ref(matcher)
    threads.compute(matcher)
    del matcher
    wait(lambda: gone() is None)


def test_threads_end_with_their_owner() -> None:
    before, owner = running(), MaskThreads()
    owner.compute(of(lambda: b""))
    assert running() == before + 1
    del owner
    wait(lambda: running() == before)


@pytest.mark.parametrize("error", [panic(), RuntimeError("planted")], ids=["panic", "error"])
def test_an_error_is_raised_where_the_mask_is_asked_for(threads: MaskThreads, error: BaseException) -> None:
    with pytest.raises(type(error)):
        threads.compute(of(raising(error)))
    error.__traceback__ = None  # it keeps the frames
    assert threads.compute(of(lambda: b"x"))[0] == b"x" and threads.overdue == 0


def test_a_late_mask_is_left_and_counted(threads: MaskThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "OVERDUE", 0.05)
    ends = threading.Event()
    request = Pace(threads)
    with pytest.raises(TimeoutError, match=r"^is too slow for this machine: a mask took more than 0.05 s$"):
        request.mask(of(lambda: (ends.wait(60), b"")[1]))
    assert threads.overdue == 1
    with pytest.raises(TimeoutError, match=r"more than 0.05 s$"):  # another sample of the request
        request.mask(of(lambda: b"x"))
    assert Pace(threads).mask(of(lambda: b"x")) == b"x"
    ends.set()
    wait(lambda: not threads.overdue)


def test_masks_that_keep_the_pace_may_go_on_and_earn_no_credit_for_slow_ones() -> None:
    clocked: Any = SimpleNamespace(compute=lambda matcher: (b"", clocked.seconds))
    request: Any = Pace(clocked)
    for clocked.seconds in (0.0, SECONDS_PER_MASK):
        for _ in range(10_000):
            request.mask(None)
    clocked.seconds = 0.1
    for _ in range(int(PATIENCE / (0.1 - SECONDS_PER_MASK))):
        request.mask(None)
    with pytest.raises(TimeoutError, match=r"its masks took 0.6 s of a processor more than 20 ms each$"):
        request.mask(None)


DICE = random.Random(5)
TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}


def word() -> str:
    return "".join(DICE.choices(string.ascii_lowercase, k=DICE.randint(4, 10)))


def record(properties: dict[str, Any], required: Any = ()) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": list(required), **closed}


def nested(depth: int) -> tuple[Any, Any]:
    schema = record({"leaf": TEXT}, ["leaf"])
    value: dict[str, Any] = {"leaf": "a"}
    for _ in range(depth):
        schema, value = record({"down": schema, "note": TEXT}, ["down"]), {"down": value, "note": "b"}
    return schema, value


MANY = {f"field_{place}": TEXT for place in range(1000)}
WORDS = [word() for _ in range(1000)]
MAIL = r"^[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}$"
URL = r"^https?://([a-z0-9-]+\.)+[a-z]{2,10}(/[A-Za-z0-9._~%-]*)*(\?[^#\s]*)?(#\S*)?$"


def tagged(place: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"type": {"const": f"kind_{place}"}, **{f"f{place}_{n}": TEXT for n in range(8)}}
    return record(keys, keys)


TAGGED = [tagged(place) for place in range(500)]
HONEST: dict[str, tuple[Any, Any]] = {
    "1000 optional properties": (record(MANY), dict.fromkeys(list(MANY)[::30], "ab")),
    "500 required properties": (
        record(all_ := {f"{word()}_{place}": WHOLE for place in range(500)}, all_), dict.fromkeys(all_, 12),
    ),
    "an enum of 1000 words": (record({"a": {"enum": WORDS}}, ["a"]), {"a": WORDS[700]}),
    "an enum of 1000 addresses": (
        record({"a": {"enum": [f"https://example.org/{place:04d}" for place in range(1000)]}}, ["a"]),
        {"a": "https://example.org/0815"},
    ),
    "nesting": nested(40),
    "large patterns": (
        record({"mail": {**TEXT, "pattern": MAIL}, "url": {**TEXT, "pattern": URL}}, ["mail", "url"]),
        {"mail": "some.name@mail.example.org", "url": "https://www.example.org/a/b?c=d#e"},
    ),
    "long strings": (
        record({"a": {**TEXT, "minLength": 200, "maxLength": 4000}}, ["a"]), {"a": " ".join(WORDS[:100])},
    ),
    "500 tagged objects": ({"anyOf": TAGGED}, {"type": "kind_499", **{f"f499_{n}": "abc" for n in range(8)}}),
    "many items": ({"type": "array", "items": WHOLE, "minItems": 150, "maxItems": 5000}, [123] * 200),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> tuple[ByteCodec, Grammars]:
    folder = demo.target_path()
    read, spec = Tokenizer.from_folder(folder), ModelSpec.from_folder(folder)
    assert read is not None
    codec = ByteCodec(read)
    return codec, Grammars(codec, spec.vocab_size, frozenset([0]))


@pytest.mark.parametrize("name", HONEST)
def test_large_schemas_pass_all_limits(
    name: str, vocabulary: tuple[ByteCodec, Grammars], threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    (schema, value), (codec, grammars) = HONEST[name], vocabulary
    monkeypatch.setattr(grammar, "SMALL", 0)
    monkeypatch.setattr(grammars, "threads", threads)
    check_grammar("json_schema", json.dumps(schema))
    made = grammars.maker("json_schema", json.dumps(schema))()
    for token in codec.spell(json.dumps(value)):
        mask = made.mask()
        assert mask is not None and bool(mask[token])
        made.advance(token)
    mask = made.mask()
    assert mask is not None and bool(mask[0]), "the text is whole"


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string", "maxLength": 9}}}'
)
TEXT = '{"a": "The target checks", "b": "all to"}'


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_masks_with_slices_are_those_without(name: str) -> None:
    codec = ByteCodec(alphabets.make(name))
    for option, text in (("json_schema", SCHEMA), ("regex", '.*"b": "[a-z ]{1,30}"}')):
        grammars = Grammars(codec, 600, frozenset([2]))
        one, other = grammars.maker(option, text)(), grammars.maker(option, text)()
        for token in codec.spell(TEXT):
            masks = one.mask(), other.mask()
            assert masks[0] is not None and masks[1] is not None and torch.equal(*masks)
            one.advance(token)
            other.advance(token)


def test_a_long_text_keeps_few_masks_and_can_be_rewound_to_all() -> None:
    codec = ByteCodec(alphabets.make("byte-level"))
    made = Grammars(codec, 600, frozenset([2])).maker("regex", "[a-z ]{1,400}")()
    tokens, masks = codec.spell("the target checks all " * 16), list[Tensor | None]()
    for token in tokens:
        masks.append(made.mask())
        made.advance(token)
    assert len(tokens) > 2 * grammar.KEPT >= 2 * len(made._masks)
    for length in range(len(tokens) - 1, -1, -1):
        made.rewind(length)
        found, before = made.mask(), masks[length]
        assert found is not None and before is not None and torch.equal(found, before)


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_a_whole_text_of_a_model_without_an_end_can_only_stop(name: str) -> None:
    """The library needs an end of text, and gets an id that shows no text; it must not be drawn."""
    codec = ByteCodec(alphabets.make(name))
    made = Grammars(codec, 600, frozenset()).maker("regex", "ab")()
    for token in codec.spell("ab"):
        assert not made.at_dead_end
        made.advance(token)
    assert made.at_dead_end and made.retreat() is None
    assert made.ended_by == "regex: the text is complete, and no end-of-text token is allowed"


def test_slices_are_made_for_the_second_request() -> None:
    factory = ConstraintFactory(alphabets.make("byte-level"), 384, frozenset([2]))
    for makes_slices in (False, True):
        make = factory.maker([1], SamplingParams(regex="[a-z]+", max_new_tokens=9))
        assert make() is not make()
        assert ("_sliced" in vars(factory.grammars)) is makes_slices
