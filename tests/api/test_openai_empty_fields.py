"""What SDKs send that asks for nothing is taken at every level, and what asks for something is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.inspect import StructType, type_info

from coserve.api.anthropic.schemas import MessagesRequest
from coserve.api.http.parsing import decode_dialect
from coserve.api.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from coserve.api.tgi.schemas import TgiParameters, TgiRequest
from coserve.core.errors import CoserveError, UnknownField
from coserve.core.messages import ChatMessage, FunctionCall, TextPart, ToolCall
from tests.support.api_server import REPLY, Api
from tests.support.examples import examples

if TYPE_CHECKING:
    from openai import AsyncOpenAI

openai = pytest.importorskip("openai")

TURN = {"role": "user", "content": "hi"}
EMPTY: list[Any] = [None, "", [], {}, {"refusal": None, "deeper": {"a": [], "b": ""}}]

NEEDED: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [TURN]},
    ChatMessage: {"role": "user"},
    TextPart: {"type": "text", "text": "x"},
    ToolCall: {"function": {"name": "f"}},
    FunctionCall: {"name": "f"},
    StreamOptions: {},
    TgiRequest: {"inputs": "x"},
    TgiParameters: {},
}
OPTIONAL = [
    (struct, field.encode_name)
    for struct in NEEDED
    for info in [type_info(struct)]
    if isinstance(info, StructType)
    for field in info.fields
    if not field.required
]


@pytest.mark.parametrize(("struct", "name"), OPTIONAL, ids=lambda value: getattr(value, "__name__", value))
def test_null_equals_leaving_it_out(struct: type[msgspec.Struct], name: str) -> None:
    needed = NEEDED[struct]
    assert decode_dialect(msgspec.json.encode(needed | {name: None}), struct) == decode_dialect(
        msgspec.json.encode(needed), struct
    )


_NAMES = st.from_regex(r"x_[A-Za-z_-]{1,12}", fullmatch=True)
_EMPTY_FIELDS = st.dictionaries(_NAMES, st.sampled_from(EMPTY), max_size=3)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
@given(top=_EMPTY_FIELDS, turn=_EMPTY_FIELDS, part=_EMPTY_FIELDS, options=_EMPTY_FIELDS)
def test_empty_fields_that_nobody_knows_change_nothing(
    top: dict[str, Any], turn: dict[str, Any], part: dict[str, Any], options: dict[str, Any]
) -> None:
    def body(top: dict[str, Any], turn: dict[str, Any], part: dict[str, Any], options: dict[str, Any]) -> bytes:
        parts = [{"type": "text", "text": "x"} | part]
        turns = [TURN | turn, {"role": "assistant", "content": parts} | turn]
        bias = {"logit_bias": {"5": 1}, "stream": True, "stream_options": {"include_usage": True} | options}
        return msgspec.json.encode({"messages": turns} | bias | top)

    assert decode_dialect(body(top, turn, part, options), ChatRequest) == decode_dialect(
        body({}, {}, {}, {}), ChatRequest
    )


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
@given(name=_NAMES, value=st.one_of(st.booleans(), st.integers(0, 9), st.just("x"), st.just([None]), st.just({"a": 0})))
def test_fields_that_ask_for_something_are_refused(name: str, value: object) -> None:
    for body, path in (
        ({"messages": [TURN], name: value}, name),
        ({"messages": [TURN, TURN | {name: value, "annotations": None}]}, f"messages[1].{name}"),
    ):
        with pytest.raises(UnknownField) as caught:
            decode_dialect(msgspec.json.encode(body), ChatRequest)
        assert caught.value.field == path[:200]


@pytest.mark.parametrize("tail", [b"{", b"NaN}", b'"\xff"}', b"[" * 5000])
def test_a_body_that_breaks_off_behind_an_unknown_field(tail: bytes) -> None:
    with pytest.raises(CoserveError):
        decode_dialect(b'{"annotations": null, "messages": ' + tail, ChatRequest)


async def test_what_was_answered_can_be_sent_back(client: AsyncOpenAI, api: Api) -> None:
    messages: list[Any] = [TURN]
    for form in (lambda message: message, lambda message: message.model_dump(), lambda message: message.to_dict()):
        done = await client.chat.completions.create(model="fake", messages=messages)
        messages.append(form(done.choices[0].message))
        messages.append(TURN)
    done = await client.chat.completions.create(model="fake", messages=messages)
    assert done.choices[0].message.content == REPLY
    dumped = messages[3]
    assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= dumped.keys()


ANSWERED: dict[str, dict[str, Any]] = {
    "openai": {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    "litellm": {
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None, "reasoning_content": None},
        "images": [],
        "thinking_blocks": None,
    },
    "langchain": {"name": None, "tool_calls": [], "refusal": None, "additional_kwargs": {}, "response_metadata": {}},
    "vllm": {"reasoning": None, "reasoning_content": None, "tool_calls": [], "refusal": "", "name": ""},
    "huggingface": {"tool_call_id": None, "tool_calls": None, "reasoning": ""},
    "agents": {"cache_control": {"type": "ephemeral"}},
    "agents, in a part": {"content": [{"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}}]},
}


async def test_turns_as_sdks_send_them_back(api: Api) -> None:
    plain = [TURN, {"role": "assistant", "content": "yes"}, TURN]
    _, answer = await api.call("POST", "/v1/chat/completions", json={"messages": plain})
    count = answer["usage"]["prompt_tokens"]
    for sdk, extra in ANSWERED.items():
        messages = [TURN | {"name": None}, {"role": "assistant", "content": "yes"} | extra, TURN]
        status, answer = await api.call("POST", "/v1/chat/completions", json={"messages": messages})
        assert status == 200 and answer["usage"]["prompt_tokens"] == count, (sdk, answer)
        status, answer = await api.call("POST", "/tokenize", json={"messages": messages, "model": "", "x": None})
        assert (status, answer.get("count")) == (200, count), sdk


async def test_turns_that_ask_for_something(client: AsyncOpenAI) -> None:
    asking: list[tuple[dict[str, Any], str]] = [
        ({"provider_specific_fields": {"refusal": "no"}}, "provider_specific_fields"),
        ({"function_call": {"name": "f", "arguments": ""}}, "function_call"),
        ({"audio": {"id": "x"}}, "audio"),
        ({"refusal": "no"}, "refusal"),
    ]
    for extra, name in asking:
        turn: Any = {"role": "assistant", "content": "yes"} | extra
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=[TURN, turn])  # type: ignore[list-item]
        assert (caught.value.param, caught.value.code) == (f"messages[1].{name}", "invalid_request")
        assert f"{name} is not supported" in str(caught.value)


SAYS_NOTHING: dict[str, list[Any]] = {
    "stream_options": [None, {}, {"include_usage": False}],
    "response_format": [None, {}, {"type": "text"}],
    "metadata": [None, {}, {"a": "b"}],
    "store": [None, False],
    "service_tier": [None, "auto", "default"],
    "user": [None, "", "me"],
    "reasoning_effort": [None, "none"],
    "prompt_cache_options": [None, {"mode": "explicit"}],
    "model": [None, "", "fake"],
    # vLLM's own, with the defaults that it documents
    "best_of": [None, 1],
    "use_beam_search": [None, False],
    "top_k": [None, 0, -1],
    "min_p": [None, 0.0],
    "repetition_penalty": [None, 1.0],
    "length_penalty": [None, 1.0],
    "stop_token_ids": [None, []],
    "bad_words": [None, []],
    "min_tokens": [None, 0],
    "skip_special_tokens": [None, True],
    "spaces_between_special_tokens": [None, True],
    "include_reasoning": [None, True],
    "priority": [None, 0],
    "structured_outputs": [None, {}],
    "logits_processors": [None, []],
    "cache_salt": [None, ""],
    "vllm_xargs": [None, {}],
    "request_id": [None, ""],
}
IN_CHATS: dict[str, list[Any]] = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True, False],
    "functions": [None, []],
    "function_call": [None, "none", "auto"],
    "add_special_tokens": [None, False],
    "add_generation_prompt": [None, True],
    "continue_final_message": [None, False],
    "echo": [None, False],
    "documents": [None, []],
    "chat_template_kwargs": [None, {}],
    "modalities": [None, ["text"]],
    "verbosity": [None, "medium", "low"],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
}
IN_TEXTS: dict[str, list[Any]] = {
    "add_special_tokens": [None, True, False],
    "suffix": [None, ""],
    "echo": [None, False],
}


async def test_every_field_may_say_its_default(api: Api) -> None:
    for path, body, own in (
        ("/v1/chat/completions", {"messages": [TURN]}, IN_CHATS),
        ("/v1/completions", {"prompt": "x"}, IN_TEXTS),
    ):
        values = SAYS_NOTHING | own
        for place in range(max(map(len, values.values()))):
            said = {name: choices[min(place, len(choices) - 1)] for name, choices in values.items()}
            status, answer = await api.call("POST", path, json=body | said)
            assert status == 200, (path, place, answer)


@pytest.mark.parametrize("options", [{}, {"search_context_size": "low"}])
async def test_a_web_search_is_asked_for_even_without_options(client: AsyncOpenAI, options: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="web_search_options is not supported") as caught:
        await client.chat.completions.create(model="fake", messages=[TURN], web_search_options=options)  # type: ignore[list-item]
    assert caught.value.param == "web_search_options"


@pytest.mark.parametrize("name", ["id", "thinking", "other"])
def test_nulls_of_other_kinds_of_blocks_ask_for_nothing(name: str) -> None:
    """In a list of blocks each of which may be of any kind."""
    block = {"type": "text", "text": "x"}
    whole = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    given = whole | {"messages": [{"role": "user", "content": [block | {name: None}]}]}
    plain, got = (decode_dialect(msgspec.json.encode(one), MessagesRequest) for one in (whole, given))
    assert got == plain
