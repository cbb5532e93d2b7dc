"""Metrics for Prometheus, and an OpenTelemetry span for each request that asks for a text (extra `otel`).

Attributes follow the semantic conventions for generative AI. A span is made of the record of a request that
is over, so a server without tracing pays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import foredraft
from foredraft.errors import ConfigError
from foredraft.llm.output import Output
from foredraft.serve.logs import RequestRecord, current
from foredraft.serve.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
VLLM = "spec_decode_num_"  # begins vLLM's names of what concerns drafts
# Own name -> its kind, its meaning, vLLM's name, which is behind an option, and a label.
METRICS: dict[str, tuple[Any, str, str, str]] = {
    "requests_running": (Gauge, "Samples that have a row of the batch.", "num_requests_running", ""),
    "requests_waiting": (Gauge, "Samples that wait for a row.", "num_requests_waiting", ""),
    "requests_paused": (Gauge, "Samples that pause, because their reader is slow.", "", ""),
    "cache_usage": (Gauge, "Share of the cache's positions that are in use.", "kv_cache_usage_perc", ""),
    "time_to_first_token_seconds": (
        Histogram, "From a request's arrival to the first token of any of its samples; one for each request.",
        "time_to_first_token_seconds", "",
    ),
    "time_per_output_token_seconds": (
        Histogram, "Of a sample's decoding, by its tokens.", "time_per_output_token_seconds", "",
    ),
    "prompt_tokens": (
        Counter, "Tokens of prompts, which count once for all their samples.", "prompt_tokens", "",
    ),
    "prefix_cache_hits": (Counter, "Tokens of prompts that were not read again.", "prefix_cache_hits", ""),
    "generation_tokens": (Counter, "New tokens.", "generation_tokens", ""),
    "drafts": (Counter, "Drafts.", f"{VLLM}drafts", ""),
    "draft_tokens": (Counter, "Drafted tokens.", f"{VLLM}draft_tokens", ""),
    "accepted_tokens": (Counter, "Drafted tokens that were kept.", f"{VLLM}accepted_tokens", ""),
    "accepted_tokens_by_position": (
        Counter, "Drafted tokens that were kept, by position.", f"{VLLM}accepted_tokens_per_pos", "position",
    ),
    "requests_finished": (Counter, "Samples by why they ended.", "", "reason"),
    "requests_cancelled": (Counter, "Requests that their client left or cancelled.", "", ""),
    "requests_refused": (Counter, "Requests that were refused or dropped.", "", "reason"),
}  # fmt: skip


class Metrics:
    def __init__(self, *, vllm: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.by_name: dict[str, Any] = {}
        for name, (kind, help, theirs, label) in METRICS.items():
            shown = f"vllm:{theirs}" if vllm and theirs else f"foredraft_{name}"
            more = {"buckets": SECONDS} if kind is Histogram else {}
            labels = (label,) if label else ()
            self.by_name[name] = kind(shown, help, labels, registry=self.registry, **more)

    def count(self, name: str, more: float = 1, *, label: object = None) -> None:
        counter = self.by_name[name]
        (counter if label is None else counter.labels(label)).inc(more)

    def refused(self, reason: str) -> None:
        """Count the running request as refused, and note why in its record."""
        current().reason = reason
        self.count("requests_refused", label=reason)

    def finished(self, output: Output) -> None:
        stats = output.stats
        if stats.tokens > 0:
            self.by_name["time_per_output_token_seconds"].observe(stats.seconds / stats.tokens)
        for name, more in (
            ("prefix_cache_hits", output.cached_tokens), ("generation_tokens", max(0, stats.tokens)),
            ("drafts", sum(stats.drafts.values())), ("draft_tokens", stats.drafted),
            ("accepted_tokens", stats.accepted),
        ):  # fmt: skip
            self.count(name, more)
        for position, accepted in enumerate(stats.accepted_at):
            self.count("accepted_tokens_by_position", accepted, label=position)
        self.count("requests_finished", label=output.finish_reason)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def labelled(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of several servers as one text, each with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            new = Metric(family.name, family.documentation, family.type)
            known = families.setdefault(family.name, new)
            for sample in family.samples:
                known.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return generate_latest(cast(Any, SimpleNamespace(collect=families.values)))


class Tracing:
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
        seconds, first = time.monotonic() - record.started, record.seconds_to_first_token
        found: dict[str, Any] = {
            "gen_ai.operation.name": record.operation, "gen_ai.provider.name": "foredraft",
            **record.requested, "gen_ai.response.model": record.model or None,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens, "gen_ai.usage.output_tokens": record.tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.time_to_first_chunk": first,
            "http.request.method": record.method, "url.path": record.path,
            "http.response.status_code": record.status or None, "foredraft.request_id": record.id,
        }  # fmt: skip
        span = self._tracer.start_span(
            f"{record.operation} {record.requested.get('gen_ai.request.model', '')}".strip(),
            context=propagate.extract(record.headers), kind=SpanKind.SERVER, start_time=record.wall,
            attributes={name: value for name, value in found.items() if value is not None},
        )  # fmt: skip
        if first is not None:
            span.add_event("gen_ai.first_token", timestamp=record.wall + int(first * 1e9))
        failed = record.reason if record.reason is not None or record.status < 500 else str(record.status)
        if failed is not None:
            span.set_attribute("error.type", failed)
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(record.wall + int(seconds * 1e9))

    def stop(self) -> None:
        self._provider.shutdown()


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
