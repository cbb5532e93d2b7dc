"""The rule that chooses a replica, and the metrics of several, without Ray."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from foredraft.serve.affinity import bound, digest, order, prompt_key, ranked
from foredraft.serve.metrics import Metrics, labelled

names = st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True)
keys = st.integers(0, 2**64 - 1)
loads = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def digests(found: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([digest(f"replica {name}") for name in found], dtype=np.uint64)


@given(names, keys, st.randoms(use_true_random=False))
def test_the_order_of_a_key_does_not_depend_on_the_others(found: list[int], key: int, dice: object) -> None:
    want = [found[place] for place in order(key, digests(found))]
    assert sorted(want) == sorted(found)
    gone = dice.choice(found)  # type: ignore[attr-defined]
    rest = [name for name in found if name != gone]
    dice.shuffle(rest)  # type: ignore[attr-defined]
    assert [rest[place] for place in order(key, digests(rest))] == [name for name in want if name != gone]


def test_keys_spread_evenly_and_one_in_n_moves() -> None:
    eight, nine = digests(list(range(8))), digests(list(range(9)))
    keys = [digest(f"prompt {n}") for n in range(8000)]
    before = [int(order(key, eight)[0]) for key in keys]
    after = [int(order(key, nine)[0]) for key in keys]
    assert all(850 < count < 1150 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {8} and 750 < len(moved) < 1030


@given(loads, keys, st.integers(1, 20))
def test_the_first_is_the_one_with_room_that_the_key_likes_best(
    found: list[int], key: int, free: int
) -> None:
    replicas = digests(list(range(len(found))))
    places = ranked(key, replicas, found, free)
    assert sorted(places) == list(range(len(found)))
    most = bound(found, free)
    preferred = [int(place) for place in order(key, replicas)]
    assert places[0] == next(place for place in preferred if found[place] < most)


@given(st.integers(1, 30), st.integers(1, 8), st.lists(keys, max_size=200))
def test_no_key_makes_a_hot_spot(count: int, free: int, wanted: list[int]) -> None:
    replicas, found = digests(list(range(count))), [0] * count
    for key in [*wanted, *([7] * 100)]:
        found[ranked(key, replicas, found, free)[0]] += 1
        assert max(found) <= max(free, 1.25 * sum(found) / count + 1)


@given(loads)
def test_a_request_without_a_key_takes_the_less_loaded_of_two(found: list[int]) -> None:
    places = ranked(None, digests(list(range(len(found)))), found, 4)
    assert sorted(places) == list(range(len(found)))
    assert len(found) == 1 or found[places[0]] <= found[places[1]]


def test_a_key_is_that_of_the_beginning() -> None:
    long, system = "x" * 100, {"role": "system", "content": "x" * 100}
    users = [{"role": "user", "content": each} for each in "ab"]
    same: list[list[dict[str, Any]]] = [
        [{"prompt": long + tail, "temperature": n} for n, tail in enumerate(("", "a", "b"))],
        [{"prompt": [5] * 25 + tail} for tail in ([], [1], [2, 3])],
        [{"prompt": [long, tail]} for tail in "ab"],
        [{"messages": [system, user]} for user in users],
        [{"system": long, "messages": [user]} for user in users],
        [{"instructions": long, "input": each} for each in "ab"],
        [{"prompt_cache_key": "me", "prompt": long} for _ in "ab"],
    ]
    found = [{prompt_key(body, 100) for body in bodies} for bodies in same]
    assert all(len(each) == 1 and None not in each for each in found)
    assert len(set.union(*found)) == 4  # of the same text, of token ids, of messages, and of another client
    assert prompt_key({"prompt": "y" + long}, 100) not in found[0]
    for nothing in ({}, {"prompt": ""}, {"prompt": []}, {"messages": None}):
        assert prompt_key(nothing, 100) is None


bodies = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=40)
@given(bodies)
def test_any_body_has_a_key_or_none(value: object) -> None:
    for name in ("prompt", "messages", "input", "system", "prompt_cache_key"):
        assert prompt_key({name: value}, 50) == prompt_key({name: value, "other": 1}, 50)


def test_keys_are_the_same_in_every_process() -> None:
    body = {"messages": [{"role": "user", "content": "é\ud800"}]}
    assert prompt_key(body, 99) == 9608405311983191670


@pytest.mark.parametrize("vllm", [False, True])
def test_metrics_of_replicas_stand_beside_each_other(vllm: bool) -> None:
    texts = {}
    for count, name in enumerate(("one", "two"), 1):
        metrics = Metrics(vllm=vllm)
        metrics.by_name["requests_running"].set(count)
        metrics.refused("queue full")
        metrics.by_name["time_to_first_token_seconds"].observe(0.3)
        texts[name] = metrics.text().decode()
    found = list(text_string_to_metric_families(labelled(texts).decode()))
    assert len({family.name for family in found}) == len(found)
    each_sample = (each for family in found for each in family.samples)
    samples = {(each.name, *sorted(each.labels.items())): each.value for each in each_sample}
    for count, name in enumerate(("one", "two"), 1):
        own = {
            (each.name, *sorted({**each.labels, "replica": name}.items())): each.value
            for family in text_string_to_metric_families(texts[name])
            for each in family.samples
        }
        assert own.items() <= samples.items()
        running = "vllm:num_requests_running" if vllm else "foredraft_requests_running"
        assert samples[running, ("replica", name)] == count
    types = {each.name: each.type for text in texts.values() for each in text_string_to_metric_families(text)}
    assert {family.name: family.type for family in found} == types
