"""OpenTelemetry spans of generations, by its conventions for generative AI (gen_ai.*, whose status is development).

They hold no prompts and no texts.

They are exported if the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT), which needs `coserve[otel]`; all
other settings are OpenTelemetry's own variables, too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from coserve.api.generation.request_state import RequestState
from coserve.core.errors import CoserveError
from coserve.core.schemas.generation import GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

COLLECTORS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PARENT = "traceparent"
parent: ContextVar[str | None] = ContextVar("parent", default=None)
"""The `traceparent` header of the request that runs (W3C Trace Context)."""


class Traces:
    """Makes a span of each generation that ended."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("coserve")

    def generation(
        self, request: GenerateRequest, state: RequestState, base: str, now: float, error: BaseException | None
    ) -> None:
        """Make the span of a request that ended at `now`, on the clock of `state`, with this error if any."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        usage, timing = state.usage(), state.timing(now)
        operation = "text_completion" if request.messages is None else "chat"
        model = base if state.adapter is None else str(state.adapter)
        asked = {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "coserve",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": state.id,
            "gen_ai.request.choice.count": request.n,
            "gen_ai.response.finish_reasons": list(state.finished.values()),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
        }
        if state.first_token:
            attributes["gen_ai.response.time_to_first_chunk"] = timing.ttft
        if timing.queue is not None:
            attributes["coserve.queue_time"] = timing.queue
        end = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract({PARENT: parent.get() or ""}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - int(timing.e2e * 1e9),
        )
        if error is not None:
            span.set_attribute("error.type", error.code if isinstance(error, CoserveError) else "cancelled")
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def open_traces(environ: Mapping[str, str] = os.environ) -> Traces | None:
    """Return what exports spans to the collector that the environment names; None if it names none."""
    if not any(environ.get(name) for name in COLLECTORS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("no traces: %s is set, but they need pip install 'coserve[otel]'", COLLECTORS[0])
        return None
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: environ.get("OTEL_SERVICE_NAME", "coserve")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
