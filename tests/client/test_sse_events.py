"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coserve.client.sse import Event, EventParser

texts = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=8)


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_fields() -> None:
    stream = b": hello\n\nid: 7\nevent: error\ndata: one\ndata:two\nretry: 5\n\ndata: three\n\ndata: unfinished"
    assert parse(stream) == [Event("one\ntwo", "error", "7"), Event("three", "message", "7")]


def test_an_id_with_a_null_character_is_ignored() -> None:
    """As the standard of server-sent events says."""
    assert parse(b"id: 7\ndata: a\n\nid: 8\0\ndata: b\n\n") == [Event("a", "message", "7"), Event("b", "message", "7")]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: x\n\n\n\ndata\n\n") == [Event("")]


@given(
    st.lists(st.tuples(st.lists(texts, min_size=1, max_size=3), st.none() | st.integers(0, 99)), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_any_cut_gives_the_same_events(events: list[tuple[list[str], int | None]], end: str, cuts: list[int]) -> None:
    text, expected, last = "", [], None
    for lines, number in events:
        if number is not None:
            last = str(number)
            text += f"id: {number}{end}"
        text += "".join(f"data: {line}{end}" for line in lines) + ": comment" + end + end
        expected.append(Event("\n".join(lines), "message", last))
    body = text.encode()
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert parse(*(body[a:b] for a, b in pairwise(places))) == expected
