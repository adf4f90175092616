"""Where a choice ends: stop texts, whatever way a text is cut, and tokens that end a request beside EOS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.choice_decoder import ChoiceDecoder, StopStrings
from coserve.core.link.generation import Tokens
from coserve.core.types import FinishReason
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.api_server import Api, serve_api, tokenizer

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


CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = tokenizer().chat_template or ""
OPEN_TEMPLATE = TEMPLATE.replace("<|end|>", "")
USER, END = (tokenizer().vocabulary.added[text] for text in ("<|user|>", "<|end|>"))


def with_one_eos(template: str) -> Tokenizer:
    """The bundled tokenizer, whose only EOS ends no turn."""
    bundled = Tokenizer.load("bundled")
    bundled.chat_template, bundled.eos_token_ids = template, (0,)
    return Tokenizer.from_state(bundled.state())


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_text_that_is_a_special_token_ends_the_answer(api: Api, include: bool) -> None:
    text = tokenizer().decode(api.reply[:2])
    api.reply = [*api.reply[:2], USER, *api.reply[2:]]
    body: dict[str, Any] = {"prompt": "x", "include_stop_str_in_output": include, "logprobs": 0}
    _, found = await api.call("POST", "/generate", json=body | {"stop": ["never", "<|user|>"]})
    (choice,) = found["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|user|>")
    assert choice["text"] == text + ("<|user|>" if include else "")
    assert "".join(entry["text"] for entry in choice["logprobs"]) == choice["text"]
    assert choice["token_ids"] == api.reply[:3]
    assert (await api.last_request()).sampling.stop_token_ids == (USER,)
    _, found = await api.call("POST", "/v1/completions", json=body | {"stop": "<|user|>", "max_tokens": 64})
    assert found["choices"][0]["text"] == choice["text"]


async def test_the_end_of_a_turn_ends_a_chat_and_no_other_request(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_one_eos(TEMPLATE)) as api:
        text = tokenizer().decode(api.reply[:2])
        api.reply = [*api.reply[:2], END, *api.reply[2:]]
        for path, found in (
            ("/generate", lambda body: body["choices"][0]["text"]),
            ("/v1/chat/completions", lambda body: body["choices"][0]["message"]["content"]),
        ):
            _, body = await api.call("POST", path, json={"messages": CHAT})
            assert (found(body), body["choices"][0]["finish_reason"]) == (text, "stop")
            assert body["choices"][0]["stop_reason"] is None
        assert (await api.last_request()).sampling.stop_token_ids == (END,)
        for other in ({"messages": CHAT, "ignore_eos": True}, {"prompt": "x"}):
            _, body = await api.call("POST", "/generate", json=other)
            assert len(body["choices"][0]["token_ids"]) == len(api.reply)
        note, *_ = (await api.call("GET", "/health"))[1]["notes"]
        assert "ends a turn with <|end|>, which is no EOS" in note


async def test_a_template_without_an_end_of_turn_is_told_of(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_one_eos(OPEN_TEMPLATE)) as api:
        await api.call("POST", "/generate", json={"messages": CHAT})
        note, *_ = (await api.call("GET", "/health"))[1]["notes"]
        assert "writes no token behind an answer" in note
        assert (await api.last_request()).sampling.stop_token_ids == ()
