"""Structured output over HTTP with a real engine, through every dialect and client; what is refused, and how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.client import AsyncClient
from coserve.core.link.generation import Generate
from tests.support.api_server import Api, read_events, tokenizer
from tests.support.real_server import serve_real

openai = pytest.importorskip("openai")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["sad", "glad"]}, "tags": {"type": "array", "items": {"type": "integer"}}},
    "required": ["mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}}
TURNS: Any = [{"role": "user", "content": "How are you?"}]


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_real(tmp_path) as api:
        yield api


def check(text: str, finish: str | None) -> None:
    if finish == "stop":
        value = json.loads(text)
        assert value["mood"] in ("sad", "glad")
        assert value.keys() <= {"mood", "tags"}
        assert all(isinstance(tag, int) for tag in value.get("tags", []))
    else:
        assert text.lstrip().startswith("{"), "cut by its length"


async def test_every_dialect_constrains_its_text(real: Api) -> None:
    async with real.openai() as client:
        done = await client.chat.completions.create(
            model="bundled", messages=TURNS, response_format=FORMAT, n=4, seed=1, max_tokens=60, logprobs=True
        )
        for choice in done.choices:
            check(choice.message.content, choice.finish_reason)
        assert "stop" in {choice.finish_reason for choice in done.choices}
        stream = await client.chat.completions.create(
            model="bundled", messages=TURNS, response_format=FORMAT, seed=1, max_tokens=60, stream=True
        )
        parts = [chunk.choices[0] async for chunk in stream]
        assert "".join(part.delta.content or "" for part in parts) == done.choices[0].message.content
        picked = await client.completions.create(
            model="bundled", prompt="The sky is", extra_body={"structured_outputs": {"choice": ["blue", "red"]}}
        )
        assert (picked.choices[0].text in ("blue", "red"), picked.choices[0].finish_reason) == (True, "stop")
    for body, expected in (
        ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"guided_choice": ["a", "b"], "stop": ["zzz"], "min_tokens": 1}, lambda text: text in "ab"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, lambda text: text[0] == "x" and text[1:].isdigit()),
        ({"guided_json": json.dumps({"const": 5})}, lambda text: json.loads(text) == 5),
        ({"response_format": {"type": "json_object"}, "max_tokens": 5}, lambda text: text.lstrip().startswith("{")),
    ):
        answer = await real.answered(200, "POST", "/generate", json={"prompt": "Once", **body})
        assert expected(answer["choices"][0]["text"]), answer
    async with AsyncClient(real.url) as sdk:
        own = await sdk.generate("Once", schema={"enum": ["left", "right"]})
        assert json.loads(own.choices[0].text) in ("left", "right")


async def test_with_tools_a_text_has_its_format_or_begins_like_a_call(tmp_path: Path) -> None:
    """With a real engine, which begins as the bias asks where the grammar lets it."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    first = tokenizer().encode("<tool_call>", add_special=False)[0]
    asked: Any = {"model": "bundled", "messages": TURNS, "response_format": FORMAT, "max_tokens": 60, "seed": 1}
    async with serve_real(tmp_path, tool_parser="hermes") as api, api.openai() as client:
        for more, calls in (({"tools": [tool]}, True), ({"tools": [tool], "tool_choice": "none"}, False), ({}, False)):
            done = await client.chat.completions.create(logit_bias={str(first): 100}, **asked | more)
            (choice,) = done.choices
            if calls:
                assert choice.message.tool_calls or (choice.message.content or "").startswith("<tool_call>")
            else:
                check(choice.message.content or "", choice.finish_reason)
        quiet = await client.chat.completions.create(logit_bias={str(first): -100}, **asked | {"tools": [tool]})
        check(quiet.choices[0].message.content or "", quiet.choices[0].finish_reason)


async def test_streamed_responses_score_parts_of_characters(real: Api) -> None:
    format = {"type": "json_schema", "name": "face", "schema": {"const": "😀日"}}
    asked: Any = {"model": "bundled", "input": "Hi", "temperature": 0, "text": {"format": format}}
    async with real.openai() as client:
        asked["include"] = ["message.output_text.logprobs"]
        whole = (await client.responses.create(**asked)).output[0].content[0].logprobs
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    deltas = [score.bytes for event in events if event.type.endswith("text.delta") for score in event.logprobs]
    assert deltas == [score.bytes for score in whole] and len(deltas) > 4
    assert len(events[-1].response.output[0].content[0].logprobs) == len(whole)


async def test_a_schema_that_no_text_fits_is_refused_as_such(real: Api) -> None:
    body = {"prompt": "Once", "guided_json": {"$ref": "#"}}
    status, answer = await real.call("POST", "/generate", json=body)
    assert (status, "no text fits it" in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "objekt"}}, "guided_json", "objekt"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "at most one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object", "at most one"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"$ref": "https://x.invalid/y"}}, "guided_json", "x.invalid"),
        ({"guided_json": {"description": "x" * (1 << 16)}}, "guided_json", "at most 65536"),
        ({"guided_grammar": "nonsense !!"}, "guided_grammar", "grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_enforced_is_refused(
    lasting_api: Api, body: dict[str, Any], field: str, says: str
) -> None:
    error = await lasting_api.refused(400, "invalid_request", "POST", "/generate", json={"prompt": "x", **body})
    assert error["field"] == field
    assert says in error["message"]


async def test_the_engine_gets_the_grammar_as_plain_data(api: Api) -> None:
    async with api.http.post("/generate", json={"prompt": "x", "stream": True, "guided_choice": ["a"]}) as response:
        assert read_events(await response.text())
    (sent,) = await api.engine.saw(Generate)
    assert sent.grammar is not None
    assert (sent.grammar.kind, sent.grammar.text) == ("choice", '["a"]')


async def test_tokens_and_words_that_a_request_excludes_are_not_in_its_answer(real: Api) -> None:
    async with real.openai() as client:
        asked = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        free = (await client.completions.create(**asked)).choices[0].text
        word = free.split()[1]
        other = (await client.completions.create(**asked, extra_body={"bad_words": [word]})).choices[0].text
        assert word in free and word not in other.split()
        only = {"allowed_token_ids": [5, 6, 7], "return_token_ids": True}
        (choice,) = (await client.completions.create(**asked, extra_body=only)).choices
        assert set(choice.token_ids) <= {5, 6, 7}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**asked, extra_body={"allowed_token_ids": [1 << 30]})
        assert caught.value.param == "allowed_token_ids"
    async with AsyncClient(real.url) as native:
        found = await native.generate("Once upon a time", max_tokens=12, temperature=0, bad_words=[word])
        assert found.choices[0].text == other
