"""LoRA terms of absorbed queries and outputs (latent attention), against the whole matrix in fp64, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.attention_cases import DEVICE, TOLERANCE, worst
from tests.support.lora_backends import GROUPED
from tests.support.lora_grids import prepared


@dataclass(frozen=True)
class Shape:
    heads: int
    latent: int
    sizes: HeadSizes
    bounds: tuple[int, ...] = (0, 1, 4, 5, 6, 30)
    adapters: tuple[int, ...] = (0, 1, -1, 2, 0)
    ranks: tuple[int, ...] = (3, 20, 8)
    a_blocks: tuple[int, ...] = (1, 1, 1)
    b_blocks: tuple[int, ...] = (1, 1, 1)

    @property
    def segments(self) -> Segments:
        return Segments(self.bounds, self.adapters)

    @property
    def outputs(self) -> int:
        return self.heads * sum(self.sizes)

    def pairs(self, dtype: torch.dtype) -> list[LoraPair]:
        g = torch.Generator().manual_seed(3)
        return [
            LoraPair(
                torch.randn(rank, self.latent // a, generator=g).to(DEVICE, dtype),
                torch.randn(self.outputs, rank // b, generator=g).to(DEVICE, dtype),
                0.5 / rank,
                a_blocks=a,
                b_blocks=b,
            )
            for rank, a, b in zip(self.ranks, self.a_blocks, self.b_blocks, strict=True)
        ]


SHAPES = {
    "odd": Shape(3, 21, HeadSizes(6, 10)),
    "a_run_of_a_prompt": Shape(2, 40, HeadSizes(16, 8), bounds=(0, 100, 101), adapters=(1, 0)),
    "blocks": Shape(4, 48, HeadSizes(8, 8), ranks=(8, 32, 12), a_blocks=(1, 4, 1), b_blocks=(4, 1, 2)),
    "blocks_that_end_within_heads": Shape(3, 24, HeadSizes(6, 10), ranks=(8, 12, 16), b_blocks=(2, 4, 8)),
    "several_blocks": Shape(2, 300, HeadSizes(40, 24)),
}
DEEPSEEK = Shape(16, 512, HeadSizes(128, 128), ranks=(16, 64, 8))
CASES = [
    *[pytest.param(shape, torch.float32, id=name) for name, shape in SHAPES.items()],
    pytest.param(DEEPSEEK, torch.bfloat16, id="deepseek", marks=pytest.mark.gpu),
]


def matrices(shape: Shape, pairs: list[LoraPair]) -> list[Tensor]:
    """Each adapter's change of the projection, by heads: fp64 (H, N + E, L)."""
    whole = [pair.dense() for pair in pairs]
    return [
        (pair.scaling * pair.b_OR.double() @ pair.a_RD.double()).cpu().view(shape.heads, -1, shape.latent)
        for pair in whole
    ]


def owners(segments: Segments) -> list[int]:
    runs = zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False)
    return [adapter for adapter, start, end in runs for _ in range(start, end)]


@pytest.mark.parametrize("backend", [GROUPED, SegmentedBackend()], ids=repr)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_terms_are_those_of_the_whole_matrix(shape: Shape, dtype: torch.dtype, backend: LoraBackend) -> None:
    g, segments, pairs = torch.Generator().manual_seed(1), shape.segments, shape.pairs(dtype)
    changes = matrices(shape, pairs)
    lora, group = prepared(backend, segments, [pairs])
    (keys, values), tokens = shape.sizes, segments.tokens
    q, o = (
        torch.randn(tokens, shape.heads, width, generator=g).to(DEVICE, dtype).transpose(0, 1)
        for width in (keys + 5, shape.latent)
    )
    y_queries, y_outputs = (
        torch.randn(shape.heads, tokens, width, generator=g).to(DEVICE, dtype) for width in (shape.latent, values)
    )
    expected_queries, expected_outputs = (y.double().cpu() for y in (y_queries, y_outputs))
    for row, adapter in enumerate(owners(segments)):
        if adapter >= 0:
            change = changes[adapter]
            expected_queries[:, row] += torch.einsum("hn,hnl->hl", q[:, row, :keys].double().cpu(), change[:, :keys])
            expected_outputs[:, row] += torch.einsum("hl,hel->he", o[:, row].double().cpu(), change[:, keys:])
    lora.add_query_terms(group, y_queries, q[..., :keys], shape.sizes)
    lora.add_output_terms(group, y_outputs, o, shape.sizes)
    assert worst(y_queries, expected_queries) < TOLERANCE[dtype]
    assert worst(y_outputs, expected_outputs) < TOLERANCE[dtype]
