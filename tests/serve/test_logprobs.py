"""Log-probabilities, echoes and token ids in every shape of the API: what is listed is what the text consists of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import foredraft
from foredraft.llm import LLM
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, serving

EMOJI = "\N{GRINNING FACE}"
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
PROMPT = "def fibonacci(n):\n"
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


def post(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    reply = served.client.post(f"/v1/{path}", json=fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def chunks(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = served.client.post(f"/v1/{path}", json={**fields, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def joined(entries: list[dict[str, Any]]) -> str:
    """Return the text of scored tokens, which their bytes have, too."""
    text = "".join(entry["token"] for entry in entries)
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert "\N{REPLACEMENT CHARACTER}" in text or data.decode() == text
    return text


@pytest.mark.parametrize("case", CASES)
def test_the_content_of_a_chat_is_that_of_its_log_probabilities(served: Served, case: str) -> None:
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **CASES[case]}
    whole = post(served, "chat/completions", **fields)["choices"]
    parts = [each["choices"][0] for each in chunks(served, "chat/completions", **fields)]
    for choice in whole:
        entries = choice["logprobs"]["content"]
        assert joined(entries) == choice["message"]["content"]
        own = [each for each in parts if each["index"] == choice["index"]]
        assert [e for each in own for e in (each["logprobs"] or {"content": []})["content"]] == entries
        for part in own:  # each by itself: some clients build their text of the tokens of each part
            text = part["delta"].get("content")
            assert not text or joined(part["logprobs"]["content"]) == text


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_a_completion_is_that_of_its_log_probabilities(served: Served, case: str) -> None:
    def text_of(scores: dict[str, Any] | None) -> str:
        data = [spelled_out(token) for token in (scores or {"tokens": []})["tokens"]]
        return b"".join(data).decode("utf-8", "replace")

    fields = {"prompt": PROMPT, "logprobs": 1, **CASES[case]}
    whole = post(served, "completions", **fields)["choices"]
    parts = [each["choices"][0] for each in chunks(served, "completions", **fields)]
    for choice in whole:
        scores = choice["logprobs"]
        assert text_of(scores) == choice["text"]
        assert scores["text_offset"] == sorted(scores["text_offset"])
        assert max(scores["text_offset"]) < len(choice["text"])
        own = [each for each in parts if each["index"] == choice["index"]]
        for name in scores:
            assert [e for each in own for e in (each["logprobs"] or {name: []})[name]] == scores[name], name
        assert all(text_of(each["logprobs"]) == each["text"] for each in own)


def spelled_out(token: str) -> bytes:
    """Return the bytes of a token in OpenAI's spelling."""
    if not token.startswith("bytes:"):
        return token.encode()
    return token.removeprefix("bytes:").encode("latin-1").decode("unicode_escape").encode("latin-1")


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that ends every text after a few tokens, with an end-of-text token."""
    path = save_checkpoint(tmp_path_factory.mktemp("ending") / "model", tokenizer=True, eos_token_id=2)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with foredraft.load(path, device="cpu", max_length=128) as llm, serving(llm) as found:
        yield found


@pytest.mark.parametrize("bias", [5, 8, 100])
def test_the_token_that_ends_a_text_is_not_listed(ending: Served, bias: int) -> None:
    for seed in range(4):
        common = {"logit_bias": {"2": bias}, "seed": seed, "max_tokens": 60, "temperature": 1.0}
        [chat] = post(ending, "chat/completions", messages=MESSAGES, logprobs=True, **common)["choices"]
        assert chat["finish_reason"] == "stop"
        assert "".join(entry["token"] for entry in chat["logprobs"]["content"]) == chat["message"]["content"]
        fields = {"prompt": "a", "logprobs": 0, "return_token_ids": True, **common}
        [text] = post(ending, "completions", **fields)["choices"]
        assert text["token_ids"][-1] == 2 and "</s>" not in text["logprobs"]["tokens"]
        shown = post(ending, "completions", **fields, skip_special_tokens=False)["choices"][0]
        assert shown["text"].endswith("</s>") and shown["logprobs"]["tokens"][-1] == "</s>"


def test_behind_an_echo_every_token_is_listed(ending: Served) -> None:
    """Clients that score a prompt ask for one token, and leave out the last score, whatever that token is."""
    for bias, end in ((100, True), (-100, False)):
        fields: dict[str, Any] = {
            "prompt": "a b",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0,
            "logit_bias": {"2": bias},
        }
        scored = chunks(ending, "completions", **fields)[0]["choices"][0]["logprobs"]
        [found] = post(ending, "completions", **fields)["choices"]
        assert len(found["logprobs"]["tokens"]) == len(ending.llm.encode("a b")[0]) + 1
        assert (found["logprobs"]["tokens"][-1] == "") is end
        assert "".join(found["logprobs"]["tokens"]) == found["text"] and scored == found["logprobs"]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_the_top_of_a_completion_always_holds_the_token(served: Served, count: int, echo: bool) -> None:
    fields = {
        "prompt": PROMPT,
        "logprobs": count,
        "echo": echo,
        "temperature": 2.0,
        "seed": 1,
        "max_tokens": 12,
    }
    scores = post(served, "completions", **fields)["choices"][0]["logprobs"]
    rows = list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))
    if echo:
        assert rows.pop(0)[1:] == (None, None)  # the first token of a prompt has no context to be scored by
    for token, logprob, top in rows:
        assert top[token] == logprob and count <= len(top) <= count + 1
    if count:
        assert {len(top) for _, _, top in rows} == {count, count + 1}


def test_an_echo_is_the_prompt_as_it_was_sent(ending: Served) -> None:
    special = "<s>Hi</s> there"
    common: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    [found] = post(ending, "completions", prompt=special, **common)["choices"]
    scores = found["logprobs"]
    # the tokenizer puts another <s> in front, which was not sent
    assert found["text"] == "".join(scores["tokens"]) == special and scores["tokens"][:2] == ["", "<s>"]
    assert scores["text_offset"][:3] == [0, 0, 3] and scores["tokens"][-1].endswith("e")
    for offset, token in zip(scores["text_offset"], scores["tokens"], strict=True):
        assert special[offset:].startswith(token)
    ids = ending.llm.encode(special)[0]
    [found] = post(ending, "completions", prompt=ids, **common)["choices"]
    assert found["text"] == f"<s>{special}" == "".join(found["logprobs"]["tokens"])
    [found] = post(ending, "completions", prompt=special, **common | {"logprobs": None, "max_tokens": 2})[
        "choices"
    ]
    assert found["text"].startswith(special) and found["logprobs"] is None
    [text, other] = post(ending, "completions", prompt=["a</s>", "b"], echo=True, max_tokens=0)["choices"]
    assert (text["text"], other["text"]) == ("a</s>", "b")


def test_tokens_of_one_character_share_its_offset(served: Served) -> None:
    text = f"{EMOJI} a b"
    [choice] = post(served, "completions", prompt=text, echo=True, logprobs=0, max_tokens=3)["choices"]
    scores = choice["logprobs"]
    *begun, a, b = scores["text_offset"][: len(served.llm.encode(text)[0])]
    assert choice["text"].startswith(text) and len(begun) > 1
    assert (set(begun), a, b) == ({0}, 1, 3)
    assert b"".join(map(spelled_out, scores["tokens"])).decode() == choice["text"]
    assert scores["text_offset"][len(begun) + 2] == len(text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}], ids=["include", "top"]
)
def test_responses_have_log_probabilities(
    served: Served, client: openai.OpenAI, asked: dict[str, Any], stream: bool
) -> None:
    common: dict[str, Any] = {
        "model": "demo", "input": "def add(a, b):", "temperature": 0, "max_output_tokens": 20, **asked
    }  # fmt: skip
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
    fields = {"messages": MESSAGES, "logprobs": True, "temperature": 0, "max_tokens": 20}
    [chat] = post(served, "chat/completions", **fields)["choices"]
    assert [entry.logprob for entry in part.logprobs] == [e["logprob"] for e in chat["logprobs"]["content"]]


def test_responses_without_the_wish_have_none(client: openai.OpenAI) -> None:
    found = client.responses.create(model="demo", input="x", max_output_tokens=3, include=[])
    assert found.output[0].content[0].logprobs == []  # type: ignore[union-attr]


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
    for path, prompt in (("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": MESSAGES})):
        fields = {**prompt, "return_token_ids": True, "n": 2, "seed": 1, "max_tokens": 12}
        whole, parts = post(served, path, **fields), chunks(served, path, **fields)
        for choice in whole["choices"]:
            own = [each["choices"][0] for each in parts if each["choices"][0]["index"] == choice["index"]]
            ids = [id for each in own for id in each.get("token_ids", [])]
            assert ids == choice["token_ids"] and len(ids) == 12
            text = choice["text"] if path == "completions" else choice["message"]["content"]
            assert llm.tokenizer is not None and llm.tokenizer.decode(ids, skip_special=False) == text
        if path == "completions":
            [ids] = llm.encode(PROMPT)
            assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids, ids]
            told = [each["choices"][0].get("prompt_token_ids") for each in parts]
            assert [each for each in told if each] == [ids, ids]
        else:
            ids = llm.tokenizer.encode_chat(MESSAGES)
            assert whole["prompt_token_ids"] == ids
            assert [each["prompt_token_ids"] for each in parts if "prompt_token_ids" in each] == [ids]
    assert "token_ids" not in post(served, "completions", prompt=PROMPT, max_tokens=1)["choices"][0]


@pytest.mark.parametrize("count", [0, 2])
def test_scores_of_a_prompt_in_vllm_s_shape(served: Served, llm: LLM, count: int) -> None:
    [ids] = llm.encode(PROMPT)
    [output] = llm.generate([ids], max_new_tokens=0, prompt_logprobs=count)
    assert output.prompt_logprobs is not None
    fields = {"prompt_logprobs": count, "max_tokens": 1}
    found = post(served, "completions", prompt=PROMPT, **fields)["choices"][0]["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for id, score, entry in zip(ids[1:], output.prompt_logprobs[1:], found[1:], strict=True):
        assert score is not None and entry[str(id)]["logprob"] == score.logprob
        assert {int(key) for key in entry} == {id, *(each for each, _ in score.top)}
        assert all(each["decoded_token"] for each in entry.values())
    both = post(served, "completions", prompt=PROMPT, echo=True, logprobs=1, **fields)["choices"][0]
    assert both["prompt_logprobs"] == found
    assert {len(top) for top in both["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert post(served, "chat/completions", messages=MESSAGES, **fields)["prompt_logprobs"][0] is None
    refused = served.client.post("/v1/completions", json={"prompt": PROMPT, "stream": True, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
