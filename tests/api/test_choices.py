"""Stop texts and detokenisation: whatever way a text is cut, the same comes out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.choice_decoder import ChoiceDecoder, StopStrings
from coserve.core.link.generation import Tokens
from coserve.core.types import FinishReason
from tests.support.api_server import tokenizer

LETTERS = st.text("ab", max_size=12)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which a stop text stands at the end; the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_texts_do_not_depend_on_the_cuts(text: str, stops: list[str], data: st.DataObject) -> None:
    finder, out, rest = StopStrings(stops), "", text
    wanted, wanted_stop = reference(text, stops)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        free, stop = finder.push(rest[:size])
        out, rest = out + free, rest[size:]
        assert wanted.startswith(out)  # nothing of a stop text ever got out
        if stop is not None:
            assert (out, stop) == (wanted, wanted_stop)
            return
    assert (out + finder.flush(), None) == (wanted, wanted_stop)


@given(st.text(max_size=20), st.data())
def test_choices_do_not_depend_on_how_tokens_come(text: str, data: st.DataObject) -> None:
    tokens = tokenizer().encode(text, add_special=False) or [5]
    decoder = ChoiceDecoder(tokenizer(), (), stops=(), stop_tokens={}, min_tokens=0, logprobs=False)
    parts, rest = [], tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        finished = FinishReason.LENGTH if size == len(rest) else None
        piece = decoder.feed(Tokens(id="x", tokens=tuple(rest[:size]), finished=finished))
        parts.append(piece.text)
        assert piece.finished is finished
        rest = rest[size:]
    assert "".join(parts) == tokenizer().decode(tokens)


def test_a_stop_text_within_one_message_drops_what_follows() -> None:
    tokens = tuple(tokenizer().encode("one two three", add_special=False))
    decoder = ChoiceDecoder(tokenizer(), (), stops=("two",), stop_tokens={}, min_tokens=0, logprobs=False)
    piece = decoder.feed(Tokens(id="x", tokens=tokens, finished=FinishReason.LENGTH))
    assert (piece.text, piece.finished, piece.stop_reason) == ("one ", FinishReason.STOP, "two")
    assert len(piece.token_ids) == decoder.count < len(tokens)


def test_what_looked_like_a_stop_text_comes_out_at_the_end() -> None:
    tokens = tuple(tokenizer().encode("one tw", add_special=False))
    decoder = ChoiceDecoder(tokenizer(), (), stops=("two",), stop_tokens={}, min_tokens=0, logprobs=False)
    assert decoder.feed(Tokens(id="x", tokens=tokens)).text == "one "
    assert decoder.feed(Tokens(id="x", tokens=(), finished=FinishReason.LENGTH)).text == "tw"
