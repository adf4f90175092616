"""Collectives of two, four and eight GPUs: NCCL and our kernels, in CUDA graphs too, and the logits of a base that two
hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention.packed import PackedAttention
from coserve.model.load import load_base
from coserve.model.parallel.mesh import GroupMesh, Mesh
from coserve.model.parallel.symmetric import SymmetricMesh
from tests.support.families import tiny_family
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(params=[2, 4, 8])
def some(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    with Ranks(request.param, cuda=True) as ranks:
        yield ranks


def _all_reduces(mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
    """Sums of all paths, eager and replayed from a graph with other inputs, and what they should be."""
    found = list[tuple[Tensor, Tensor]]()
    whole = mesh.size * (mesh.size + 1) / 2
    assert isinstance(mesh, GroupMesh)
    for kind in (torch.bfloat16, torch.float32):
        for rows in (1, 3, 64, 1024):
            x = torch.full((rows, 4096), 1.0 + mesh.rank, dtype=kind, device="cuda")
            found.append((mesh.all_reduce(x.clone()), torch.full_like(x, whole)))
            found.append((mesh.all_reduce(x.clone(), torch.full_like(x, 10.0)), torch.full_like(x, whole + 10.0)))
            graph, static = torch.cuda.CUDAGraph(), x.clone()
            mesh.all_reduce(static.clone())
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = mesh.all_reduce(static.clone())
                more = mesh.all_reduce(static.clone(), torch.full_like(static, 10.0))
                gathered = mesh.all_gather(static)
            for factor in (1.0, 5.0):
                static.copy_(x * factor)
                graph.replay()
                torch.cuda.synchronize()
                found.append((out.clone(), torch.full_like(x, whole * factor)))
                found.append((more.clone(), torch.full_like(x, whole * factor + 10.0)))
                parts = [torch.full_like(x, (1.0 + rank) * factor) for rank in range(mesh.size)]
                found.append((gathered.clone(), torch.cat(parts, 1)))
    return [(got.cpu(), expected.cpu()) for got, expected in found]


def test_sums_are_right_eager_and_in_graphs(some: Ranks) -> None:
    for pairs in some.run(_all_reduces):
        for got, expected in pairs:
            assert torch.equal(got, expected)


def _kind(mesh: Mesh) -> bool:
    return isinstance(mesh, SymmetricMesh)


def test_small_messages_go_by_one_kernel(two: Ranks) -> None:
    assert two.run(_kind) == [True, True]


def _logits(mesh: Mesh, folder: str) -> Tensor:
    base = load_base(folder, device="cuda", dtype="float32", mesh=mesh)
    tokens = torch.arange(9, device="cuda")
    with torch.no_grad():
        return base.forward(tokens, tokens, PackedAttention((0, 9)), lora=None, keep=None).cpu()


def test_two_gpus_have_the_logits_of_one(two: Ranks, tmp_path: Path) -> None:
    tiny_family("llama").save_pretrained(tmp_path)
    base = load_base(str(tmp_path), device="cpu", dtype="float32")
    tokens = torch.arange(9)
    with torch.no_grad():
        expected = base.forward(tokens, tokens, PackedAttention((0, 9)), lora=None, keep=None)
    for got in two.run(_logits, str(tmp_path)):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
