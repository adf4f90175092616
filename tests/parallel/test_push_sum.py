"""The one-kernel all-reduce between processes that share memory, in Triton's interpreter: the same sums on all ranks, whoever comes first, with
and without something to add."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from coserve.kernels.collectives.push_sum import PushShape, push_sum
from coserve.parallel.mesh import Mesh
from tests.support.ranks import Ranks

BLOCK_BYTES, BLOCKS = 64, 5
SHAPES = [
    PushShape(BLOCK_BYTES),
    PushShape(BLOCK_BYTES, pushers=2, adders=3),
    PushShape(BLOCK_BYTES, pushers=9, adders=7),
]
SIZES = (16, 80, 1, 33, 80, 16)
"""Numbers; the last block is full or not."""


def _sums(mesh: Mesh, folder: str, dtype: torch.dtype, shape: PushShape) -> list[list[float]]:
    ranks, rank = mesh.size, mesh.rank
    own_bytes, flag_bytes = 2 * (ranks - 1) * BLOCKS * BLOCK_BYTES, 4 * (ranks - 1) * BLOCKS
    owns, flags = (
        [torch.from_file(f"{folder}/{name}-{each}", shared=True, size=size, dtype=torch.uint8) for each in range(ranks)]
        for name, size in (("own", own_bytes), ("flags", flag_bytes))
    )
    counts = torch.full((2 * BLOCKS,), 2**31 - 4, dtype=torch.int32)  # they wrap around
    flags[rank].view(torch.int32).fill_(2**31 - 4)
    mesh.all_reduce(torch.zeros(1))
    found, chance = [], random.Random(rank)
    for number, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randint(-9, 9, (size * 4 // dtype.itemsize,), generator=generator).to(dtype)
        out = torch.empty_like(x)
        addend = torch.arange(x.numel()).remainder(7).to(dtype) if number % 2 else None
        time.sleep(chance.random() / 20)
        addresses = [torch.tensor([one.data_ptr() for one in each], dtype=torch.int64) for each in (owns, flags)]
        push_sum(
            x,
            out,
            owns[rank],
            addresses[0],
            flags[rank].view(torch.int32),
            addresses[1],
            counts,
            rank,
            shape,
            addend,
        )
        found.append(out.tolist())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.pushers}+{shape.adders}")
def test_every_rank_has_the_sums(ranks: Ranks, tmp_path: Path, dtype: torch.dtype, shape: PushShape) -> None:
    first, *others = ranks.run(_sums, str(tmp_path), dtype, shape)
    for number, size in enumerate(SIZES):
        drawn = [
            torch.randint(
                -9,
                9,
                (size * 4 // dtype.itemsize,),
                generator=torch.Generator().manual_seed(100 * number + rank),
            )
            for rank in range(1 + len(others))
        ]
        addend = torch.arange(drawn[0].numel()).remainder(7) if number % 2 else 0
        assert first[number] == (torch.stack(drawn).sum(0) + addend).tolist()
    assert all(other == first for other in others)
