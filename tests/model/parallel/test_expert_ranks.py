"""Mixtures of experts on ranks, by features and by experts: logits, gradients, jobs and files of one process."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import cross_entropy

from coserve.admission.shapes import lora_shapes
from coserve.core.errors import UnsupportedBase
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, BaseSpec, LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.slot_lora import slot_lora
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.packing import packed
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch
from coserve.model.parallel.adapter import Matrices
from coserve.model.parallel.mesh import LoneRank, Mesh
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.generation import adapter
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import tokens_of
from tests.support.ranks import Ranks
from tests.support.sharded import gathered

BOTH = ("experts.gate_up_proj", "experts.down_proj")
BOUNDS = (0, 5, 14, 18, 25)
BATCH = (1, -1, 0, 1)
TOKENS = tokens_of(BOUNDS[-1])
POSITIONS = torch.cat([torch.arange(end - start) for start, end in pairwise(BOUNDS)])
FAMILIES = (*("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "gemma4"), *("olmoe", "deepseek_v3", "qwen3_5_moe_text"))
"""The first layers of GLM and DeepSeek have no experts; their second ones, and all of Qwen3.5, have a shared one. Gemma
4's have an MLP beside the experts."""
WAYS = pytest.mark.parametrize("ep", [1, 2], ids=["features", "experts"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        tiny_family(family).save_pretrained(folder)
        found[family] = str(folder)
    return found


def load(folder: str, mesh: Mesh | None, ep: int) -> Base:
    return load_base(folder, device="cpu", dtype="auto", mesh=mesh, ep=ep)


class Served(NamedTuple):
    plain: Tensor
    mixed: Tensor
    slots: Tensor
    spec: BaseSpec
    calls: dict[str, int]
    parameters: int
    """Elements of the rank's experts."""
    pairs: int
    """Elements of the first adapter's matrices on the rank."""


def serve(mesh: Mesh | None, folder: str, ep: int) -> Served:
    """Logits without adapters, of a mixed batch, and of the same in slots by fused layers."""
    base = load(folder, mesh, ep)
    whole = adapter(base, 0, 3, ("o_proj",), BOTH), adapter(base, 1, 4, (), BOTH[1:])
    adapters, segments = tuple(map(base.shard, whole)), Segments(BOUNDS, BATCH)
    run = partial(base.forward, TOKENS, POSITIONS, PackedAttention(BOUNDS), keep=None)
    with torch.no_grad():
        plain = run(lora=None)
        if mesh is not None:
            mesh.traffic.clear()
        mixed = run(lora=LoraBatch(segments, adapters, GROUPED))
    calls = {} if mesh is None else dict(mesh.traffic.calls)
    experts = sum(own.numel() for name, own in base.model.named_parameters() if "experts" in name)
    fused = FusedBase(base, compiled=False)
    fused.check()
    slots = AdapterSlots(fused.groups, 4, base.device, fused.exchanges, base.sites.biases, [*base.spec.experts])
    found = slots.place({AdapterRef(str(i), 1): packed(one, for_kernels=False) for i, one in enumerate(adapters)})
    lora = slot_lora(slots, Segments(BOUNDS, tuple(found[i] if i >= 0 else -1 for i in BATCH)))
    by_slots = fused.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None)
    pairs = sum(pair.a_RD.numel() + pair.b_OR.numel() for pair in adapters[0].sites.values())
    return Served(plain, mixed, by_slots, base.spec, calls, experts, pairs)


@WAYS
@pytest.mark.parametrize("family", in_turns(FAMILIES, ("gpt_oss",)))
@pytest.mark.slow
def test_a_mixed_batch_has_the_logits_of_one_process(two: Ranks, folders: dict[str, str], family: str, ep: int) -> None:
    expected = serve(None, folders[family], 1)
    assert (expected.mixed - expected.plain).abs().max() > 0.1, "an adapter that is left out would not be seen"
    for found in two.run(serve, folders[family], ep):
        for name in ("plain", "mixed", "slots"):
            wanted = expected.plain if name == "plain" else expected.mixed
            torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-3, atol=3e-4, msg=name)
        assert found.spec.fingerprint == expected.spec.fingerprint
        assert found.spec.experts == {
            name: replace(site, by_expert=ep > 1) for name, site in expected.spec.experts.items()
        }
        beside = ("mlp.down_proj",) if family == "gemma4" else ("shared_experts.down_proj", "shared_expert.down_proj")
        shared = sum(name.endswith(beside) for name in expected.spec.sites)
        norms = 2 if family == "olmoe" else 0  # of all heads' queries, and keys
        assert found.calls == {"all_reduce": (2 + norms) * expected.spec.layers + shared, "all_gather": 1}
        settings = LoraSettings(r=3, targets=("o_proj",), target_parameters=BOTH)
        planned = lora_shapes(settings, found.spec, ranks=2)
        assert found.pairs == sum(shape.a + shape.b for shape in planned), "as memory is planned"
        assert found.parameters <= 0.55 * expected.parameters, "half of the experts, and biases that are on both"


def gradients(mesh: Mesh | None, folder: str, ep: int) -> tuple[float, Matrices, float]:
    """Loss, whole gradients of an adapter of both of the experts' parameters and of attention, and their norm."""
    base = load(folder, mesh, ep)
    whole = adapter(base, 0, 3, ("q_proj", "o_proj"), BOTH)
    weights, partition = base.shard(whole), base.partition(whole)
    for pair in weights.sites.values():
        pair.a_RD.requires_grad_()
        pair.b_OR.requires_grad_()
    lora = LoraBatch(Segments((0, 25), (0,)), (weights,), GROUPED)
    logits = base.forward(TOKENS, torch.arange(25), PackedAttention((0, 25)), lora=lora, keep=None)
    loss = cross_entropy(logits[:-1], TOKENS[1:])
    loss.backward()
    found = dict[str, tuple[Tensor, Tensor]]()
    for name, pair in weights.sites.items():
        a, b = pair.a_RD.grad, pair.b_OR.grad
        assert a is not None and b is not None
        found[name] = a, b
    if partition is None:
        return loss.item(), found, torch.stack([own.norm() for both in found.values() for own in both]).norm().item()
    partition.sum_gradients(found)
    return loss.item(), gathered(partition, found), partition.norm(found).item()


@WAYS
@pytest.mark.parametrize("family", in_turns(FAMILIES, ("mixtral",)))
def test_gradients_are_those_of_one_process(two: Ranks, folders: dict[str, str], family: str, ep: int) -> None:
    loss, whole, norm = gradients(None, folders[family], 1)
    for found_loss, found, found_norm in two.run(gradients, folders[family], ep):
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert found_norm == pytest.approx(norm, rel=1e-3)
        assert found.keys() == whole.keys()
        for site, both in whole.items():
            for got, expected in zip(found[site], both, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-5 * float(expected.abs().max() + 1))


def train(mesh: Mesh | None, folder: str, ep: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three optimizer steps, and the state that a checkpoint has."""
    base = load(folder, mesh, ep)
    whole = adapter(base, 0, 3, ("q_proj",), BOTH)
    settings = TrainingSettings(steps=3, learning_rate=0.02, max_grad_norm=0.05, weight_decay=0.1)
    optimizer = AdapterOptimizer(whole, base.spec, settings, torch.float32, partition=base.partition(whole))
    runner, rows = MicroBatchRunner(base, recompute=True), pack_rows(random_corpus(), range(5), torch.device("cpu"))
    losses = []
    for _ in range(3):
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), GROUPED)
        sums_12 = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
        losses.append(float(sums_12[0, 0]) / rows.targets)
        optimizer.step(targets=rows.targets, learning_rate=settings.learning_rate)
    return losses, {name: tensor.clone() for name, tensor in optimizer.snapshot()().items()}


@WAYS
def test_a_job_has_the_losses_and_the_weights_of_one_process(two: Ranks, folders: dict[str, str], ep: int) -> None:
    losses, state = train(None, folders["mixtral"], 1)
    for rank, (found, weights) in enumerate(two.run(train, folders["mixtral"], ep)):
        assert found == pytest.approx(losses, rel=1e-4)
        assert weights.keys() == state.keys()
        for name, tensor in state.items():
            expected = tensor if rank == 0 else tensor.where(weights[name] != 0, 0)  # the others know their own shards
            torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("ep", in_turns({"features": 1, "experts": 2}, days=2))
def test_layers_of_a_rank_compile_into_one_graph(folders: dict[str, str], ep: int) -> None:
    """Traced by torch.compile, without inductor, and without the other rank: they give what the layers give."""
    base = load(folders["gpt_oss"], LoneRank(1, 2), ep)
    FusedBase(base, backend=lambda module, inputs: module.forward).check()


def refusal(mesh: Mesh, folder: str, ep: int) -> str:
    try:
        load(folder, mesh, ep)
    except UnsupportedBase as error:
        return str(error)
    return ""


def test_sizes_and_bases_that_ranks_cannot_divide_are_refused(two: Ranks, tmp_path: Path) -> None:
    tiny_family("mixtral", num_local_experts=3, num_experts=3).save_pretrained(tmp_path / "three")
    tiny_family("llama").save_pretrained(tmp_path / "dense")
    assert "number of experts that 2 GPUs divide, got 3" in two.run(refusal, str(tmp_path / "three"), 2)[0]
    assert "no experts to divide" in two.run(refusal, str(tmp_path / "dense"), 2)[0]
