"""Tokens that end a request beside EOS: stop texts that are one token, and the end of a turn of a chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.api_server import Api, serve_api, tokenizer

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = tokenizer().chat_template or ""
OPEN_TEMPLATE = TEMPLATE.replace("<|end|>", "")
USER, END = (tokenizer().vocabulary.added[text] for text in ("<|user|>", "<|end|>"))


def with_one_eos(template: str) -> Tokenizer:
    """The bundled tokenizer, whose only EOS ends no turn."""
    bundled = Tokenizer.load("bundled")
    bundled.chat_template, bundled.eos_token_ids = template, (0,)
    return Tokenizer.from_state(bundled.state())


async def sampled(api: Api) -> SamplingParams:
    sent = (await api.engine.saw(Generate))[-1]
    assert isinstance(sent, Generate)
    return sent.sampling


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
    assert (await sampled(api)).stop_token_ids == (USER,)
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
        assert (await sampled(api)).stop_token_ids == (END,)
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
        assert (await sampled(api)).stop_token_ids == ()
