"""The engine's side of a warm-up: its workers, here on a CPU, and the engine's client."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from coserve.config import Config, config_to_json
from coserve.engine.warming import early_start
from coserve.engine.warming.client import DIED, WarmUpClient, gemm_paths
from coserve.engine.warming.compilations import Compilations, watch_layers
from coserve.engine.warming.early_start import CAPTURABLE, use_caches
from coserve.engine.warming.part_runner import make_part_runner
from coserve.engine.warming.step_mixes import Mix, first_steps, step_mixes
from coserve.engine.warming.upgrade import Upgrade
from coserve.engine.warming.worker import load_few_layers, use_gpu
from coserve.errors import UnsupportedBase
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler, NoMeter
from coserve.finetune.micro_batch import MicroBatchRunner, MicroSteps
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.generate.execution.start import Compilation
from coserve.generate.generator import Generator
from coserve.kernels.gemm.skinny import SHAPES
from coserve.kernels.gpu.launcher import Grid, Launcher
from coserve.kernels.lora.backend import BACKENDS, make_backend
from coserve.kernels.lora.types import SiteGroup, StackedWeights
from coserve.memory.plan import Work
from coserve.model.base import load_base
from coserve.model.gemm_choice import GemmChoice, load_gemms, save_gemms
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.trace import interpreted
from coserve.parallel.fully_sharded import RankLora
from coserve.warmup.gpu import Gpu
from coserve.warmup.key import ASSEMBLER, CACHES
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import EAGER, FIRST, GEMMS, LAYERS, SLOT_KERNELS, blocks, gpu_of, graphs
from tests.support import sharded
from tests.support.families import tiny_family
from tests.support.launches import kinds
from tests.support.records import make_spec

CPU = torch.device("cpu")


def make_task(folder: Path, **settings: object) -> tuple[WarmUpTask, Config]:
    config = Config(
        device="cpu", lora_backend="grouped", step_tokens=3, max_running=2, micro_batch_tokens=4, **settings
    )
    return WarmUpTask(config_to_json(config).decode(), str(folder), {}, "shape", 1), config


@pytest.mark.slow
def test_a_worker_runs_every_part_and_says_how_far_it_is(tmp_path: Path) -> None:
    task, config = make_task(tmp_path)
    base = load_base("bundled", device="cpu", dtype="float32", few_layers=True)
    runner = make_part_runner(base, config, task)
    for name in ("profile", LAYERS, SLOT_KERNELS, *GEMMS, *graphs(0), *EAGER):
        pieces = list(runner.run(name))
        assert all(done < total for done, total in pieces), name
        assert [done for done, _ in pieces] == sorted(done for done, _ in pieces), name
    assert all(path.is_file() for path in gemm_paths(task))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["nfs", pytest.param("slora", marks=pytest.mark.slow)])
def test_a_worker_runs_parts_for_one_of_several_ranks_without_the_others(sharding: str, tmp_path: Path) -> None:
    """Its adapters and its share of the vocabulary are a rank's, and the part of another GPU has a runner of its own."""
    task, config = make_task(tmp_path, tp=2, lora_sharding=sharding, model=sharded.save_base(tmp_path / "base"))
    for gpu, names in ((0, (LAYERS, "gemms-1", "training-16", blocks(16), *graphs(16))), (1, ("gpu-1",))):
        with use_gpu(config, gpu) as device:
            base = load_few_layers(config, gpu, device)
        assert base.sharding is not None
        assert (base.sharding.mesh.rank, base.sharding.strategy) == (gpu, sharding)
        runner = make_part_runner(base, config, task)
        for name in names:
            assert gpu_of(name) == gpu
            pieces = list(runner.run(name))
            assert pieces and all(done < total for done, total in pieces), name


@pytest.mark.parametrize("sharding", ["slora", "nfs"])
def test_fully_sharded_terms_are_trained_as_compiled_layers_do(
    sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels add gradients to sums; those of local terms do so in the base's own layers."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    ran, terms_backward = list[SiteGroup](), RankLora.terms_backward

    def counted(self: RankLora, group: SiteGroup, *given: Any) -> Tensor:
        ran.append(group)
        return terms_backward(self, group, *given)

    monkeypatch.setattr(RankLora, "terms_backward", counted)
    folder = sharded.save_base(tmp_path / "base", num_hidden_layers=1)
    task, config = make_task(tmp_path, tp=2, lora_sharding=sharding, model=folder)
    config = replace(config, lora_backend="segmented")
    runner = make_part_runner(load_few_layers(config, 0, "cpu"), config, task)
    for _ in runner.run("training-16"):
        pass
    assert bool(ran) is (sharding == "slora")


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "inner"), [("nfs", 48), ("slora", 64)])
def test_kernels_of_compiled_layers_are_those_of_the_warm_up(
    sharding: str, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank with 24 of 48 outputs, which 16 does not divide, and of fully sharded adapters: all that Triton would compile."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    launched, launch = set[object](), Launcher.__call__

    def recorded(self: Launcher, grid: Grid, tensors: Sequence[Tensor], numbers: tuple[int, ...], **rest: int) -> None:
        launched.add((id(self), kinds(self, tensors, numbers), tuple(rest.items())))
        launch(self, grid, tensors, numbers, **rest)

    monkeypatch.setattr(Launcher, "__call__", recorded)
    folder = sharded.save_base(tmp_path / "base", num_hidden_layers=1, intermediate_size=inner)
    task, config = make_task(tmp_path, tp=2, lora_sharding=sharding, model=folder)
    config = replace(config, lora_backend="segmented")
    base = load_few_layers(config, 0, "cpu")
    runner = make_part_runner(base, config, task)
    for _ in runner.run(blocks(16)):
        pass
    warmed = launched.copy()
    launched.clear()
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    conditions = Conditions(
        make_backend("segmented"), recompute=False, max_running=2, page_tokens=16, work=Work(3, 4, 1)
    )
    MemoryProfiler(base, NoMeter(), conditions, bd_blocks=4, compiled=layers, warm_up=False).micro_batch(4)
    assert launched and launched <= warmed


def test_steps_longer_than_the_context_are_of_several_prompts(tmp_path: Path) -> None:
    """As of a base with learned positions, which has none beyond its context."""
    tiny_family("gpt2").save_pretrained(tmp_path / "gpt2")
    base = load_base(str(tmp_path / "gpt2"), device="cpu", dtype="float32", few_layers=True)
    context, (task, config) = base.spec.context, make_task(tmp_path)
    config = replace(config, step_tokens=2 * context + 1, max_running=4)
    make_part_runner(base, config, task).preload_kernels()
    assert Mix((context, context, 1), 0) in first_steps(4, 2 * context + 1, context, decodes=True)


def test_training_is_run_ahead_with_a_backward_and_an_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the sizes that rows of text have, and without a trace in the base."""
    task, config = make_task(tmp_path)
    base = load_base("bundled", device="cpu", dtype="float32", few_layers=True)
    before = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    sizes, updates = list[int](), list[int]()
    forward_backward, step = MicroBatchRunner.forward_backward, AdapterOptimizer.step

    def counted(self: MicroBatchRunner, rows: PackedRows, *rest: Any, **named: Any) -> MicroSteps:
        sizes.append(len(rows.tokens_T))
        return (yield from forward_backward(self, rows, *rest, **named))

    def updated(self: AdapterOptimizer, *, targets: int, learning_rate: float) -> float:
        updates.append(targets)
        return step(self, targets=targets, learning_rate=learning_rate)

    monkeypatch.setattr(MicroBatchRunner, "forward_backward", counted)
    monkeypatch.setattr(AdapterOptimizer, "step", updated)
    make_part_runner(base, replace(config, micro_batch_tokens=64), task).preload_training()
    assert {61, 64} <= set(sizes) and len(updates) >= len(sizes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.model.state_dict().items())


def test_blocks_are_left_out_where_the_base_cannot_have_them(tmp_path: Path) -> None:
    task, config = make_task(tmp_path)
    tiny_family("gpt2").save_pretrained(tmp_path / "gpt2")
    base = load_base(str(tmp_path / "gpt2"), device="cpu", dtype="float32", few_layers=True)
    assert list(make_part_runner(base, config, task).run(blocks(16))) == []


def test_all_ranks_use_the_caches_of_one_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spawned = list[WarmUpTask]()

    def spawn(task: WarmUpTask) -> tuple[None, None]:
        spawned.append(task)
        return None, None

    monkeypatch.setattr(early_start, "find_gpu", lambda: Gpu("H200", "9.0", 12090, 140 << 30))
    monkeypatch.setattr(early_start, "spawn_warm_up", spawn)
    config = Config(model="bundled", data_dir=tmp_path, tp=2)
    for name in (*CACHES, ASSEMBLER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    early_start.start_warm_up(config)
    leads = {name: os.environ.pop(name) for name in CACHES}
    assert use_caches(config) == spawned[0]
    assert {name: os.environ[name] for name in CACHES} == leads
    assert use_caches(Config(model="bundled", data_dir=tmp_path, tp=2, compile="off")) is None
    assert early_start.start_warm_up(Config(model="bundled", tp=2, device="cpu")) is None


def test_the_steps_of_a_warm_up_fit_the_settings() -> None:
    mixes = step_mixes(16, 512, 1024)
    assert {len(mix.tokens) for mix in mixes if set(mix.tokens) == {1}} >= {1, 2, 8, 16}
    assert Mix((512,), 0) in mixes
    for mix in mixes:
        assert len(mix.tokens) <= 16 + 1
        assert sum(mix.tokens) <= 512
        assert mix.position + max(mix.tokens) <= 1024


def test_it_is_known_that_layers_are_being_compiled() -> None:
    seen, compiles = list[bool](), watch_layers()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(compiles())
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert (seen, compiles()) == ([True], False)


def stacked() -> list[StackedWeights]:
    return [
        StackedWeights(torch.zeros(256, 4096), None, (128, 128)),
        StackedWeights(torch.zeros(64, 4096), None, (64,)),
    ]


def test_gemms_are_loaded_from_the_files_that_fit(tmp_path: Path) -> None:
    paths = [tmp_path / "gemms" / f"{rows}.json" for rows in (1, 16)]
    one_row = GemmChoice(gemv={(4096, 256): (2, 4)})
    more = GemmChoice(skinny={(16, 4096, 256): SHAPES[0]})
    save_gemms(paths[0], one_row, stacked(), (1,))
    found = load_gemms(paths, stacked(), CPU)
    assert found is not None, "one file of two is enough"
    assert (found.gemv, found.skinny) == (one_row.gemv, {})
    save_gemms(paths[1], more, stacked(), (16,))
    found = load_gemms(paths, stacked(), CPU)
    assert found is not None
    assert (found.gemv, found.skinny) == (one_row.gemv, more.skinny)
    assert found.counters is not None
    assert load_gemms(paths, stacked()[:1], CPU) is None
    for damaged in (paths[1].read_bytes().replace(b"4096,256", b"4096,999"), b'{"rows":'):
        paths[1].write_bytes(damaged)
        found = load_gemms(paths, stacked(), CPU)
        assert found is not None
        assert (found.gemv, found.skinny) == (one_row.gemv, {})
    paths[0].unlink()
    assert load_gemms(paths, stacked(), CPU) is None


async def test_the_engine_waits_for_the_parts_that_it_needs(tmp_path: Path) -> None:
    task, _ = make_task(tmp_path)
    warm, changed = WarmUpClient(task), asyncio.Event()
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    warm.notify(changed.set)
    waiting, checked = asyncio.create_task(warm.wait_for_parts(FIRST)), asyncio.create_task(warm.checked())
    await asyncio.sleep(0)
    assert not checked.done()
    theirs.sendall(msgspec.json.encode(Progress(3, 9, ["steps"])) + b"\n")
    await changed.wait()
    await checked
    assert not warm.layers_ready()
    assert (warm.done, warm.total) == (3, 9)
    assert not waiting.done()
    assert not warm.graph_kernels_ready(0)
    theirs.sendall(msgspec.json.encode(Progress(6, 9, ["profile", *graphs(0), *graphs(16)])) + b"\n")
    assert await waiting
    assert warm.layers_ready()
    assert warm.graph_kernels_ready(0)
    assert not warm.graph_kernels_ready(32)
    theirs.sendall(
        msgspec.json.encode(Progress(9, 9, ["profile", *graphs(0), *graphs(16)], ["graphs-32 failed"], ended=True))
        + b"\n"
    )
    theirs.close()
    assert not await warm.wait_for_parts(graphs(32))
    assert warm.graph_kernels_ready(32), "nothing more will come: the engine compiles it"
    assert warm.notes == ("graphs-32 failed",)
    await warm.close()


async def test_what_came_while_the_event_loop_was_blocked_is_known_after_catching_up(tmp_path: Path) -> None:
    """An engine that captured graphs for seconds began to serve without the kernels of training that were there."""
    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    lines = [Progress(done, 200, [], [f"note {n}" for n in range(20)], []) for done in range(199)]
    lines.append(Progress(199, 200, ["training-16"], [], []))
    theirs.sendall(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert not warm.complete(["training-16"])
    await warm.catch_up()
    assert warm.complete(["training-16"])
    theirs.close()
    await warm.close()


async def test_a_part_that_failed_is_waited_for_no_longer(tmp_path: Path) -> None:
    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    waiting = asyncio.create_task(warm.wait_for_parts(FIRST))
    done, failed = graphs(0), ["profile", *graphs(16)]
    theirs.sendall(msgspec.json.encode(Progress(5, 9, list(done), ["no memory"], failed)) + b"\n")
    assert not await waiting
    assert not warm.ended
    assert warm.graph_kernels_ready(16), "its kernels will never be there"
    assert not warm.complete(graphs(16))
    assert not warm.graph_kernels_ready(32)
    assert not warm.training_kernels_ready(16)
    theirs.close()
    await warm.close()


async def test_a_process_that_says_nothing_is_given_up_though_nobody_waits(tmp_path: Path) -> None:
    task, _ = make_task(tmp_path)
    warm, changed = WarmUpClient(task, timeout=0.01), asyncio.Event()
    warm.notify(changed.set)
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    await changed.wait()
    assert warm.ended
    assert warm.training_kernels_ready(256)
    theirs.close()
    await warm.close()


async def test_what_came_while_the_event_loop_was_blocked_is_heard(tmp_path: Path) -> None:
    """The load of a base blocks it, for minutes if the base is large."""
    task, _ = make_task(tmp_path)
    warm, changed = WarmUpClient(task, timeout=0.05), asyncio.Event()
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    warm.notify(changed.set)
    await asyncio.sleep(0)  # it listens
    theirs.sendall(msgspec.json.encode(Progress(3, 9, ["steps"])) + b"\n")
    time.sleep(0.2)  # noqa: ASYNC251
    await changed.wait()
    assert not warm.ended
    assert warm.done == 3
    theirs.close()
    await warm.close()


@pytest.mark.parametrize("last", [b"", b'{"done": 3', b"x" * (3 << 20)])
async def test_a_process_that_dies_is_told_and_waited_for_no_longer(tmp_path: Path, last: bytes) -> None:
    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    ours, theirs = socket.socketpair()
    await warm.listen(ours)

    def send() -> None:
        with theirs, suppress(ConnectionError):
            theirs.sendall(last)

    async with asyncio.timeout(60):
        sent = asyncio.create_task(asyncio.to_thread(send))
        assert not await warm.wait_for_parts(FIRST)
        await sent
    assert warm.ended
    assert warm.notes == (DIED,)
    assert warm.done == warm.total
    await warm.close()


async def test_a_listener_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    warm.notify(fail)
    ours, theirs = socket.socketpair()
    with theirs:
        await warm.listen(ours)
        theirs.sendall(msgspec.json.encode(Progress(3, 9, ["steps"])) + b"\n")
        async with asyncio.timeout(60):
            assert not await warm.wait_for_parts(FIRST)
        await warm.close()
    assert warm.notes == (DIED,)


async def test_a_client_that_is_closed_reports_no_death(tmp_path: Path) -> None:
    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    ours, theirs = socket.socketpair()
    with theirs:
        await warm.listen(ours)
        await asyncio.sleep(0)
        await warm.close()
    assert not warm.notes


async def test_a_process_that_says_nothing_is_waited_for_no_longer(tmp_path: Path) -> None:
    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task, timeout=0.01)
    ours, theirs = socket.socketpair()
    with theirs:
        await warm.listen(ours)
        assert not await warm.wait_for_parts(FIRST)
        await warm.close()
    assert warm.notes == (DIED,)


def test_each_kernel_that_is_compiled_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = Compilations(logging.WARNING)
    for hit in (True, False, False):
        found(src=None, metadata={"name": "shrink"}, times=None, cache_hit=hit, metadata_group={})
    assert found.kernels == ["shrink", "shrink"]
    assert [record.levelname for record in caplog.records if record.levelno >= logging.INFO] == ["WARNING"]


def test_layers_are_loaded_once_before_the_kernels_of_steps() -> None:
    """They need no more than their own part of a warm-up; the kernels of graphs are compiled meanwhile."""
    done = list[str]()

    class Layers:
        shadow = preload_executor = None

        def compile(self) -> None:
            done.append("layers")

    def preload(base: object, executor: object, *, decodes: bool = True) -> str:
        done.append("steps" if decodes else "prompts")
        return "slow prompts" if not decodes else ""

    upgrade = Upgrade(cast("Compilation", Layers()), cast("Generator", None), (), preload_kernels=preload)
    upgrade.load_layers()
    assert done == ["layers"] and not upgrade.compiled
    upgrade.preload_eager()
    for _ in range(2):
        upgrade.compile()
        upgrade.load_layers()
    assert done == ["layers", "prompts", "steps"] and upgrade.compiled
    assert "slow prompts" in upgrade.notes, "the operator hears of what failed"


def test_the_first_graphs_are_captured_before_the_engine_serves() -> None:
    """Until then each step takes the host several times as long."""
    done = list[str]()

    class Executor:
        missing = 20

        def warm_up(self) -> None:
            done.append("graphs")

    class Compiled:
        shadow = preload_executor = None

        def compile(self) -> None:
            done.append("layers")

        def executor(self) -> tuple[Executor, tuple[str, ...]]:
            return Executor(), ()

    class Adopting:
        def adopt(self, executor: object) -> None:
            done.append("steps")

    Upgrade(cast("Compilation", Compiled()), cast("Generator", Adopting()), ()).begin_compiled()
    assert done == ["layers", "steps", "graphs"]


def test_captures_of_a_rank_that_becomes_known_late_count_from_the_first_one() -> None:
    """The graphs of rank 16 are known after those without adapters, once steps are compiled."""

    class Executor:
        missing = 20

    executor = Executor()

    class Compiled:
        def executor(self) -> tuple[Executor, tuple[str, ...]]:
            return executor, ()

    class Adopting:
        def adopt(self, executor: object) -> None: ...

    upgrade = Upgrade(cast("Compilation", Compiled()), cast("Generator", Adopting()), ())
    upgrade.adopt()
    seen = list[int]()
    for missing in (40, 30, 20, 10, 0):
        executor.missing = missing
        seen.append(upgrade.progress().done)
    assert seen == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("error", [None, UnsupportedBase("no"), KeyError("made by a compiler")])
def test_jobs_wait_for_their_layers_however_their_compilation_ends(error: Exception | None) -> None:
    class Layers:
        def compile(self) -> None:
            if error is not None:
                raise error

        def forget_examples(self) -> None: ...

    upgrade = Upgrade(
        cast("Compilation", None), cast("Generator", None), (), training_layers=cast("CompiledLayers", Layers())
    )
    assert not upgrade.may_train(make_spec())
    upgrade.part_loads[0].load()
    assert upgrade.may_train(make_spec())
    assert any(note.startswith("training: layers run operation by operation") for note in upgrade.notes) is (
        error is not None
    )


def test_layers_of_jobs_are_compiled_before_steps_are_where_nothing_is_on_disk() -> None:
    """What compiles them fails compiled steps of other threads."""
    done = list[str]()

    class Layers:
        shadow = preload_executor = None

        def __init__(self, name: str) -> None:
            self.name = name

        def compile(self) -> None:
            done.append(self.name)

        def forget_examples(self) -> None: ...

    upgrade = Upgrade(
        cast("Compilation", Layers("steps")),
        cast("Generator", None),
        (),
        training_layers=cast("CompiledLayers", Layers("training")),
    )
    upgrade.compile()
    assert done == ["steps", "training"]
    upgrade.part_loads[0].load()
    assert done == ["steps", "training"]


async def test_layers_of_jobs_that_the_warm_up_could_not_compile_are_left(tmp_path: Path) -> None:
    class Layers:
        def compile(self) -> None:
            raise AssertionError("it would fail compiled steps")

        def forget_examples(self) -> None: ...

    task, _ = make_task(tmp_path)
    warm = WarmUpClient(task)
    ours, theirs = socket.socketpair()
    await warm.listen(ours)
    theirs.close()
    layers = cast("CompiledLayers", Layers())
    upgrade = Upgrade(cast("Compilation", None), cast("Generator", None), (), warm, training_layers=layers)
    await upgrade.part_loads[0].ready()
    upgrade.part_loads[0].load()
    assert any("the warm-up could not compile them" in note for note in upgrade.notes)
    assert upgrade.may_train(make_spec())
    await warm.close()


def test_expected_compilations_are_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    found = Compilations(logging.WARNING)
    with found.expected():
        found(src=None, metadata={"name": "halved"}, times=None, cache_hit=False, metadata_group={})
    assert found.kernels == ["halved"]
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]
    found(src=None, metadata={"name": "shrink"}, times=None, cache_hit=False, metadata_group={})
    assert [record.levelname for record in caplog.records if record.levelno >= logging.INFO] == ["WARNING"]


def test_layers_are_compiled_where_the_lora_backend_can_be_captured() -> None:
    """Written twice: the process that starts the warm-up has not imported torch."""
    assert set(CAPTURABLE) == {"auto", *(name for name in BACKENDS if make_backend(name).capturable)}
