"""The metrics of several servers in one text."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from foredraft.serve.metrics import Metrics, labelled


@pytest.mark.parametrize("vllm", [False, True])
def test_metrics_of_replicas_stand_beside_each_other(vllm: bool) -> None:
    texts = {}
    for count, name in enumerate(("one", "two"), 1):
        metrics = Metrics(vllm=vllm)
        metrics.by_name["requests_running"].set(count)
        metrics.refused("queue full")
        metrics.by_name["time_to_first_token_seconds"].observe(0.3)
        texts[name] = metrics.text(lambda: None).decode()
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
