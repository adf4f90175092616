"""Metrics under vLLM's names, with its labels `model_name` and `engine`, for existing dashboards and autoscalers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from coserve.core.types import FinishReason

_NAMES: dict[str, tuple[str, ...]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_inference_time_seconds": ("request_inference_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "num_requests_waiting": ("num_requests_waiting",),
    "num_requests_running": ("num_requests_running",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc",),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "preemptions": ("num_preemptions",),
    "requests": ("request_success",),
}
"""Maps our names (without `coserve_`) to vLLM's (without `vllm:`)."""


def vllm_names(metric: str) -> tuple[str, ...]:
    """Return vLLM's names (without `vllm:`) of our metric."""
    return _NAMES.get(metric.removeprefix("coserve_"), ())


class VllmNames(Collector):
    """Yields copies of `source`'s metrics. `model`: returns the base's name, empty before there is an engine."""

    def __init__(self, source: CollectorRegistry, model: Callable[[], str]) -> None:
        self._source, self._model = source, model

    def collect(self) -> Iterable[Metric]:
        labels = {"model_name": self._model(), "engine": "0"}
        for metric in self._source.collect():
            for name in vllm_names(metric.name):
                copy = Metric(f"vllm:{name}", metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(
                        name=sample.name.replace(metric.name, copy.name, 1), labels=_labels(sample) | labels
                    )
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield copy


def _labels(sample: Sample) -> dict[str, str]:
    """Return the sample's labels in vLLM's terms, which name finish reasons differently."""
    found = dict(sample.labels)
    reason = found.pop("finish_reason", None)
    if reason is not None:
        found["finished_reason"] = "abort" if reason == FinishReason.CANCELLED else reason
    return found
