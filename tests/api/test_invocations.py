"""SageMaker's `/invocations`: what its path without `/v1` answers is what OpenAI's paths answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import read_events, serve_api, with_template
from tests.support.chat_templates import QWEN3

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (CHAT, "chat.completion"),
        (TEXT, "text_completion"),
        (TEXT | {"messages": None}, "text_completion"),
        (TEXT | {"prompt": 'a text of "messages"'}, "text_completion"),
        (TEXT | {"prompt": "word " * 5000, "truncate_prompt_tokens": 8}, "text_completion"),
    ],
)
async def test_a_body_is_a_chat_or_a_completion(tmp_path: Path, body: dict[str, Any], kind: str) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=1024) as api:
        answer = await api.answered(200, "POST", "/invocations", json=body)
        assert answer["object"] == kind and answer["usage"]["completion_tokens"] > 0
        async with api.http.post("/invocations", json=body | {"stream": True}) as response:
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        assert {event["object"] for event in read_events(text) if "object" in event} <= {kind, f"{kind}.chunk"}


async def test_errors_have_the_form_of_openai(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        for body, param in ((CHAT | {"n": 0}, "n"), ({"inputs": "Hi"}, "inputs"), ({}, "prompt")):
            answer = await api.answered(400, "POST", "/invocations", json=body)
            assert answer["error"]["param"] == param and answer["error"]["type"] == "invalid_request_error"
