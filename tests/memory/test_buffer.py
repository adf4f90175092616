"""The pool's bytes: what shares a page does not overlap, and what moves arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from coserve.kernels.attention.interface import AttentionParams, KvShape, TokenRun
from coserve.memory.buffer import ALIGNMENT, PageBuffer, page_layout
from coserve.memory.kv import KvCache


@pytest.mark.parametrize("shapes", [[(8, 128, 128)] * 3, [(2, 8, 5), (1, 16, 16), (3, 5, 9)], [(1, 1, 1)]])
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_layers_lie_side_by_side_in_whole_lines(shapes: list[tuple[int, int, int]], page_tokens: int) -> None:
    layout = page_layout([KvShape(*shape) for shape in shapes], page_tokens, torch.bfloat16)
    places = sorted((*layout.keys, *layout.values, layout.page_bytes))
    assert all(place % ALIGNMENT == 0 for place in places)
    sizes = [page_tokens * heads * width * 2 for heads, *widths in shapes for width in widths]
    assert [b - a >= size for (a, b), size in zip(pairwise(places), sizes, strict=True)] == [True] * len(sizes)
    assert layout.page_bytes < sum(sizes) + ALIGNMENT * len(sizes)


def test_a_page_of_the_8b_shape_is_2_mib() -> None:
    assert page_layout([KvShape(8, 128, 128)] * 32, 16, torch.bfloat16).page_bytes == 2 << 20


def test_layers_of_one_page_keep_their_own() -> None:
    """Each layer writes through attention; every one reads back its own values, whatever the others' shapes. One that
    reads another's takes no room."""
    shapes = [KvShape(2, 8, 8), KvShape(1, 16, 6), KvShape(2, 5, 9)]
    alone = page_layout(shapes, 3, torch.float32).page_bytes
    assert page_layout([*shapes, KvShape(0, 0, 0, 1)], 3, torch.float32).page_bytes == alone
    with_reader = [*shapes, KvShape(0, 0, 0, 1)]
    kv = KvCache(with_reader, pages=4, page_tokens=3, dtype=torch.float32, device=torch.device("cpu"))
    pages = kv.allocate(3)
    assert pages is not None
    run = TokenRun(7, 0, tuple(pages))
    given = [torch.randn(shape.heads, 7, shape.values) for shape in shapes]
    zero = kv.attention([run])
    for layer, values in enumerate(given):
        keys = torch.zeros(shapes[layer].heads, 7, shapes[layer].keys)
        zero.attend(layer, keys, keys, values, AttentionParams(scaling=1.0, window=1))
    again = kv.attention([TokenRun(1, 7, tuple(pages))])
    for layer, values in enumerate(given):
        last = torch.ones_like(values[:, :1])
        keys = torch.ones(shapes[layer].heads, 1, shapes[layer].keys)
        out = again.attend(layer, keys, keys, last, AttentionParams(scaling=0.0))
        expected = (values.sum(1) + 1) / 8
        torch.testing.assert_close(out[0], expected)
        if layer == 1:
            torch.testing.assert_close(again.attend(3, keys, keys, last, AttentionParams(scaling=0.0))[0], expected)


def test_moved_pages_take_their_contents_along() -> None:
    buffer = PageBuffer(6, ALIGNMENT, torch.device("cpu"))
    pages = buffer.pool.allocate(6)
    assert pages is not None
    for page in pages:
        buffer.bytes[page] = page + 1
    buffer.pool.free([0, 2, 4])
    taken = buffer.allocate_span(3)
    assert taken is not None
    span, moved = taken
    assert sorted(moved) == sorted({1, 3, 5} & set(range(span.first, span.first + 3)))
    for page in (1, 3, 5):
        assert buffer.bytes[moved.get(page, page)].unique().tolist() == [page + 1]
    assert buffer.of(span).shape == (3 * ALIGNMENT,)
    assert buffer.of(span).data_ptr() == buffer.bytes[span.first].data_ptr()
    assert not buffer.bytes[-1].any(), "the last page stays zero"


def test_a_span_is_quiet_where_the_step_in_flight_uses_none_of_its_pages() -> None:
    """Also pages that were freed since its launch are used by it; and after a move nobody knows."""
    buffer = PageBuffer(8, ALIGNMENT, torch.device("cpu"))
    pages, whole = buffer.pool.allocate(4), buffer.allocate_span(2)
    assert pages == [0, 1, 2, 3] and whole is not None
    assert not buffer.is_quiet(whole[0]), "no step has begun"
    buffer.step_begins()
    buffer.pool.free(pages)
    buffer.pool.release_span(whole[0])
    free = buffer.allocate_span(2)
    assert free is not None and (free[0].first, free[1]) == (4, {})
    assert buffer.is_quiet(free[0])
    reused = buffer.allocate_span(3)
    assert reused is not None and not reused[1]
    assert not buffer.is_quiet(reused[0])
    buffer.step_begins()
    assert not buffer.is_quiet(reused[0]), "it may be read"
    buffer.pool.release_span(reused[0])
    buffer.step_begins()
    assert buffer.is_quiet(reused[0])
    buffer.move({0: 1})
    assert not buffer.is_quiet(reused[0])
