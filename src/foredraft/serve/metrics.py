"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foredraft.llm.output import Output
from foredraft.serve.request_records import current

__all__ = ["Metrics", "labelled"]

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
# Own name -> vLLM's, behind an option.
VLLM = {
    "requests_running": "num_requests_running", "requests_waiting": "num_requests_waiting",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "time_per_output_token_seconds",
    "prompt_tokens": "prompt_tokens", "generation_tokens": "generation_tokens",
    "prefix_cache_hits": "prefix_cache_hits", "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "accepted_tokens_by_position": "spec_decode_num_accepted_tokens_per_pos",
    "cache_usage": "kv_cache_usage_perc",
}  # fmt: skip


class Metrics:
    """The metrics of one server.

    Args:
        vllm: Use vLLM's names where it has them.
    """

    def __init__(self, *, vllm: bool = False) -> None:
        self.registry = CollectorRegistry()

        def named(name: str) -> str:
            return f"vllm:{VLLM[name]}" if vllm and name in VLLM else f"foredraft_{name}"

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(named(name), help, labels, registry=self.registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(named(name), help, registry=self.registry, buckets=SECONDS)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(named(name), help, registry=self.registry)

        self.running = gauge("requests_running", "Samples that have a row of the batch.")
        self.waiting = gauge("requests_waiting", "Samples that wait for a row.")
        self.paused = gauge("requests_paused", "Samples that pause, because their reader is slow.")
        self.cache_usage = gauge("cache_usage", "Share of the cache's positions that are in use.")
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to the first token of any of its samples; one for each request.",
        )
        self._each = histogram("time_per_output_token_seconds", "Of a sample's decoding, by its tokens.")
        self.prompt_tokens = counter(
            "prompt_tokens", "Tokens of prompts, which count once for all their samples."
        )
        self._cached = counter("prefix_cache_hits", "Tokens of prompts that were not read again.")
        self._tokens = counter("generation_tokens", "New tokens.")
        self._drafts = counter("drafts", "Drafts.")
        self._drafted = counter("draft_tokens", "Drafted tokens.")
        self._accepted = counter("accepted_tokens", "Drafted tokens that were kept.")
        self._by_position = counter(
            "accepted_tokens_by_position", "Drafted tokens that were kept, by position.", ("position",)
        )
        self._finished = counter("requests_finished", "Samples by why they ended.", ("reason",))
        self.cancelled = counter("requests_cancelled", "Requests that their client left or cancelled.")
        self._refused = counter("requests_refused", "Requests that were refused or dropped.", ("reason",))

    def refused(self, reason: str) -> None:
        """Count the running request as refused, and note why in its record."""
        current().reason = reason
        self._refused.labels(reason).inc()

    def finished(self, output: Output) -> None:
        """Count a sample that has finished."""
        stats = output.stats
        if stats.tokens > 0:
            self._each.observe(stats.seconds / stats.tokens)
        self._cached.inc(output.cached_tokens)
        self._tokens.inc(max(0, stats.tokens))
        self._drafts.inc(sum(stats.drafts.values()))
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, accepted in enumerate(stats.accepted_at):
            self._by_position.labels(position).inc(accepted)
        self._finished.labels(output.finish_reason).inc()

    def text(self, update: Callable[[], None]) -> bytes:
        """Return all metrics; `update` sets the gauges first."""
        update()
        return generate_latest(self.registry)


class _Labelled(Collector):
    """The metrics of several servers, each with the label `replica`."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from families.values()


def labelled(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of several servers as one text.

    Args:
        texts: Of `Metrics.text`, by the name of the replica.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)
