"""Recurrences in chunks by kernels against plain torch, forward and backward: in Triton's interpreter without a GPU,
else also in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from coserve.kernels.recurrent.chunked.long_runs import PROMPTS
from coserve.kernels.recurrent.chunked.recurrence import LEAST_SIZE, ChunkedRecurrence
from coserve.kernels.recurrent.chunked.tables import ChunkTables
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.packed import PackedRecurrence
from coserve.kernels.recurrent.reference import CHUNK
from tests.support.attention_cases import DEVICE

SHORT = ((0, 63, 64, 64, 111), 16)
"""Bounds of sequences, of several chunks, of one token and empty, and the tokens of a chunk."""
LONG = ((0, 190, 191, 191, 500), 64)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SIZES = {"delta rule": (2, 2, 6, 20), "no delta, grouped keys": (2, 1, 20, 10)}
"""H, G, K, V."""
GPU_SIZES = {"delta rule": (4, 4, 128, 128), "no delta, grouped keys": (8, 2, 128, 64)}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_outputs_and_gradients(case: str, dtype: torch.dtype) -> None:
    delta = case == "delta rule"
    sizes, (bounds, chunk) = (SIZES, SHORT) if dtype == torch.float32 else (GPU_SIZES, LONG)
    heads, groups, keys, values = sizes[case]
    tokens, generator = bounds[-1], torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(tokens, *sizes, generator=generator)

    given = RecurrenceInputs(
        random(groups, keys) / keys**0.5,
        normalize(random(groups, keys), dim=-1),
        random(heads, values),
        -random(heads).abs() / 4,
        random(heads).sigmoid() if delta else None,
    ).rows(lambda x: x.to(DEVICE, dtype))
    given = given._replace(decay=given.decay.float())
    dout_THV = random(heads, values).to(DEVICE, dtype)
    kernels, plain = ChunkedRecurrence.of_bounds(bounds, torch.device(DEVICE), chunk), PackedRecurrence(bounds)
    cpu = given.rows(lambda x: x.float().cpu())
    out_THV, kept = kernels.recur_keeping(given)
    assert (kept is not None) == delta
    found = [out_THV, *kernels.gradients(given, dout_THV)]
    for own, again in zip(kernels.gradients(given, dout_THV, kept), found[1:], strict=True):
        assert torch.equal(own, again), "what the forward kept is what the backward computes"
    expected = [plain.recur(0, cpu), *plain.gradients(cpu, dout_THV.float().cpu())]
    for own, right in zip(found, expected, strict=True):
        error = torch.linalg.vector_norm(own.float().cpu() - right) / torch.linalg.vector_norm(right)
        assert float(error) < TOLERANCE[dtype]


def test_tables_serve_batches_of_as_many_rows() -> None:
    """Whose launches are the same: programs of chunks and sequences that a batch lacks write nothing."""
    tokens, generator = 2 * CHUNK + 7, torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(tokens, 1, 16, generator=generator) for _ in range(4))
    ones = torch.ones(tokens, 1)
    given = RecurrenceInputs(q, normalize(k, dim=-1), v, -ones, ones / 2).rows(lambda x: x.to(DEVICE))
    dout_THV, tables = dout.to(DEVICE), ChunkTables(tokens, 4, (), torch.device(DEVICE))
    fixed = ChunkedRecurrence(tables.chunks, tables.first)
    for bounds in ((0, tokens), (0, 1, CHUNK + 3, CHUNK + 3, tokens), (0, 5, 6, tokens - 1, tokens)):
        tables.load([(start, end) for start, end in pairwise(bounds) if end > start])
        own = ChunkedRecurrence.of_bounds(bounds, torch.device(DEVICE))
        found, right = ([one.recur(given), *one.gradients(given, dout_THV)] for one in (fixed, own))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_many_short_rows_keep_no_more_memory_than_a_long_one() -> None:
    """As training's memory is planned from the tokens, measured with long rows."""
    tokens, generator = 48, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, 16, generator=generator) for _ in range(3))
    ones = torch.ones(tokens, 1)
    given = RecurrenceInputs(q, normalize(k, dim=-1), v, -ones, ones).rows(lambda x: x.to(DEVICE))
    sizes = []
    for row in (48, 3):
        bounds = (*range(0, tokens, row), tokens)
        kept = ChunkedRecurrence.of_bounds(bounds, torch.device(DEVICE), 16).recur_keeping(given)[1]
        sizes.append(0 if kept is None else kept.nbytes)
    assert sizes[0] > 0 and sizes[1] <= 1.25 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_a_chunk_is_solved_in_parts(dtype: torch.dtype) -> None:
    """With keys that are all alike and without decay, where the powers of the system's matrix grow to 1e4 and more."""
    chunk, size = (64, LEAST_SIZE) if dtype == torch.bfloat16 else (16, 16)
    generator = torch.Generator().manual_seed(0)
    keys = normalize(torch.randn(1, 2, size, generator=generator), dim=-1).expand(chunk + 5, -1, -1)
    q, v = (torch.randn(chunk + 5, 2, size, generator=generator) for _ in range(2))
    ones = torch.ones(chunk + 5, 2)
    given = RecurrenceInputs(q, keys, v, 0 * ones, ones).rows(lambda x: x.to(DEVICE, dtype))
    chunks = torch.tensor([0, chunk, chunk, chunk + 5], dtype=torch.int32, device=DEVICE).view(-1, 2)
    first = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    right = PackedRecurrence((0, chunk + 5)).recur(0, given.rows(lambda x: x.float().cpu()))
    for part, compact, exact in ((4, True, False), (8, False, False), (8, True, True), (16, True, True)):
        shape = replace(PROMPTS, part=part, compact=compact, exact=exact)
        found = ChunkedRecurrence(chunks, first, chunk, shape).recur(given).float().cpu()
        error = torch.linalg.vector_norm(found - right) / torch.linalg.vector_norm(right)
        assert float(error) < TOLERANCE[dtype]
