"""The compiled layers of training are there before the engine serves; where they cannot be, jobs run without and the
operator is told."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept, LayerTime, LevelCosts, LinearBytes, TrainingCosts
from coserve.engine.parts import EngineParts
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.compiled import make_training_layers
from coserve.engine.warmup.parts import TRAINING_LEVELS, WarmUpTask
from coserve.memory.profile import save_layer_costs
from coserve.model.agreement import FailedTogether
from tests.support.gpu_memory import COSTS

TIME = LayerTime(fixed=1.0, per_row_token=0.0)
LEVEL = LevelCosts(kept=100.0, shrinks=(False,) * 4, backward=LinearBytes(fixed=0.0, per_token=1.0), time=TIME)
WITH_LEVELS = msgspec.structs.replace(COSTS, time=TIME, levels={Kept.ATTENTION: LEVEL, Kept.INPUT: LEVEL})

OPERATION_BY_OPERATION = "training: layers run operation by operation: "
NO_LEVELS = "training: layers keep all or run their forward again: "


class Layers:
    def __init__(self, error: Exception | None = None, levels: Exception | None = None) -> None:
        self.error, self.levels = error, levels
        self.may_keep_less = True
        self.done = list[object]()

    def compile(self) -> None:
        if self.error is not None:
            raise self.error
        self.done.append("compiled")

    def compile_levels(self, costs: TrainingCosts) -> None:
        if self.levels is not None:
            raise self.levels
        self.done.append(costs)

    def forget_examples(self) -> None:
        self.done.append("forgotten")


class Parts:
    """Of an engine on a GPU."""

    def __init__(self, layers: Layers | Exception) -> None:
        self.layers, self.base = layers, self
        self.device, self.sharding = torch.device("cuda"), None

    def training_layers(self, *_: object) -> Layers:
        if isinstance(self.layers, Exception):
            raise self.layers
        return self.layers


def made(layers: Layers | Exception, caches: Caches | None) -> tuple[object, tuple[str, ...]]:
    return make_training_layers(cast(EngineParts, Parts(layers)), caches)


@pytest.fixture
def caches(tmp_path: Path) -> Caches:
    """A warm-up has measured layers that keep less."""
    found = Caches(WarmUpTask("{}", str(tmp_path), {}, "shape", 1))
    path = found.path(TRAINING_LEVELS)
    path.parent.mkdir(parents=True)
    save_layer_costs(path, WITH_LEVELS)
    return found


def test_layers_are_loaded_with_what_was_measured(caches: Caches) -> None:
    layers = Layers()
    assert made(layers, caches) == (layers, ())
    assert layers.done == ["compiled", WITH_LEVELS, "forgotten"]


@pytest.mark.parametrize(
    "error", [UnsupportedBase("no"), KeyError("made by a compiler"), FailedTogether("rank 1"), torch.OutOfMemoryError()]
)
def test_jobs_run_without_layers_that_cannot_be_compiled(caches: Caches, error: Exception) -> None:
    for layers in (Layers(error), error):
        found, notes = made(layers, caches)
        assert found is None and len(notes) == 1 and notes[0].startswith(OPERATION_BY_OPERATION)


@pytest.mark.parametrize("error", [UnsupportedBase("another gradient"), torch.OutOfMemoryError("no memory")])
def test_jobs_do_without_levels_that_cannot_be_loaded(caches: Caches, error: Exception) -> None:
    layers = Layers(levels=error)
    assert made(layers, caches) == (layers, (f"{NO_LEVELS}{error}",))
    assert layers.done == ["compiled", "forgotten"]


def test_levels_that_were_not_measured_are_left_and_told(caches: Caches) -> None:
    caches.path(TRAINING_LEVELS).unlink()
    layers = Layers()
    found, notes = made(layers, caches)
    assert found is layers and notes == (f"{NO_LEVELS}the warm-up could not compile or measure others",)
    assert layers.done == ["compiled", "forgotten"]


def test_no_levels_are_missed_where_nothing_was_compiled_ahead_or_ranks_share_the_base(caches: Caches) -> None:
    assert made(Layers(), None)[1] == ()
    layers = Layers()
    layers.may_keep_less = False
    assert made(layers, caches) == (layers, ())
