"""Metrics for Prometheus, and an OpenTelemetry span for each request that asks for a text (extra `otel`).

Attributes follow the semantic conventions for generative AI. A span is made of the record of a request that
is over, so a server without tracing pays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

import foredraft
from foredraft.errors import ConfigError
from foredraft.llm.output import Output
from foredraft.serve.logs import RequestRecord, current
from foredraft.serve.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

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
    """The metrics of one server."""

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
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class Tracing:
    """Makes spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("foredraft", foredraft.__version__)

    @classmethod
    def to_collector(cls) -> Tracing:
        """Return tracing by the environment: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and others."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"tracing needs the package {error.name}", remedy="install it: pip install 'foredraft[otel]'"
            ) from error
        own = Resource({"service.name": "foredraft", "service.version": foredraft.__version__})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())  # the last one wins
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def end(self, record: RequestRecord) -> None:
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not record.operation:
            return
        seconds = time.monotonic() - record.started
        span = self._tracer.start_span(
            f"{record.operation} {record.requested.get('gen_ai.request.model', '')}".strip(),
            context=propagate.extract(record.headers), kind=SpanKind.SERVER, start_time=record.wall,
            attributes=_attributes(record),
        )  # fmt: skip
        if (first := record.seconds_to_first_token) is not None:
            span.add_event("gen_ai.first_token", timestamp=record.wall + int(first * 1e9))
        failed = record.reason if record.reason is not None or record.status < 500 else str(record.status)
        if failed is not None:
            span.set_attribute("error.type", failed)
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(record.wall + int(seconds * 1e9))

    def stop(self) -> None:
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, Any]:
    first = record.seconds_to_first_token
    found: dict[str, Any] = {
        "gen_ai.operation.name": record.operation, "gen_ai.provider.name": "foredraft", **record.requested,
        "gen_ai.response.model": record.model or None,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens, "gen_ai.usage.output_tokens": record.tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.time_to_first_chunk": first,
        "http.request.method": record.method, "url.path": record.path,
        "http.response.status_code": record.status or None, "foredraft.request_id": record.id,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def requested(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """Return the fields of a request that its span shows."""
    given, limit = request.shared, getattr(request, "max_completion_tokens", None)
    found: dict[str, Any] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": given.get("max_new_tokens") if limit is None else limit,
        **{f"gen_ai.request.{name}": given.get(name) for name in ("temperature", "top_p", "top_k", "seed")},
        "gen_ai.request.choice.count": None if request.n in (None, 1) else request.n,
        "gen_ai.request.stream": request.stream or None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}
