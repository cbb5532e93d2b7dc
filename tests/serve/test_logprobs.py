"""Log-probabilities, echoes, token ids and provenance in every shape of the API, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from foredraft.llm import LLM
from tests.serve.routes import CHAT, MESSAGES, PROMPT, TEXT, post, whole_and_streamed
from tests.support.serving import Served, events_of

# at this temperature the target draws parts of characters, some of which never become one
CUT: dict[str, Any] = {"temperature": 4.0, "seed": 5, "max_tokens": 60, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "a stop string": {"temperature": 0, "max_tokens": 40, "stop": ["urn", "no such"]},
    "a stop string that is shown": {"temperature": 0, "max_tokens": 40, "stop": ["urn"], "include_stop_str_in_output": True},
    "cut characters": CUT,
    "special tokens": CUT | {"logit_bias": {"0": 9}},
    "special tokens that are shown": CUT | {"logit_bias": {"0": 9}, "skip_special_tokens": False},
    "two samples": {"temperature": 1.0, "seed": 4, "max_tokens": 20, "n": 2},
    "a length of one token": {"temperature": 0, "max_tokens": 1},
}  # fmt: skip


def choices(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = post(served, path, **fields)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"])


def spelled_out(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return token.removeprefix("bytes:").encode("latin-1").decode("unicode_escape").encode("latin-1")


def text_of(scores: dict[str, Any] | None) -> str:
    if "content" not in (scores := scores or {"tokens": []}):
        return b"".join(map(spelled_out, scores["tokens"])).decode("utf-8", "replace")
    text = "".join(entry["token"] for entry in scores["content"])
    data = bytes(byte for entry in scores["content"] for byte in entry["bytes"])
    assert "\N{REPLACEMENT CHARACTER}" in text or data.decode() == text
    return text


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("case", CASES)
def test_a_text_is_that_of_its_log_probabilities(served: Served, case: str, path: str) -> None:
    fields = CASES[case] | ({"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 1})
    for choice, parts in whole_and_streamed(served, path, **fields):
        scores = choice["logprobs"]
        if path == TEXT:
            assert text_of(scores) == choice["text"]
            assert scores["text_offset"] == sorted(scores["text_offset"])
            assert max(scores["text_offset"]) < len(choice["text"])
            assert all(text_of(each["logprobs"]) == each["text"] for each in parts)
            continue
        assert text_of(scores) == choice["message"]["content"]
        assert {len(entry["top_logprobs"]) for entry in scores["content"]} == {2}
        for part in parts:  # each by itself: some clients build their text of the tokens of each part
            text = part["delta"].get("content")
            assert not text or text_of(part["logprobs"]) == text


@pytest.mark.parametrize("bias", [5, 8, 100])
def test_the_token_that_ends_a_text_is_not_listed(ending: Served, bias: int) -> None:
    for seed in range(4):
        own: dict[str, Any] = {
            "model": None,
            "logit_bias": {"2": bias},
            "seed": seed,
            "max_tokens": 60,
            "temperature": 1,
        }
        [chat] = choices(ending, CHAT, logprobs=True, **own)
        assert chat["finish_reason"] == "stop"
        assert "".join(entry["token"] for entry in chat["logprobs"]["content"]) == chat["message"]["content"]
        fields = {"prompt": "a", "logprobs": 0, "return_token_ids": True, **own}
        [text] = choices(ending, TEXT, **fields)
        assert text["token_ids"][-1] == 2 and "</s>" not in text["logprobs"]["tokens"]
        [shown] = choices(ending, TEXT, **fields, skip_special_tokens=False)
        assert shown["text"].endswith("</s>") and shown["logprobs"]["tokens"][-1] == "</s>"


def test_behind_an_echo_every_token_is_listed(ending: Served) -> None:
    """Clients that score a prompt ask for one token, and leave out the last score, whatever that token is."""
    common: dict[str, Any] = {"model": None, "prompt": "a b", "echo": True, "logprobs": 1, "max_tokens": 1}
    for bias, end in ((100, True), (-100, False)):
        [(found, _)] = whole_and_streamed(ending, TEXT, **common, logit_bias={"2": bias})
        assert len(found["logprobs"]["tokens"]) == len(ending.llm.encode("a b")[0]) + 1
        assert (found["logprobs"]["tokens"][-1] == "") is end
        assert "".join(found["logprobs"]["tokens"]) == found["text"]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_the_top_of_a_completion_always_holds_the_token(served: Served, count: int, echo: bool) -> None:
    scores = choices(served, TEXT, logprobs=count, echo=echo, temperature=0.8, seed=1)[0]["logprobs"]
    rows = list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))
    if echo:
        assert rows.pop(0)[1:] == (None, None)  # the first token of a prompt has no context to be scored by
    for token, logprob, top in rows:
        assert top[token] == logprob and count <= len(top) <= count + 1
    if count:
        assert {len(top) for _, _, top in rows} == {count, count + 1}


def test_an_echo_is_the_prompt_as_it_was_sent(ending: Served) -> None:
    special = "<s>Hi</s> there"
    common: dict[str, Any] = {"model": None, "echo": True, "logprobs": 1, "max_tokens": 0}
    [found] = choices(ending, TEXT, prompt=special, **common)
    scores = found["logprobs"]
    # the tokenizer puts another <s> in front, which was not sent
    assert found["text"] == "".join(scores["tokens"]) == special and scores["tokens"][:2] == ["", "<s>"]
    assert scores["text_offset"][:3] == [0, 0, 3] and scores["tokens"][-1].endswith("e")
    for offset, token in zip(scores["text_offset"], scores["tokens"], strict=True):
        assert special[offset:].startswith(token)
    ids = ending.llm.encode(special)[0]
    [found] = choices(ending, TEXT, prompt=ids, **common)
    assert found["text"] == f"<s>{special}" == "".join(found["logprobs"]["tokens"])
    [found] = choices(ending, TEXT, prompt=special, **common | {"logprobs": None, "max_tokens": 2})
    assert found["text"].startswith(special) and found["logprobs"] is None
    text, other = choices(ending, TEXT, prompt=["a</s>", "b"], **common | {"logprobs": None})
    assert (text["text"], other["text"]) == ("a</s>", "b")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}], ids=["include", "top"]
)
def test_responses_have_scores(
    served: Served, client: openai.OpenAI, asked: dict[str, Any], stream: bool
) -> None:
    common: dict[str, Any] = {"model": "demo", "input": PROMPT, "temperature": 0, "max_output_tokens": 20}
    common |= asked
    if stream:
        with client.responses.stream(**common) as events:
            seen = list(events)
        added = [event for event in seen if event.type == "response.output_text.delta"]
        assert all("".join(e.token for e in event.logprobs) == event.delta for event in added)
        [done] = [event for event in seen if event.type == "response.output_text.done"]
        assert "".join(e.token for e in done.logprobs) == done.text
        response: Any = seen[-1].response  # type: ignore[union-attr]
    else:
        response = client.responses.create(**common)
    [part] = response.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text == response.output_text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {asked.get("top_logprobs", 0)}
    [chat] = choices(served, CHAT, logprobs=True, max_tokens=20)
    assert [entry.logprob for entry in part.logprobs] == [e["logprob"] for e in chat["logprobs"]["content"]]


def test_a_call_is_not_listed(served: Served, client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "stop"}}]
    common: dict[str, Any] = {
        "model": "demo", "messages": MESSAGES, "tools": tools, "logprobs": True, "temperature": 0, "max_tokens": 60,
        "parallel_tool_calls": False,
    }  # fmt: skip
    called = client.chat.completions.create(**common, tool_choice="required").choices[0]
    assert called.message.tool_calls and not called.message.content
    assert called.logprobs is not None and called.logprobs.content == []
    free = client.chat.completions.create(**common, tool_choice="auto").choices[0]
    assert free.logprobs is not None
    assert "".join(entry.token for entry in free.logprobs.content or []) == free.message.content


def test_token_ids_whole_and_streamed(served: Served, llm: LLM) -> None:
    assert llm.tokenizer is not None
    fields: dict[str, Any] = {"return_token_ids": True, "n": 2, "temperature": 1}
    for path in (TEXT, CHAT):
        for choice, _ in whole_and_streamed(served, path, **fields):
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            assert len(choice["token_ids"]) == 12
            assert llm.tokenizer.decode(choice["token_ids"], skip_special=False) == text
            assert path == CHAT or choice["prompt_token_ids"] == llm.encode(PROMPT)[0]
    ids = llm.tokenizer.encode_chat(MESSAGES)
    assert post(served, CHAT, **fields).json()["prompt_token_ids"] == ids
    events = events_of(post(served, CHAT, **fields, stream=True).text)
    assert [each["prompt_token_ids"] for each in events if "prompt_token_ids" in each] == [ids]
    assert "token_ids" not in choices(served, TEXT, max_tokens=1)[0]


@pytest.mark.parametrize("count", [0, 2])
def test_scores_of_a_prompt_are_the_library_s_in_either_shape(served: Served, llm: LLM, count: int) -> None:
    [ids] = llm.encode(PROMPT)
    [output] = llm.generate([ids], max_new_tokens=0, prompt_logprobs=count)
    assert output.prompt_logprobs is not None
    fields: dict[str, Any] = {"prompt_logprobs": count, "max_tokens": 1}
    found = choices(served, TEXT, **fields)[0]["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for id, score, entry in zip(ids[1:], output.prompt_logprobs[1:], found[1:], strict=True):
        assert score is not None and entry[str(id)]["logprob"] == score.logprob
        assert {int(key) for key in entry} == {id, *(each for each, _ in score.top)}
        assert all(each["decoded_token"] for each in entry.values())
    [both] = choices(served, TEXT, echo=True, logprobs=1, **fields)
    assert both["prompt_logprobs"] == found
    want = [score and score.logprob for score in output.prompt_logprobs]
    assert both["logprobs"]["token_logprobs"][: len(ids)] == want
    assert {len(top) for top in both["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert post(served, CHAT, **fields).json()["prompt_logprobs"][0] is None
    refused = post(served, TEXT, **fields, stream=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


COMMON = {"prompt": "def fibonacci(n):\n", "max_tokens": 48, "ignore_eos": True, "provenance": True}
TRACED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "drafter": "draft-model"},
    "plain": {"temperature": 0, "drafter": "none"},
    "sampled": {"temperature": 1.0, "seed": 3, "drafter": "draft-model"},
    # at this temperature the target draws parts of characters, some of which never become one
    "cut characters": {"temperature": 4.0, "seed": 5, "drafter": "draft-model", "max_tokens": 80},
    "a possible stop string": {"temperature": 0, "stop": ["n - 1)\n no such line", "return n\n\n"]},
    "a ban that rolls back": {
        "temperature": 0, "ban": ["return"], "ban_mode": "rollback", "drafter": "draft-model"
    },
    "two samples": {"temperature": 1.0, "seed": 4, "n": 2, "drafter": "draft-model"},
}  # fmt: skip


@pytest.mark.parametrize("case", TRACED)
def test_a_stream_tells_what_a_whole_reply_tells(served: Served, case: str) -> None:
    for choice, chunks in whole_and_streamed(served, TEXT, **COMMON | TRACED[case]):
        assert "".join(each["text"] for each in choice["provenance"]) == choice["text"]
        assert {each["origin"] for each in choice["provenance"]} <= {"drafter", "target", "bonus"}
        assert sum(each["emitted"] for each in choice["trace"]) == len(choice["provenance"])
        told = text = 0  # characters of entries: never ahead of the text
        for chunk in chunks:
            told += sum(len(each["text"]) for each in chunk.get("provenance", ()))
            text += len(chunk["text"])
            assert told <= text
        assert sum(bool(chunk.get("trace")) for chunk in chunks) > 1, "the rounds come as they happen"


def test_a_round_has_the_text_of_each_candidate(served: Served) -> None:
    """A rejected token stands in no other field; a part of a character shows its bytes."""
    [choice] = post(served, TEXT, **COMMON | TRACED["cut characters"]).json()["choices"]
    seen = {"rejected": 0, "cut": 0}
    for round in choice["trace"]:
        ids = [*round["draft"], round["next_token"]]
        texts = [*round["draft_texts"], round["next_text"]]
        seen["rejected"] += len(round["draft"]) - round["accepted"]
        for id, text in zip(ids, texts, strict=True):
            [tokens] = [served.client.post("/detokenize", json={"tokens": [id]}).json()["prompt"]]
            assert "\N{REPLACEMENT CHARACTER}" not in text
            if "\N{REPLACEMENT CHARACTER}" in tokens:
                seen["cut"] += 1
                assert text.startswith("<0x") and text.endswith(">")
            else:
                assert text == tokens
    assert min(seen.values()) > 0, seen
