"""Records of bases, jobs and adapters, with a test's own values for some fields."""

from __future__ import annotations

from typing import Any

import msgspec

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.schemas.adapters import Adapter
from coserve.core.training.jobs import JobSpec, JobState
from coserve.core.training.settings import TrainingSettings
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterRef, BaseSpec, LoraSettings, SiteSpec, Slo
from coserve.state.registry.records import AdapterRecord, JobRecord
from coserve.state.registry.registry import Registry


def make_base_spec(sites: dict[str, SiteSpec], **fields: Any) -> BaseSpec:
    """A float32 Llama on a CPU with these sites, all of them targets."""
    spec = BaseSpec(
        name="tiny",
        fingerprint="f" * 64,
        family="llama",
        dtype="float32",
        device="cpu",
        layers=len({site.layer for site in sites.values()}),
        hidden=8,
        vocab=16,
        context=32,
        eos_token_ids=(),
        sites=sites,
        default_targets=tuple(dict.fromkeys(name.rpartition(".")[2] for name in sites)),
    )
    return msgspec.structs.replace(spec, **fields)


def make_request(id: str = "r", max_tokens: int = 500, prompt: int = 2, **fields: Any) -> Generate:
    """For the base, with a second for its first token and for each later one."""
    sampling, slo = SamplingParams(max_tokens=max_tokens), Slo(ttft=1.0, tpot=1.0)
    request = Generate(id=id, prompt=(1,) * prompt, sampling=sampling, adapter=None, slo=slo)
    return msgspec.structs.replace(request, **fields)


def make_spec(
    id: str = "job-1", adapter: str = "poet", version: int = 1, init_from: AdapterRef | None = None, **fields: Any
) -> JobSpec:
    spec = JobSpec(
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
    return msgspec.structs.replace(spec, **fields)


def make_job(
    id: str = "job-1", adapter: str = "poet", version: int = 1, init_from: AdapterRef | None = None
) -> JobRecord:
    spec = make_spec(id, adapter, version, init_from)
    return JobRecord(spec=spec, state=JobState.QUEUED, created_at=1.0, base_fingerprint="f" * 8)


def make_adapter(id: str = "poet", version: int = 1, **fields: Any) -> AdapterRecord:
    record = AdapterRecord(
        ref=AdapterRef(id, version),
        rank=4,
        alpha=8.0,
        targets=("q_proj",),
        base_fingerprint="f" * 8,
        base_name="tiny",
        source="import",
        created_at=2.0,
        bytes=10,
        sha256="0" * 64,
    )
    return msgspec.structs.replace(record, **fields)


def make_adapter_info(id: str, version: int = 1, **fields: Any) -> Adapter:
    """What the API shows of an adapter."""
    info = Adapter(
        id=id,
        version=version,
        ref=f"{id}@{version}",
        rank=8,
        alpha=16.0,
        targets=["q_proj"],
        base="tiny",
        base_fingerprint="f",
        source="import",
        created_at=1.0,
        bytes=10,
        sha256="0",
        resident=False,
    )
    return msgspec.structs.replace(info, **fields)


def make_metrics(step: int, total_steps: int = 3, loss: float = 1.0, **fields: Any) -> StepMetrics:
    metrics = StepMetrics(
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
    return msgspec.structs.replace(metrics, **fields)


def import_adapter(registry: Registry, record: AdapterRecord) -> None:
    """Register a version as an import does: its number is given out first."""
    while registry.reserve_version(record.ref.id).version < record.ref.version:
        pass
    registry.add_adapter(record)
