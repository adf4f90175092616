from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.kernels.lora.per_adapter import split
from coserve.kernels.lora.segments import Segments


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)), max_size=12))
def test_groups_hold_every_segment_and_token_once(shape: list[tuple[int, int]]) -> None:
    bounds = [0]
    for length, _ in shape:
        bounds.append(bounds[-1] + length)
    segments = Segments(tuple(bounds), tuple(adapter for _, adapter in shape))
    groups = split(segments)

    assert sorted(row for group in groups for row in group.rows) == list(range(segments.tokens))
    assert sorted(member for group in groups for member in group.members) == list(range(len(shape)))
    assert len({group.adapter for group in groups}) == len(groups)
    for group in groups:
        assert set(group.segments.adapters) == {group.adapter}
        for place, member in enumerate(group.members):
            start, end = group.segments.bounds[place : place + 2]
            assert list(group.rows[start:end]) == list(range(bounds[member], bounds[member + 1]))
