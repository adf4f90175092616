"""Layers of training that keep less are loaded once the warm-up has compiled and measured them; jobs do not wait for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from coserve.config import Config, config_to_json
from coserve.engine.warming.client import WarmUpClient, layer_costs_path, level_costs_path
from coserve.engine.warming.part_load import PartLoad
from coserve.engine.warming.upgrade import Upgrade
from coserve.errors import UnsupportedBase
from coserve.generate.execution.start import Compilation
from coserve.generate.generator import Generator
from coserve.gpu_memory import Kept, LayerTime, LevelCosts, Line, TrainingCosts
from coserve.memory.profile import save_layer_costs
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.types import DEFAULT_RANK
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import TRAINING_LAYERS, TRAINING_LEVELS, training
from tests.support.gpu_memory import COSTS
from tests.support.records import make_spec

TIME = LayerTime(fixed=1.0, per_row_token=0.0)
LEVEL = LevelCosts(kept=100.0, shrinks=(False,) * 4, backward=Line(fixed=0.0, per_token=1.0), time=TIME)
WITH_LEVELS = msgspec.structs.replace(COSTS, time=TIME, levels={Kept.ATTENTION: LEVEL, Kept.INPUT: LEVEL})

UNMEASURED = "keep all or run their forward again: the warm-up could not"
NO_MEMORY = "keep all or run their forward again: CUDA out of memory"


class Layers:
    def __init__(self, error: Exception | None = None) -> None:
        self.ready, self.may_keep_less = False, True
        self.done: list[str | TrainingCosts | None] = []
        self._error = error

    def compile(self) -> None:
        self.ready = True
        self.done.append("compiled")

    def compile_levels(self, costs: TrainingCosts | None) -> None:
        if self._error is not None:
            raise self._error
        self.done.append(costs)

    def forget_examples(self) -> None:
        self.done.append("forgotten")


@dataclass(frozen=True)
class WarmUp:
    client: WarmUpClient
    process: socket.socket
    """The process's end of the connection."""

    def tell(self, progress: Progress) -> None:
        """As the process does."""
        self.process.sendall(msgspec.json.encode(progress) + b"\n")


@asynccontextmanager
async def warm_up(folder: Path, *, complete: list[str], failed: Sequence[str] = ()) -> AsyncIterator[WarmUp]:
    """One under way, which has told of these parts."""
    config = config_to_json(Config(device="cpu")).decode()
    ours, theirs = socket.socketpair()
    warm = WarmUp(WarmUpClient(WarmUpTask(config, str(folder), {}, "shape", 1)), theirs)
    await warm.client.listen(ours)
    with theirs:
        try:
            warm.tell(Progress(1, 2, complete, failed=[*failed]))
            await warm.client.checked()
            yield warm
        finally:
            await warm.client.close()


def make_upgrade(layers: Layers, warm: WarmUpClient | None) -> Upgrade:
    return Upgrade(
        cast("Compilation", None), cast("Generator", None), (), warm, training_layers=cast("CompiledLayers", layers)
    )


async def load_after_the_warm_up(load: PartLoad, warm: WarmUp, parts: list[str]) -> None:
    """`load` waits until the warm-up has ended, with these parts complete."""
    ready = asyncio.create_task(load.ready())
    await warm.client.catch_up()
    assert not ready.done()
    warm.tell(Progress(2, 2, parts, ended=True))
    await ready
    load.load()


def keep_costs(folder: Path) -> None:
    task = WarmUpTask("{}", str(folder), {}, "shape", 1)
    for path, costs in ((layer_costs_path(task), COSTS), (level_costs_path(task), WITH_LEVELS)):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_layer_costs(path, costs)


@pytest.mark.parametrize("error", [None, UnsupportedBase("another gradient")])
async def test_levels_are_loaded_with_what_was_measured(error: Exception | None, tmp_path: Path) -> None:
    keep_costs(tmp_path)
    layers, complete = Layers(error), [TRAINING_LAYERS, training(DEFAULT_RANK), TRAINING_LEVELS]
    async with warm_up(tmp_path, complete=complete) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, levels = upgrade.part_loads
        await first.ready()
        first.load()
        assert upgrade.may_train(make_spec()), "it need not wait for levels"
        await levels.ready()
        levels.load()
    assert layers.done == ["compiled"] + ([WITH_LEVELS] if error is None else []) + ["forgotten"]
    said = [note for note in upgrade.notes if "keep all or run their forward again: another gradient" in note]
    assert bool(said) is (error is not None)


def test_no_job_starts_while_its_layers_are_compiled() -> None:
    """It would begin without them, and go on with them."""
    started = list[bool]()

    class Slow(Layers):
        def compile(self) -> None:
            started.append(upgrade.may_train(make_spec()))

    upgrade = make_upgrade(Slow(), None)
    upgrade.part_loads[0].load()
    assert started == [False] and upgrade.may_train(make_spec())


@pytest.mark.parametrize("fails_again", [False, True])
async def test_jobs_wait_for_the_memory_that_a_warm_up_has(fails_again: bool, tmp_path: Path) -> None:
    """Without it they would run operation by operation for good."""
    errors = [torch.OutOfMemoryError("CUDA out of memory"), *[RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")] * fails_again]

    class Full(Layers):
        def compile(self) -> None:
            if errors:
                raise errors.pop(0)
            super().compile()

    layers, parts = Full(), [TRAINING_LAYERS, training(DEFAULT_RANK)]
    async with warm_up(tmp_path, complete=parts) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, _ = upgrade.part_loads
        await first.ready()
        first.load()
        assert not upgrade.may_train(make_spec())
        assert any("jobs wait until the warm-up has ended" in note for note in upgrade.notes)
        await load_after_the_warm_up(first, warm, parts)
        assert upgrade.may_train(make_spec())
        assert any("run operation by operation" in note for note in upgrade.notes) is fails_again
        assert not any("jobs wait" in note for note in upgrade.notes)
        assert layers.done == ([] if fails_again else ["compiled"])


async def test_jobs_do_without_levels_that_the_warm_up_could_not_compile(tmp_path: Path) -> None:
    layers = Layers()
    async with warm_up(tmp_path, complete=[TRAINING_LAYERS], failed=[TRAINING_LEVELS]) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, levels = upgrade.part_loads
        first.load()
        await levels.ready()
        levels.load()
    assert layers.done == ["compiled", "forgotten"], "compiling them here would fail compiled steps"
    assert any(UNMEASURED in note for note in upgrade.notes)


@pytest.mark.parametrize("may_keep_less", [True, False])
async def test_levels_that_were_not_measured_are_left_and_health_tells(may_keep_less: bool, tmp_path: Path) -> None:
    """But not of ranks that share a base, which have none."""
    layers = Layers()
    layers.may_keep_less = may_keep_less
    async with warm_up(tmp_path, complete=[TRAINING_LAYERS, TRAINING_LEVELS]) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, levels = upgrade.part_loads
        first.load()
        assert not any(UNMEASURED in note for note in upgrade.notes)
        for _ in range(2):
            levels.load()
            assert layers.done == ["compiled", "forgotten"]
            assert any(UNMEASURED in note for note in upgrade.notes) is may_keep_less


async def test_levels_of_layers_that_are_not_compiled_are_forgotten(tmp_path: Path) -> None:
    keep_costs(tmp_path)
    layers = Layers()
    async with warm_up(tmp_path, complete=[TRAINING_LEVELS], failed=[TRAINING_LAYERS]) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, levels = upgrade.part_loads
        first.load()
        await levels.ready()
        levels.load()
    assert layers.done == ["forgotten"]


@pytest.mark.parametrize("fails_again", [False, True])
async def test_levels_that_find_no_memory_are_tried_again_after_the_warm_up(fails_again: bool, tmp_path: Path) -> None:
    keep_costs(tmp_path)
    errors = [torch.OutOfMemoryError("CUDA out of memory")] * (2 if fails_again else 1)

    class Full(Layers):
        def compile_levels(self, costs: TrainingCosts | None) -> None:
            if errors:
                raise errors.pop()
            super().compile_levels(costs)

    layers, parts = Full(), [TRAINING_LAYERS, training(DEFAULT_RANK), TRAINING_LEVELS]
    async with warm_up(tmp_path, complete=parts) as warm:
        upgrade = make_upgrade(layers, warm.client)
        first, levels = upgrade.part_loads
        first.load()
        await levels.ready()
        levels.load()
        assert any(NO_MEMORY in note for note in upgrade.notes)
        assert layers.done == ["compiled"], "what they are compiled from is needed again"
        await load_after_the_warm_up(levels, warm, parts)
        assert any(NO_MEMORY in note for note in upgrade.notes) is fails_again
        assert layers.done == ["compiled"] + ([] if fails_again else [WITH_LEVELS]) + ["forgotten"]


async def test_nothing_waits_where_nothing_is_warmed() -> None:
    layers = Layers()
    upgrade = make_upgrade(layers, None)
    first, levels = upgrade.part_loads
    await levels.ready()
    first.load()
    levels.load()
    assert layers.done == ["compiled", "forgotten"]
    assert not any("keep all" in note for note in upgrade.notes)
