"""The prefix cache: texts and scores are the same to the bit with it, and its memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM
from foredraft.decode import prefix_cache
from foredraft.decode.prefix_cache import Prefix, PrefixCache
from tests.support.checkpoints import save_pair
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect

CHUNK = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    pair = save_pair(tmp_path_factory.mktemp("models"))
    sizes: Any = {"max_batch": 4, "max_length": 1024}
    return foredraft.load(pair / "big", draft=pair / "small", policy="fixed", device="cpu", **sizes)


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[int]:
    return llm.encode(Path(prefix_cache.__file__).read_text())[0][: 3 * CHUNK]


@pytest.fixture(autouse=True)
def off(llm: LLM) -> Iterator[None]:
    yield
    engine_of(llm).prefix_cache = None


def run(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Any]:
    outputs = llm.generate(prompts, **{"temperature": 0, "max_new_tokens": 6, "logprobs": 2, **options})
    return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]


def prompts_of(ids: list[int]) -> list[list[int]]:
    own = [5, 6, 7]
    return [
        ids[:700], ids[:700], [*ids[:600], *own], [*ids[:300], *own], [*ids[:100], *own],
        ids[: CHUNK + 1], ids[:CHUNK], ids[: 2 * CHUNK + 1], [*own, *ids[:600]],
    ]  # fmt: skip


OPTIONS: list[dict[str, Any]] = [
    {"drafter": "none"}, {"drafter": "draft-model"}, {"drafter": "lookup"}, {"drafter": "draft-model", "seed": 4, "temperature": 1},
    {"drafter": "draft-model", "n": 3, "seed": 4, "temperature": 1}, {"drafter": "none", "prompt_logprobs": 1},
]  # fmt: skip


def check(llm: LLM, ids: list[int], options: dict[str, Any]) -> None:
    n = options.get("n", 1)
    prompts = prompts_of(ids)
    want = [run(llm, [prompt], **options) for prompt in prompts]
    engine_of(llm).prefix_cache = PrefixCache(1 << 30)
    assert [run(llm, [prompt], **options) for prompt in prompts] == want
    together = run(llm, prompts, **options)
    assert [together[n * place : n * place + n] for place in range(len(prompts))] == want
    hits = engine_of(llm).prefix_cache.hits
    assert hits == 0 if "prompt_logprobs" in options else hits > 4 * CHUNK
    engine_of(llm).prefix_cache = None


@pytest.mark.heavy
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_and_scores_are_the_same_to_the_bit(llm: LLM, ids: list[int], options: dict[str, Any]) -> None:
    check(llm, ids, options)


def test_the_output_says_what_was_cached(llm: LLM, ids: list[int]) -> None:
    engine_of(llm).prefix_cache = PrefixCache(1 << 30)
    cached = [llm.generate([prompt], max_new_tokens=1)[0].cached_tokens for prompt in prompts_of(ids)]
    assert cached == [0, 699, 600, 300, 100, CHUNK, CHUNK - 1, 2 * CHUNK, 0]


def test_operators_resume_at_the_ends_of_chunks(ids: list[int], tmp_path: Path) -> None:
    big = save_pair(tmp_path) / "big"
    llm = foredraft.load(big, device="cpu", max_batch=2, max_length=1024, kernels=False, drafter="none")
    want = [run(llm, [prompt]) for prompt in prompts_of(ids)]
    engine_of(llm).prefix_cache = PrefixCache(1 << 30)
    assert [run(llm, [prompt]) for prompt in prompts_of(ids)] == want
    cached = [llm.generate([prompt], max_new_tokens=1)[0].cached_tokens for prompt in prompts_of(ids)]
    assert cached == [2 * CHUNK, 2 * CHUNK, 2 * CHUNK, CHUNK, 0, CHUNK, 0, 2 * CHUNK, 2 * CHUNK]
    llm.close()


def test_a_reply_is_kept_to_its_end(llm: LLM, ids: list[int]) -> None:
    engine_of(llm).prefix_cache = PrefixCache(1 << 30)
    greedy: Any = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    [reply] = llm.generate([ids[:300]], **greedy)
    [goes_on] = llm.generate([[*ids[:300], *reply.token_ids, *ids[300:310]]], **greedy)
    [departs] = llm.generate([[*ids[:300], *reply.token_ids[:30], 5, 6]], **greedy)
    assert (goes_on.cached_tokens, departs.cached_tokens) == (339, 330)


def test_the_memory_is_bounded_and_the_oldest_chunks_go(llm: LLM, ids: list[int]) -> None:
    cache = engine_of(llm).prefix_cache = PrefixCache(1 << 30)
    llm.generate([ids[:700]], max_new_tokens=1)
    small = engine_of(llm).prefix_cache = PrefixCache(cache.bytes)  # two texts of half the length
    for first in range(5, 10):
        llm.generate([[first, *ids[: CHUNK + 3]]], max_new_tokens=1)
        assert 0 < small.bytes <= small.most_bytes
    again = [llm.generate([[first, *ids[: CHUNK + 3]]], max_new_tokens=1)[0] for first in (9, 8, 5)]
    assert [output.cached_tokens for output in again] == [CHUNK + 3, CHUNK + 3, 0]
    assert sum(span.bytes for part in small._parts.values() for span in part.spans.values()) == small.bytes
    none = engine_of(llm).prefix_cache = PrefixCache(1)
    llm.generate([ids[:700]], max_new_tokens=1)
    assert none.bytes == 0


def test_a_digest_of_a_chunk_is_caught(llm: LLM, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(longer: Any) -> Any:
        def mutated(before: Prefix, chunk: list[int]) -> Prefix:
            return Prefix(before.end + len(chunk), longer(Prefix(), chunk).digest)

        return mutated

    def check_other_beginning() -> None:
        other = [*ids[:CHUNK][::-1], *ids[CHUNK : 2 * CHUNK], 5, 6]
        want = run(llm, [other], drafter="none")
        engine_of(llm).prefix_cache = PrefixCache(1 << 30)
        run(llm, [ids[:700]], drafter="none")
        for _ in range(2):
            assert run(llm, [other], drafter="none") == want

    check_other_beginning()
    engine_of(llm).prefix_cache = None
    assert_caught(defect("chunks alone", prefix_cache._longer, alone, check_other_beginning), monkeypatch)
