"""Profiles a model: measured on a GPU, or predicted with fake tensors without one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from benchmarks.common.provenance import versions
from benchmarks.memory.place import Place, place
from benchmarks.memory.profile.coserve_passes import CoserveTrial, SeamBackends
from benchmarks.memory.profile.passes import Trial, read_points
from benchmarks.memory.profile.peft_passes import PeftTrial
from benchmarks.memory.profile.report import ProfileReport, Series, lines_of
from benchmarks.memory.profile.request import Backend, ProfileRequest, Workload
from coserve.data.pretrained.source import BUNDLED
from coserve.model.base import wrap_base
from coserve.model.wrappers import drop_other_parts, model_class

MEASURED = "torch's allocator: peak of allocated bytes, read for each pass alone, random weights"
PREDICTED = "fake tensors: lifetimes of storages, and the workspaces of known kernels; no GPU ran anything"


@dataclass(frozen=True)
class Step:
    """One of `total` sizes begins."""

    done: int
    total: int
    text: str


def profile(request: ProfileRequest, progress: Callable[[Step], None]) -> ProfileReport:
    """Run the profile; blocks until all series are read. Nothing else may use the process's GPU meanwhile.

    Raises:
        InvalidRequest: targets that the base does not have.
        UnsupportedBase: a base that coserve does not serve.
        ConfigError: PEFT is not installed.
    """
    config = _config(request)
    total = len(request.backends) * len(request.workloads) * len(request.lengths) * len(request.batches)
    done = 0

    def begin(series: str, batch: int) -> None:
        nonlocal done
        progress(Step(done=done, total=total, text=f"{series}, {batch} rows"))
        done += 1

    found: list[Series] = []
    parameters = 0
    measured = torch.cuda.is_available() and not request.predict
    for backend in request.backends:
        with place(getattr(torch, request.dtype), measured=measured) as where:
            model = _random_model(config, request, where.device)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            trial = _trial(backend, model, request, where)
            del model
            for workload in request.workloads:
                found += _series(trial, backend, workload, request, where, begin)
            del trial
            where.free()
    return ProfileReport(
        measured=measured,
        how=MEASURED if measured else PREDICTED,
        device=torch.cuda.get_device_name() if measured else "none",
        model=request.model,
        family=config.model_type,
        parameters=parameters,
        dtype=request.dtype,
        recompute=request.recompute,
        versions=versions(),
        series=tuple(found),
    )


def _series(
    trial: Trial,
    backend: Backend,
    workload: Workload,
    request: ProfileRequest,
    where: Place,
    begin: Callable[[str, int], None],
) -> Iterator[Series]:
    """Yield one series for each length."""
    try:
        with trial.workload(workload) as passes:
            for length in request.lengths:
                name = f"{backend}, {workload.name}, {length} tokens a row"
                points, ended, workspace = read_points(
                    passes,
                    where.meter,
                    request.batches,
                    length,
                    partial(begin, name),
                    where.free,
                    warm_up=where.measured,
                )
                yield Series(
                    backend=backend,
                    workload=workload,
                    length=length,
                    points=tuple(points),
                    lines=lines_of(points, length),
                    ended=ended,
                    optimizer=passes.optimizer,
                    workspace=workspace,
                    kv_per_token=passes.kv_per_token,
                )
    except torch.OutOfMemoryError:
        where.free()
        ended = "out of memory before the first size: the adapter and its optimizer do not fit"
        for length in request.lengths:
            yield Series(backend=backend, workload=workload, length=length, points=(), lines={}, ended=ended)


def _trial(backend: Backend, model: PreTrainedModel, request: ProfileRequest, where: Place) -> Trial:
    if backend is Backend.PEFT:
        return PeftTrial(model, where.meter)
    base = wrap_base(model, name=Path(request.model).name)
    backends = SeamBackends(where.backend, where.training_attention, where.paged_attention, request.recompute)
    return CoserveTrial(base, where.meter, backends)


def _random_model(config: PretrainedConfig, request: ProfileRequest, device: torch.device) -> PreTrainedModel:
    """Build the config's model class with random weights: memory does not depend on values."""
    with device:
        model: PreTrainedModel = model_class(config).from_config(config, dtype=getattr(torch, request.dtype))
    drop_other_parts(model)
    return model


def _config(request: ProfileRequest) -> PretrainedConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = request.model
        if request.config is not None:
            path = folder
            (Path(folder) / "config.json").write_text(json.dumps(request.config))
        elif path == BUNDLED:
            path = str(resources.files("coserve") / "assets" / "tiny")
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
        return config
