"""Stand-ins with which the daemon's forward and backward run on fake tensors and count the memory that they take on a
GPU.

The fake tensors are on the CPU, because torch without CUDA cannot differentiate fake GPU tensors. So choices that
depend on the device are made here as on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import Attention, AttentionParams, TokenRun
from coserve.kernels.attention.packed import PackedAttention, as_wide
from coserve.kernels.attention.triton_paged.step import FusedPagedAttention
from coserve.kernels.gpu.launcher import launch_nothing
from coserve.kernels.lora.interface import Adapters
from coserve.kernels.lora.segmented.backend import SegmentedBackend, SegmentedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import SiteGroup
from coserve.memory.kv import KvCache
from tests.support.live_bytes import LiveBytes
from tests.support.workspaces import workspace_bytes


@contextmanager
def fake_tensors() -> Iterator[LiveBytes]:
    """Context in which tensors are fake and kernels are not launched; the meter counts like a GPU's allocator.

    Raises `UnsupportedBase` for a model whose shapes depend on values, such as some mixtures of experts.
    """
    meter = LiveBytes(workspace_bytes)
    with warnings.catch_warnings(), launch_nothing(), FakeTensorMode(allow_non_fake_inputs=True), meter:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            yield meter
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            raise UnsupportedBase(f"its memory cannot be predicted, only measured on a GPU: {error}") from error


class FlashAttention:
    """`PackedAttention` as on a GPU: torch's kernel for packed sequences in 16 bits, otherwise one sequence after
    another."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._plain, self._sequences = PackedAttention(bounds), len(bounds) - 1
        self._longest = max(end - start for start, end in pairwise(bounds))

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """See `Attention.attend`."""
        values = v_KTD.shape[2]
        width, half = max(q_HTD.shape[2], values), q_HTD.dtype in (torch.bfloat16, torch.float16)
        if params.softcap is not None or params.sinks is not None or not half or width % 8 or width > 256:
            return self._plain.attend(layer, q_HTD, k_KTD, v_KTD, params)
        bounds = torch.empty(self._sequences + 1, dtype=torch.int32, device=q_HTD.device)
        q, k, v = as_wide(*(x.transpose(0, 1) for x in (q_HTD, k_KTD, v_KTD)))
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, self._longest, self._longest, 0.0, True, False, scale=params.scaling
        )[0]
        return out[..., :values]


class FakeSegmentedBackend(SegmentedBackend):
    """The `segmented` backend for fake adapters: its tables are real tensors, whose contents the host reads."""

    def refuse_adapters(self, adapters: Adapters) -> None:
        """Accept any device, as nothing is launched."""

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> SegmentedLora:
        with unset_fake_temporarily():
            return super().prepare(segments, adapters, groups)


def paged_attention(kv: KvCache, runs: Sequence[TokenRun]) -> Attention:
    """`KvCache.attention` as on a GPU."""
    return FusedPagedAttention(kv.views, runs)
