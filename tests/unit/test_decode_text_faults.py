"""A tokenizer that fails while a text is decoded harms that text alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import foredraft
from foredraft import LLM, Output, SamplingParams
from foredraft.decode.text_buffer import TextBuffer
from foredraft.llm.requests import Submission
from foredraft.llm.service import Service, StreamEvent
from foredraft.model.tokenizer import Detokenizer, Tokenizer
from tests.support.checkpoints import save_checkpoint, tiny_tokenizer
from tests.support.panics import panic, stripping

SAYS = "the model's tokenizer cannot decode token ids (index out of bounds"
# without a stop string a text is decoded only when asked for
STOPS: list[dict[str, Any]] = [{}, {"stop": ["zz"]}]
# The draw is a letter at a time. The decoder panics on the last one.
BROKEN = SamplingParams(temperature=0, regex="[a-h]{9}q[a-h]{60}", max_new_tokens=60)
SOUND = SamplingParams(temperature=0, regex="[a-h ]{90}", max_new_tokens=40)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "big", tokenizer=True, eos_token_id=None)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"] = {"type": "Sequence", "decoders": [stripping("q"), content["decoder"]]}
    file.write_text(json.dumps(content))
    with foredraft.load(folder, policy="fixed", max_batch=4) as found:
        yield found


def check(output: Output) -> None:
    assert output.finish_reason == "error" and (output.error or "").startswith(SAYS)
    assert len(output.text or "") == 9 and set(output.text or "") <= set("abcdefgh")
    assert "".join(output.pieces or []) == output.text
    assert len(output.pieces or []) == len(output.token_ids) == len(output.origins)


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@pytest.mark.parametrize("stops", STOPS, ids=["as it is shown", "in the round"])
def test_a_panic_ends_its_own_text_soon(llm: LLM, stops: dict[str, Any], drafter: str) -> None:
    params, events = [each.replace(drafter=drafter, **stops) for each in (BROKEN, SOUND)], list[StreamEvent]()
    wanted = llm.generate(["x", "x"], params)
    check(wanted[0])
    assert (len(wanted[0].token_ids) <= 12) is bool(stops), "a stop string is looked for in every round"
    service = Service(llm, events.extend)
    handles = [service.submit(Submission("x", each)) for each in params]
    end = time.monotonic() + 20
    while not all(handle.over for handle in handles):
        assert service.alive and time.monotonic() < end
        time.sleep(0.01)
    service.stop()
    broken, sound = ([each.piece for each in events if each.handle is handle] for handle in handles)
    assert broken[-1].output is not None and sound[-1].output is not None
    check(broken[-1].output)
    assert "".join(piece.text or "" for piece in broken) == broken[-1].output.text
    assert len(broken[-1].output.token_ids) <= 12
    alone = llm.generate("x", params[1])[0].token_ids
    assert wanted[1].token_ids == sound[-1].output.token_ids == alone and len(alone) == 40


class Failing(Detokenizer):
    """A detokenizer that raises an error once `pushes` tokens were read."""

    def __init__(self, pushes: int, error: BaseException) -> None:
        self._left, self._error = pushes + 1, error  # the first push is of what came before the text
        super().__init__(Tokenizer(tiny_tokenizer()), (), True)

    def push(self, ids: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().push(ids)


def letters(text: str) -> list[int]:
    return [tiny_tokenizer().token_to_id(letter) for letter in text]


@pytest.mark.parametrize("error", [panic(), RuntimeError("planted")], ids=["panic", "error"])
@pytest.mark.parametrize("stops", [[], ["xy"]])
def test_a_text_that_failed_stays_what_it_was(error: BaseException, stops: list[str]) -> None:
    text = TextBuffer(lambda: Failing(3, error), stops)
    text.push(letters("abc"))
    assert text.failed is None
    text.push(letters("xyz"))
    assert text.failed == f"the tokenizer failed: {type(error).__name__}: {error}"
    assert (text.text, text.pieces, text.stopped_by) == ("abc", ["a", "b", "c", "", "", ""], None)
    text.rewind(2)
    assert (text.text, text.tokens) == ("ab", letters("ab"))
    text.push(letters("q"))
    text.finish()
    assert (text.text, text.release(3)) == ("ab", [(0, "a"), (1, "b")])


def test_a_text_that_fails_as_it_is_rewound_keeps_what_was_decoded() -> None:
    made: Iterator[Callable[[], Detokenizer]] = iter([
        lambda: Tokenizer(tiny_tokenizer()).detokenizer(), lambda: Failing(1, panic()),
    ])  # fmt: skip
    text = TextBuffer(lambda: next(made)(), ["xy"])
    text.push(letters("abcd"))
    assert text.release(3) == [(0, "a"), (1, "b"), (2, "c")]
    text.rewind(3)
    assert text.failed is not None and text.text == "abc"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit(), BaseException("x")])
def test_what_is_no_fault_passes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        TextBuffer(lambda: Failing(0, error)).push(letters("a"))


def test_a_tokenizer_that_fails_at_once_refuses_the_request() -> None:
    with pytest.raises(RuntimeError, match="planted"):
        TextBuffer(lambda: Failing(-1, RuntimeError("planted")))
