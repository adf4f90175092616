from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.finetune.host_copy import ALIGNED, FlatLayout, HostCopy


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sampled_from([64, 192, 1 << 20]))
def test_tensors_lie_apart_and_in_whole_blocks(sizes: list[int], block: int) -> None:
    """The same tensors, whether the buffer is one piece or lies in blocks, there and back."""
    layout = FlatLayout({str(i): torch.Size((size, 2)) for i, size in enumerate(sizes)}, block)
    state_KN = torch.zeros(2, layout.size)
    for row_N in state_KN:
        for i, view in enumerate(layout.views(row_N).values()):
            view += torch.rand(view.shape) + i
            assert view.is_contiguous() and (view.storage_offset() - row_N.storage_offset()) % ALIGNED == 0
    assert state_KN.count_nonzero() == 4 * sum(sizes), "no two tensors share an element"
    host = HostCopy(state_KN.unbind(), [layout.block] * 2)
    host.download(2)
    host.wait()
    wanted = state_KN.clone()
    for row_N, blocks in zip(wanted, host.rows, strict=True):
        found = layout.block_views(blocks)
        assert all(torch.equal(found[name], view) for name, view in layout.views(row_N).items())
    state_KN.zero_()
    host.upload(1)
    assert torch.equal(state_KN[0], wanted[0]) and not state_KN[1].any()
