"""Tracing: one OpenTelemetry span for each request that asks for a text. Needs the extra `otel`.

Attributes follow the semantic conventions for generative AI. A span is made once its request is over, out of
its record, so a server without tracing pays nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import foredraft
from foredraft.errors import ConfigError
from foredraft.serve.request_records import RequestRecord
from foredraft.serve.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Tracing", "requested"]


class Tracing:
    """Makes spans.

    Args:
        provider: Where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("foredraft", foredraft.__version__)

    @classmethod
    def to_collector(cls) -> Tracing:
        """Return tracing by the environment: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and others.

        Raises:
            ConfigError: A package is missing.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"tracing needs the package {error.name}",
                remedy="install it: pip install 'foredraft[otel]'",
            ) from error
        own = Resource({"service.name": "foredraft", "service.version": foredraft.__version__})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())  # the last one wins
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def end(self, record: RequestRecord) -> None:
        """Make the span of a request that is over."""
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
        """Send what is left."""
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
