"""The parts of a warm-up, here on a CPU, and the listeners for what a process compiles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.config import Config, config_to_json
from coserve.engine.ranks.serve import load_ranked_base
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.compilations import Compilations, watch_layers
from coserve.engine.warming.part_runner import PartRunner
from coserve.engine.warming.step_mixes import Mix, first_steps, step_mixes
from coserve.engine.warming.worker import load_few_layers, use_gpu
from coserve.engine.warmup.parts import GEMMS, LAYERS, WarmUpTask, gpu_of
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler, NoMeter
from coserve.finetune.micro_batch import MicroBatchRunner, MicroSteps
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gemm.skinny import SHAPES
from coserve.kernels.gpu.launcher import Grid, Launcher
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.types import FrozenWeight, SiteGroup
from coserve.memory.plan import Work
from coserve.model.gemm_choice import GemmChoice, load_gemms, save_gemms
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.parallel.fully_sharded import RankLora
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support import sharded
from tests.support.examples import marks_on_days
from tests.support.families import tiny_family
from tests.support.interpreted import interpreted
from tests.support.launches import kinds

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
    runner = PartRunner(base, config, task)
    for name in ("profile", LAYERS, "kernels-16", *GEMMS, "graphs-0", "mixed-0", "steps", "adapters-16"):
        pieces = list(runner.run(name))
        assert all(done < total for done, total in pieces), name
        assert [done for done, _ in pieces] == sorted(done for done, _ in pieces), name
    assert all(Caches(task).path(name).is_file() for name in GEMMS)


ALIKE = (LAYERS, "gemms-1", "mixed-16")
"""Parts that adapters' sharding does not change."""
OWN = ("training-16", "blocks-16", "graphs-16")


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        pytest.param("nfs", OWN, marks=marks_on_days(0, 2)),
        pytest.param("slora", (*ALIKE, *OWN), marks=marks_on_days(1, 2)),
    ],
    ids=["nfs", "slora"],
)
def test_a_worker_runs_parts_for_one_of_several_ranks_without_the_others(
    sharding: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Its adapters and its share of the vocabulary are a rank's, and the part of another GPU has a runner of its
    own."""
    task, config = make_task(tmp_path, tp=2, lora_sharding=sharding, model=sharded.save_base(tmp_path / "base"))
    for gpu, names in ((0, parts), (1, ("gpu-1",))):
        with use_gpu(config, gpu) as device:
            base = load_few_layers(config, gpu, device)
        assert base.sharding is not None
        assert (base.sharding.mesh.rank, base.sharding.strategy) == (gpu, sharding)
        runner = PartRunner(base, config, task)
        for name in names:
            assert gpu_of(name) == gpu
            pieces = list(runner.run(name))
            assert pieces and all(done < total for done, total in pieces), name


def test_the_warm_up_and_the_engine_cache_what_the_setting_says(tmp_path: Path) -> None:
    tiny_family("minicpm3").save_pretrained(tmp_path)
    for mla_cache in ("latents", "heads"):
        config = Config(model=str(tmp_path), device="cpu", mla_cache=mla_cache)
        for base in (load_few_layers(config, 0, "cpu"), load_ranked_base(config, None)):
            assert base.kv_shapes[0].latent == (mla_cache == "latents")


@pytest.mark.parametrize("sharding", ["slora", "nfs"])
@pytest.mark.slow
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
    runner = PartRunner(load_few_layers(config, 0, "cpu"), config, task)
    for _ in runner.run("training-16"):
        pass
    assert bool(ran) is (sharding == "slora")


@pytest.mark.parametrize(
    ("sharding", "inner"),
    [pytest.param("nfs", 48, marks=marks_on_days(1, 2)), pytest.param("slora", 64, marks=marks_on_days(0, 2))],
)
def test_kernels_of_compiled_layers_are_those_of_the_warm_up(
    sharding: str, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank with 24 of 48 outputs, which 16 does not divide, and of fully sharded adapters: all that Triton would
    compile."""
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
    runner = PartRunner(base, config, task)
    for _ in runner.run("blocks-16"):
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
    PartRunner(base, config, task).run_steps()
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
    PartRunner(base, replace(config, micro_batch_tokens=64), task).run_micro_batches()
    assert {61, 64} <= set(sizes) and len(updates) >= len(sizes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.model.state_dict().items())


def test_blocks_are_left_out_where_the_base_cannot_have_them(tmp_path: Path) -> None:
    task, config = make_task(tmp_path)
    tiny_family("gpt2").save_pretrained(tmp_path / "gpt2")
    base = load_base(str(tmp_path / "gpt2"), device="cpu", dtype="float32", few_layers=True)
    assert list(PartRunner(base, config, task).run("blocks-16")) == []


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


def stacked() -> list[FrozenWeight]:
    return [FrozenWeight(torch.zeros(256, 4096), None, (128, 128)), FrozenWeight(torch.zeros(64, 4096), None, (64,))]


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


def test_each_kernel_that_is_compiled_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = Compilations(logging.WARNING)
    for hit in (True, False, False):
        found(src=None, metadata={"name": "shrink"}, times=None, cache_hit=hit, metadata_group={})
    assert found.kernels == ["shrink", "shrink"]
    assert [record.levelname for record in caplog.records if record.levelno >= logging.INFO] == ["WARNING"]
