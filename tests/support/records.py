"""Jobs and adapters for tests of whatever keeps them."""

from __future__ import annotations

from coserve.core.step_metrics import StepMetrics
from coserve.core.training.jobs import JobSpec, JobState
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.state.registry.records import AdapterRecord, JobRecord
from coserve.state.registry.registry import Registry


def make_spec(
    id: str = "job-1", adapter: str = "poet", version: int = 1, init_from: AdapterRef | None = None
) -> JobSpec:
    return JobSpec(
        id=id,
        adapter=adapter,
        version=version,
        init_from=init_from,
        lora=LoraSettings(r=4),
        training=TrainingSettings(steps=3),
        rows=2,
        tokens=20,
        target_tokens=10,
    )


def make_job(
    id: str = "job-1", adapter: str = "poet", version: int = 1, init_from: AdapterRef | None = None
) -> JobRecord:
    spec = make_spec(id, adapter, version, init_from)
    return JobRecord(spec=spec, state=JobState.QUEUED, created_at=1.0, base_fingerprint="f" * 8)


def make_adapter(id: str = "poet", version: int = 1, source: str = "import") -> AdapterRecord:
    return AdapterRecord(
        ref=AdapterRef(id, version),
        rank=4,
        alpha=8.0,
        targets=("q_proj",),
        base_fingerprint="f" * 8,
        base_name="tiny",
        source=source,
        created_at=2.0,
        bytes=10,
        sha256="0" * 64,
    )


def make_metrics(step: int, total_steps: int = 3, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        total_steps=total_steps,
        epoch=step / total_steps,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=10,
        target_tokens=5,
        seconds=0.1,
    )


def import_adapter(registry: Registry, record: AdapterRecord) -> None:
    """Register a version as an import does: its number is given out first."""
    while registry.reserve_version(record.ref.id).version < record.ref.version:
        pass
    registry.add_adapter(record)
