"""Bad input under `/v1`: OpenAI's shape of error, the field by name, and a good request succeeds after each."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.api_server import Api
from tests.support.fake_engine import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT: dict[str, Any] = {"model": "fake", "prompt": "x"}
TURN = {"role": "user", "content": "x"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {"model": "fake", "messages": [TURN]}
PATHS = ("/v1/completions", "/v1/chat/completions")

# What is sampled how is refused as by `POST /generate` (test_bad_input.py): here are a few of it.
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"seed": -(1 << 63) - 1}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": "yes"}, "stream"),
    ({"model": "x" * 513}, "model"),
    ({"model": 5}, "model"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}, "truncate_prompt_tokens"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"priority": 1}, "priority"),
]
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 1024, "n": 2}, "n"),
    ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [TURN] * 16385}, "messages"),
    ({"messages": [TURN | {"content": [{"type": "text", "text": "x"}] * 1025}]}, "messages[0].content"),
    ({"messages": [TURN | {"content": [{"type": "input_audio", "text": ""}]}]}, "messages[0].content[0].type"),
    ({"messages": [TURN | {"role": "root"}]}, "messages[0].role"),
    ({"messages": [TURN | {"tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [TURN | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [TURN | {"weight": 1}]}, "messages[0].weight"),
    ({"tools": {"type": "function"}}, "tools"),
    *(
        ({"chat_template_kwargs": {name: "x"}}, "chat_template_kwargs")
        for name in ("messages", "tools", "add_generation_prompt", "eos_token", "raise_exception", "coserve_marks", "x")
    ),
    ({"messages": [TURN | {"content": "word " * CONTEXT}]}, "messages"),
]
CASES = [
    *((path, body, field) for body, field in BOTH for path in PATHS),
    *((PATHS[0], *case) for case in TEXTS),
    *((PATHS[1], *case) for case in CHATS),
]


def good(path: str) -> dict[str, Any]:
    return TEXT if path == PATHS[0] else CHAT


@pytest.fixture(scope="module")
def api(lasting_api: Api) -> Api:
    return lasting_api


async def check_works(api: Api, path: str) -> None:
    await api.answered(200, "POST", path, json=good(path))


@pytest.mark.parametrize(("path", "body", "field"), CASES, ids=lambda value: str(value)[:40])
async def test_a_value_that_is_wrong(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    answer = await api.answered(400, "POST", path, json=good(path) | body)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert len(error["message"]) < 300
    await check_works(api, path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"model": NaN}', b'{"a":' + b"[" * 100_000, b"\xff"],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", PATHS)
async def test_malformed_json(api: Api, path: str, content: bytes) -> None:
    status, answer = await api.call("POST", path, data=content)
    assert (status, set(answer["error"])) == (400, {"message", "type", "param", "code"})
    await check_works(api, path)


LONG = "x" * 300
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {LONG: 1}}
UNCHECKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": LONG, "name": "f"}]}, "input[0].call_id"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": LONG}]}, "input[0].name"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": LONG}]}, "input[0].call_id"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ("/v1/responses", {"input": "x", "tools": [TOOL["function"] | {"type": "function"}]}, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, "tools"),
    (
        "/v1/chat/completions",
        CHAT | {"chat_template_kwargs": {f"x{n}": 1 for n in range(32)}, "documents": [{"text": "x"}]},
        "chat_template_kwargs",
    ),
    (
        "/v1/messages",
        {"messages": [TURN, {"role": "assistant", "content": [USE]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ("/v1/messages", {"messages": [TURN], "tools": [{"name": "f", "input_schema": {"$defs": 5}}]}, "tools"),
]


@pytest.mark.parametrize(("path", "body", "field"), UNCHECKED, ids=repr)
async def test_limits_of_chats_hold_in_every_dialect(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    """Most are checked as a helper process reads the chat."""
    forced = {"type": "any"} if path == "/v1/messages" else "required"
    given = body | {"max_tokens" if path != "/v1/responses" else "max_output_tokens": 4}
    answer = await api.answered(400, "POST", path, json=given | ({"tool_choice": forced} if "tools" in body else {}))
    assert answer["error"]["message"].startswith(field) and ": expected " in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT | {"stream_options": {"type": "x"}}, "stream_options.type"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
    ],
)
async def test_an_unknown_field_is_named_with_its_path(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    answer = await api.answered(400, "POST", path, json={"max_tokens": 4} | body)
    assert answer["error"]["message"].startswith(f"{field}: unknown field")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", b'{"prompt": 1e999}', "prompt"),
        ("/v1/completions", b'{"prompt": "x", "user": {"a": [1, -1e999]}}', "user.a[1]"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x", "z": 1e999}]}', "messages[0].z"),
        ("/v1/responses", b'{"input": [{"role": "user", "content": [{"text": 1e999}]}]}', "input[0].content[0].text"),
        ("/generate", b'{"prompt": "x", "structured_outputs": {"json": [1e999]}}', "structured_outputs.json[0]"),
    ],
)
async def test_a_number_that_no_double_holds(api: Api, path: str, body: bytes, field: str) -> None:
    """The decoder reads no further, and does not know the names of the fields before it."""
    status, answer = await api.call("POST", path, data=body)
    error = answer["error"]
    assert (status, error.get("param", error.get("field"))) == (400, field)
    assert error["message"].removeprefix(f"{field}: ") == "number out of range"


async def test_bodies_over_the_limit_and_wrong_methods(api: Api) -> None:
    large = json.dumps(TEXT | {"user": "x" * (1 << 20)})
    await api.error(413, "body_too_large", "POST", PATHS[0], data=io.BytesIO(large.encode()))
    async with api.http.put(PATHS[0], data=b"{}") as response:
        answer = await response.json()
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert (answer["error"]["code"], answer["error"]["message"]) == ("method_not_allowed", "expected POST, got PUT")
    assert answer["error"]["type"] == "invalid_request_error"
    for method, path, said in (
        ("GET", "/v1/nothing", "there is no such path"),
        ("GET", "/v1/models/", "there is no such path; did you mean '/v1/models'?"),
        ("GET", "/v1", "there is no such path"),
        ("GET", "/v1/jobs/job-1", "there is no such path; did you mean '/finetune'?"),
        ("POST", "/v1/embeddings", "embeddings are not implemented"),
        ("POST", "/v1/responses/resp_1/cancel", "cancelled responses are not implemented"),
        ("POST", "/v1/audio/speech", "speech and transcription are not implemented"),
        ("POST", "/v1/fine_tuning/alpha/graders/run", "permissions of checkpoints and graders are not implemented"),
        ("POST", "/v1/images/generations", "images are not implemented"),
        ("POST", "/v1/moderations", "moderations are not implemented"),
    ):
        status, answer = await api.call(method, path, data=b"{}")
        assert (status, answer["error"]) == (
            404,
            {"message": said, "type": "not_found_error", "param": None, "code": "not_found"},
        )
    _, answer = await api.call("GET", "/v1/models/nope")
    assert answer["error"]["message"] == "model: no adapter 'nope'; GET /v1/models lists the base and its adapters"
    await api.refused(404, "not_found", "GET", "/nothing")  # no path of OpenAI's: our own shape
    for path, said in (
        ("/rerank", "reranking is not implemented"),
        ("/v2/rerank", "reranking is not implemented"),
        ("/score", "scores of pairs of texts are not implemented"),
        ("/sleep", "sleep mode is not implemented"),
        ("/adapters/", "there is no such path; did you mean '/adapters'?"),
        ("/load", "there is no such path; did you mean '/metrics'?"),
        ("/responses", "there is no such path; did you mean '/v1/responses'?"),
    ):
        _, answer = await api.call("POST", path, data=b"{}")
        assert answer["error"]["message"] == said
    _, answer = await api.call("POST", "/chat/completions", data=b"{}")
    assert answer["error"]["message"] == "there is no such path; did you mean '/v1/chat/completions'?"


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        (PATHS[0], {"prompt": [5] * CONTEXT}, f"{CONTEXT} in the prompt"),
        (PATHS[1], {"messages": [TURN | {"content": "word " * CONTEXT}]}, "in the messages"),
        (PATHS[0], {"prompt": "x" * 100_000}, "100000"),
        (PATHS[0], {"prompt": "word " * CONTEXT, "stream": True}, "in the prompt"),
    ],
    ids=["ids", "chat", "characters", "stream"],
)
async def test_a_prompt_longer_than_the_context(api: Api, path: str, body: dict[str, Any], asked: str) -> None:
    status, answer = await api.call("POST", path, json=good(path) | body)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")
    assert asked in error["message"]


async def test_an_enum_lists_its_values_and_the_one_that_came(api: Api) -> None:
    """Only who sent it reads the error: no log has it."""
    role = {"messages": [TURN, TURN | {"role": "boss"}]}
    _, answer = await api.call("POST", PATHS[1], json=CHAT | role)
    listed = "expected one of assistant, developer, system, tool, user, got 'boss'"
    assert (answer["error"]["message"], answer["error"]["param"]) == (f"messages[1].role: {listed}", "messages[1].role")
    error = await api.refused(400, "invalid_request", "POST", "/generate", json=role)
    assert (error["message"], error["field"]) == (listed, "messages[1].role")
    job = {"adapter": "a", "data": [{"text": "x"}], "training": {"schedule": "x" * 9000}}
    error = await api.refused(400, "invalid_request", "POST", "/finetune", json=job)
    assert error["message"] == "expected one of linear, cosine, constant, got 9000 characters"


async def test_a_message_begins_with_its_field(api: Api) -> None:
    """Clients print the message alone."""
    _, answer = await api.call("POST", PATHS[0], json=TEXT | {"max_tokens": -1})
    assert answer["error"]["message"].startswith("max_tokens: expected")
    _, answer = await api.call("POST", PATHS[0], json=TEXT | {"model": "nobody"})
    assert answer["error"]["param"] == "model" and answer["error"]["message"].count("model:") == 1


async def test_a_tool_that_cannot_be_enforced_is_named_as_a_tool(api: Api) -> None:
    """The grammar of a forced call is made of the tools: the request has no `structured_outputs`."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    schema = {"type": "json_schema", "name": "a", "schema": parameters}
    tool = {"name": "f", "parameters": parameters}
    chat = CHAT | {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    answer = {"model": "fake", "input": "x"}
    forced = answer | {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    for path, body, param in (
        (PATHS[1], chat, "tools"),
        (PATHS[1], chat | {"stream": True}, "tools"),
        ("/v1/responses", forced, "tools"),
        ("/v1/responses", answer | {"text": {"format": schema}}, "text.format.schema"),
    ):
        error = (await api.answered(400, "POST", path, json=body))["error"]
        assert error["param"] == param
        assert "expected a JSON schema that can be enforced" in error["message"]
