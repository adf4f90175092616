"""What a daemon's `/metrics` says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


def metric_values(page: str, name: str) -> dict[Labels, float]:
    """Values of one metric on a Prometheus page, by their labels; empty if the page lacks it."""
    families = text_string_to_metric_families(page)
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return {tuple(sample.labels.items()): sample.value for sample in samples}
