"""The one-kernel all-reduce between processes that share memory, in Triton's interpreter: the same sums on all ranks,
whoever comes first, with and without something to add."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.kernels.collectives.push_sum import PushShape, push_sum
from coserve.kernels.gpu.launcher import Launcher
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.symmetric import MULTIPLE, PUSHED, launch_sums
from tests.support.ranks import Ranks

BLOCK_BYTES, BLOCKS = 64, 16
SHAPES = [
    PushShape(BLOCK_BYTES),
    PushShape(BLOCK_BYTES, pushers=2, adders=3),
    PushShape(BLOCK_BYTES, pushers=9, adders=7),
    PushShape(BLOCK_BYTES, pushers=3, adders=2, copiers=2),
    PushShape(BLOCK_BYTES, pushers=17, adders=9, copiers=20),
]
SIZES, TWO_SHOT_SIZES = (16, 80, 1, 33, 80, 16), (128, 200, 129, 256, 130, 128)
"""Numbers of four bytes; the last block is full or not. A two-shot sum has a block for every rank."""


def _sizes(shape: PushShape) -> tuple[int, ...]:
    return TWO_SHOT_SIZES if shape.copiers else SIZES


def _drawn(number: int, rank: int, size: int) -> Tensor:
    return torch.randint(-9, 9, (size,), generator=torch.Generator().manual_seed(100 * number + rank))


def _sums(mesh: Mesh, folder: str, dtype: torch.dtype, shape: PushShape) -> list[list[float]]:
    ranks, rank = mesh.size, mesh.rank
    own_bytes, flag_bytes = shape.own_bytes(ranks, BLOCKS * BLOCK_BYTES), 4 * shape.flags(ranks, BLOCKS)
    owns, flags = (
        [torch.from_file(f"{folder}/{name}-{each}", shared=True, size=size, dtype=torch.uint8) for each in range(ranks)]
        for name, size in (("own", own_bytes), ("flags", flag_bytes))
    )
    counts = torch.full((shape.counts(BLOCKS),), 2**31 - 4, dtype=torch.int32)  # they wrap around
    flags[rank].view(torch.int32).fill_(2**31 - 4)
    mesh.all_reduce(torch.zeros(1))
    found, chance = [], random.Random(rank)
    for number, size in enumerate(_sizes(shape)):
        x = _drawn(number, rank, size * 4 // dtype.itemsize).to(dtype)
        out = torch.empty_like(x)
        addend = torch.arange(x.numel()).remainder(7).to(dtype) if number % 2 else None
        time.sleep(chance.random() / 20)
        addresses = [torch.tensor([one.data_ptr() for one in each], dtype=torch.int64) for each in (owns, flags)]
        memory = owns[rank], addresses[0], flags[rank].view(torch.int32), addresses[1], counts
        push_sum(x, out, *memory, rank, shape, addend)
        found.append(out.tolist())
    return found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(zip(SHAPES, (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32), strict=True)),
    ids=str,
)
def test_every_rank_has_the_sums(ranks: Ranks, tmp_path: Path, dtype: torch.dtype, shape: PushShape) -> None:
    first, *others = ranks.run(_sums, str(tmp_path), dtype, shape)
    for number, size in enumerate(_sizes(shape)):
        drawn = [_drawn(number, rank, size * 4 // dtype.itemsize) for rank in range(1 + len(others))]
        addend = torch.arange(drawn[0].numel()).remainder(7) if number % 2 else 0
        assert first[number] == (torch.stack(drawn).sum(0) + addend).tolist()
    assert all(other == first for other in others)


def test_a_warm_up_launches_each_kernel_that_sums_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel for the types and alignments of its tensors, whether numbers are 1 or multiples of 16,
    and its constants."""
    found = set[Hashable]()

    def launch(
        _: Launcher, grid: object, tensors: Sequence[Tensor], numbers: tuple[int, ...], **constants: int
    ) -> None:
        kinds = [(each.dtype, each.data_ptr() % 16 == 0) for each in tensors]
        found.add((*kinds, *((number == 1, number % 16 == 0) for number in numbers), *sorted(constants.items())))

    monkeypatch.setattr(Launcher, "__call__", launch)
    for ranks in (1, 2, 4):
        found.clear()
        for rank in range(ranks):
            launch_sums(rank, ranks, torch.device("cpu"))
        warm = set(found)
        sums = itertools.product(PUSHED.get(ranks, ()), range(ranks), (torch.bfloat16, torch.float16, torch.float32))
        for (most, shape), rank, dtype in sums:
            blocks = most // shape.block_bytes
            own = torch.empty(shape.own_bytes(ranks, most), dtype=torch.uint8)
            addresses = torch.empty(ranks, dtype=torch.int64)
            flags, counts = (
                torch.empty(size, dtype=torch.int32) for size in (shape.flags(ranks, blocks), shape.counts(blocks))
            )
            least = ranks * shape.block_bytes // dtype.itemsize
            for numbers in (least if shape.copiers else MULTIPLE, 8192 * ranks, most // dtype.itemsize):
                x = torch.empty(numbers, dtype=dtype)
                for addend in (None, torch.empty_like(x)):
                    out = torch.empty_like(x)
                    push_sum(x, out, own, addresses, flags, addresses, counts, rank, shape, addend)
        assert found == warm
        assert bool(warm) == (ranks > 1)
