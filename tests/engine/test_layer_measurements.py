"""A measurement of compiled layers that fails is never taken for one that is complete."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from coserve.core.errors import UnsupportedBase
from coserve.engine.warming import layer_measurements
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.layer_measurements import measure_layers, measure_levels
from coserve.engine.warmup.parts import TRAINING_LAYERS, WarmUpTask
from coserve.finetune.layers.graph_passes import CaptureFailed
from coserve.finetune.memory_profiling import Conditions
from coserve.kernels.lora.backend import choose_backend
from coserve.memory.plan import Work
from coserve.memory.profile import save_layer_costs
from coserve.model.base import Base
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.finetuning import tiny_base
from tests.support.gpu_memory import COSTS


class Layers:
    def __init__(self, error: Exception) -> None:
        self.error, self.forgotten = error, False

    def compile_levels(self) -> None:
        raise self.error

    def forget_examples(self) -> None:
        self.forgotten = True


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base("llama")


@pytest.fixture
def caches(tmp_path: Path) -> Caches:
    found = Caches(WarmUpTask("{}", str(tmp_path), {}, "shape", 1))
    found.path(TRAINING_LAYERS).parent.mkdir(parents=True)
    return found


def conditions(base: Base) -> Conditions:
    return Conditions(choose_backend("auto", base.device, base.dtype), False, 4, 16, Work(64, 64, 1))


def test_memory_that_runs_out_is_reported_as_that(base: Base, caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profiler:
        def __init__(self, *args: object, **options: object) -> None:
            pass

        def costs(self, tokens: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_measurements, "MemoryProfiler", Profiler)
    with pytest.raises(torch.OutOfMemoryError):
        measure_layers(cast(CompiledLayers, None), base, conditions(base), caches)
    assert caches.layer_costs() is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), CaptureFailed("a graph is lost")])
def test_levels_that_cannot_be_measured_are_no_complete_part(base: Base, caches: Caches, error: Exception) -> None:
    save_layer_costs(caches.path(TRAINING_LAYERS), COSTS)
    layers = Layers(error)
    with pytest.raises(type(error), match=str(error)):
        measure_levels(cast(CompiledLayers, layers), base, conditions(base), caches)
    assert layers.forgotten
    assert caches.level_costs() is None


def test_a_base_that_cannot_have_levels_is_no_failure(
    base: Base, caches: Caches, caplog: pytest.LogCaptureFixture
) -> None:
    save_layer_costs(caches.path(TRAINING_LAYERS), COSTS)
    layers = Layers(UnsupportedBase("another gradient"))
    measure_levels(cast(CompiledLayers, layers), base, conditions(base), caches)
    assert layers.forgotten and "another gradient" in caplog.text
    assert caches.level_costs() is None


def test_levels_of_layers_that_were_not_measured(base: Base, caches: Caches) -> None:
    with pytest.raises(UnsupportedBase, match="those that keep all were not"):
        measure_levels(cast(CompiledLayers, Layers(AssertionError())), base, conditions(base), caches)
