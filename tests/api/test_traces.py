"""Spans of generations, by OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from coserve.api.metrics.traces import Traces, open_traces
from coserve.core.errors import EngineUnavailable
from coserve.core.link.generation import Generate
from tests.support.api_server import REPLY, Api, add_adapter, serve_api

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[tuple[Api, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serve_api(tmp_path / "data") as api:
        api.service.generation.traces = Traces(provider)
        add_adapter(api, "poet", 2)
        yield api, exporter
    provider.shutdown()


async def test_a_generation_is_a_span(traced: tuple[Api, InMemorySpanExporter]) -> None:
    api, exporter = traced
    body = {"prompt": "the secret", "adapter": "poet", "max_tokens": 3, "temperature": 0.5, "n": 2}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    answer = await api.answered(200, "POST", "/generate", json=body, headers=headers)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion poet@2",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    assert span.parent is not None and format(span.parent.trace_id, "032x") == TRACE
    found = dict(span.attributes or {})
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "coserve",
            "gen_ai.request.model": "poet@2",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.response.id": answer["id"],
            "gen_ai.response.finish_reasons": ("length", "length"),
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        }.items()
    )
    assert 0 <= found["gen_ai.response.time_to_first_chunk"] <= (span.end_time - span.start_time) / 1e9  # type: ignore[operator]
    assert "secret" not in str(found) and REPLY not in str(found)


async def test_errors_and_clients_that_leave(traced: tuple[Api, InMemorySpanExporter]) -> None:
    api, exporter = traced
    api.engine.go_requests.clear()
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": None}
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(api.call("POST", "/v1/chat/completions", json=body))
        await api.engine.saw(Generate)
        api.service.generation.fail_all(EngineUnavailable("gone"))
    assert answer.result()[0] == 503
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat fake" and span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "engine_unavailable"
    assert (await api.call("POST", "/generate", json={"prompt": "x", "adapter": "nobody"}))[0] == 404
    assert len(exporter.get_finished_spans()) == 1  # it was refused before it began


def test_nothing_is_exported_unless_a_collector_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert open_traces({}) is None
    with caplog.at_level(logging.WARNING):
        traces = open_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    if traces is None:  # the exporter is not installed here
        assert "coserve[otel]" in caplog.text
    else:
        traces.close()
