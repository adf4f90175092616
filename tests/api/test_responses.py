"""`/v1/responses` by the real `openai` client, whole and streamed, back again as input, and continued."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coserve.api.openai.responses.answers import response
from coserve.api.openai.responses.schemas import ResponseRequest
from coserve.api.openai.schemas import ChatAnswer, ChatChoice, ChatCompletion, ChatFinish
from coserve.core.schemas.generation import Usage
from tests.support.api_server import Api, serve_api, tokenizer, with_template
from tests.support.chat_templates import GPT_OSS, QWEN3

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.responses import Response

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
THOUGHT, CALLED = "<think>\nHm.\n</think>\n\nYes.", f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=1024) as api:
        yield api


def shapes(answer: Response) -> list[Any]:
    """The items without their ids."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in answer.output]


async def streamed(client: AsyncOpenAI, **asked: Any) -> Response:
    """The same answer as a stream: its texts are the sum of their deltas."""
    texts: dict[str, str] = {}
    numbers, final = [], None
    async with await client.responses.create(**asked, stream=True) as stream:
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            elif event.type == "response.output_text.done":
                assert event.text == texts[event.item_id]
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == texts[event.item_id]
            elif event.type in ("response.incomplete", "response.completed"):
                final = event.response
    assert numbers == list(range(len(numbers)))
    assert final is not None
    found: Response = final
    return found


@pytest.mark.parametrize("reply", ["Just a text.", THOUGHT, CALL, CALLED], ids=["text", "thought", "call", "all"])
async def test_a_stream_is_the_whole_answer(api: Api, client: AsyncOpenAI, reply: str) -> None:
    api.reply = tokenizer().encode(reply, add_special=False)
    asked: dict[str, Any] = {"model": "fake", "input": "Rain?", "tools": [WEATHER], "max_output_tokens": 200}
    whole = await client.responses.create(**asked)
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(api.reply)
    kinds = {
        THOUGHT: ["reasoning", "message"],
        CALL: ["function_call"],
        CALLED: ["reasoning", "message", "function_call", "function_call"],
    }
    assert [item.type for item in whole.output] == kinds.get(reply, ["message"])
    stream = await streamed(client, **asked)
    assert (shapes(stream), stream.status, stream.usage) == (shapes(whole), whole.status, whole.usage)
    assert (await api.last_request()).sampling.max_tokens == 200


async def test_what_was_answered_is_sent_back(api: Api, client: AsyncOpenAI) -> None:
    api.reply = tokenizer().encode(CALLED, add_special=False)
    first = await client.responses.create(model="fake", input="Rain?", tools=[WEATHER])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}, *first.output, *outputs]
    await client.responses.create(model="fake", input=items, instructions="Be kind.", tools=[WEATHER])
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [called | {"id": call.call_id} for call in calls],
        },
        *({"role": "tool", "content": "dry", "tool_call_id": call.call_id} for call in calls),
    ]
    function = {"type": "function", "function": {name: WEATHER[name] for name in WEATHER if name != "type"}}
    expected = with_template(QWEN3).chat(chat, tools=[function])
    assert await api.last_prompt() == tokenizer().decode(expected, skip_special=False)


ENDS = [("stop", "completed"), ("tool_calls", "completed"), ("length", "incomplete")]


@pytest.mark.parametrize(("finish", "status"), ENDS)
def test_how_an_answer_ended(finish: ChatFinish, status: str) -> None:
    choice = ChatChoice(index=0, message=ChatAnswer(content="x"), finish_reason=finish)
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    chat = ChatCompletion(id="c", created=1, model="m", system_fingerprint="f", choices=[choice], usage=usage)
    answer = response(ResponseRequest(input="x"), chat)
    assert (answer.status, [item.status for item in answer.output]) == (status, [status])


async def test_formats_cuts_and_logprobs(api: Api, client: AsyncOpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}}}
    asked: Any = {"model": "fake", "input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}, "store": True}
    cut = await client.responses.create(**asked, text=text, extra_body={"client_metadata": {"session_id": "a"}})
    assert (cut.status, cut.metadata, cut.store) == ("incomplete", {"a": "b"}, True)
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    assert (await api.last_request()).grammar is not None
    scored = await client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=1)
    (message,) = scored.output
    assert message.type == "message" and message.content[0].type == "output_text"
    assert message.content[0].logprobs
    assert len(message.content[0].logprobs) == 2


async def test_what_is_not_supported_is_refused_by_name(client: AsyncOpenAI) -> None:
    for asked, param in (
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": "word " * 2000}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**({"model": "fake", "input": "x"} | asked))  # type: ignore[call-overload]
        assert caught.value.param == param, caught.value


@pytest.mark.parametrize("exchanges", [1, 3, 5, 9])
async def test_truncation_leaves_out_the_oldest_exchanges(api: Api, client: AsyncOpenAI, exchanges: int) -> None:
    """As many as must be; `instructions` stay."""
    talk: Any = []
    for number in range(exchanges):
        talk += [{"role": "user", "content": f"{number}? " + "word " * 250}, {"role": "assistant", "content": "Yes."}]
    talk.append({"role": "user", "content": "And now?"})
    asked: Any = {"model": "fake", "input": talk, "instructions": "Be kind.", "max_output_tokens": 2}
    system = [{"role": "system", "content": "Be kind."}]
    chats = [with_template(QWEN3).chat([*system, *talk[2 * left :]]) for left in range(exchanges + 1)]
    left = next(left for left, chat in enumerate(chats) if len(chat) < 1024)
    assert (left > 0) is (exchanges > 3), "some cases need it"
    answer = await client.responses.create(**asked, truncation="auto")
    assert answer.truncation == "auto"
    assert (await api.last_request()).prompt == tuple(chats[left])
    await streamed(client, **asked, truncation="auto")
    assert (await api.last_request()).prompt == tuple(chats[left])
    if left:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.responses.create(**asked)


async def test_truncation_within_an_exchange_keeps_calls_with_their_outputs(api: Api, client: AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": "Rain?"}]
    for number in range(9):
        call = {"call_id": f"call_{number}", "name": "weather", "arguments": f'{{"city": "{number}"}}'}
        output = {"type": "function_call_output", "call_id": f"call_{number}", "output": "dry " * 150}
        items += [{"type": "function_call", **call}, output]
    asked: Any = {"model": "fake", "input": items, "max_output_tokens": 2, "truncation": "auto"}
    await client.responses.create(**asked)
    sent = await api.last_prompt()
    assert "Rain?" not in sent and sent.startswith("<|im_start|>assistant")
    assert sent.count("<tool_call>") == sent.count("<tool_response>") > 1
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(**asked | {"input": "word " * 2000})


async def test_truncation_leaves_out_whole_exchanges_if_the_template_refuses_parts_of_one(
    api: Api, tmp_path: Path
) -> None:
    """As Qwen 3.5's does, without a question."""
    template = "{% if not messages | selectattr('role', 'eq', 'user') | list %}{{ raise_exception('') }}{% endif %}"
    called = []
    for number in range(9):
        call = {"call_id": f"call_{number}", "name": "weather", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": f"call_{number}", "output": "dry"}
        called += [{"type": "function_call", **call}, output]
    talk = [{"role": "user", "content": "old " * 900}, {"role": "user", "content": "Rain?"}, *called]
    asked = {"input": talk, "max_output_tokens": 2, "truncation": "auto"}
    async with serve_api(tmp_path / "asked", tokens=with_template(template + QWEN3), context=1024) as strict:
        await strict.answered(200, "POST", "/v1/responses", json=asked)
        sent = await strict.last_prompt()
        assert "old" not in sent and "Rain?" in sent and sent.count("<tool_response>") == 9
        talk[1]["content"] = "Rain? " * 900
        await strict.error(400, "context_length_exceeded", "POST", "/v1/responses", json=asked)


async def test_truncation_keeps_a_call_whose_output_comes_after_a_question(api: Api) -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"} for name in ("a", "b")]
    outputs = [{"type": "function_call_output", "call_id": name, "output": "dry"} for name in ("a", "b")]
    old = {"role": "user", "content": "old " * 900}
    talk = [old, *calls, outputs[0], {"role": "user", "content": "Hurry."}, outputs[1]]
    asked = {"input": talk, "max_output_tokens": 2, "truncation": "auto"}
    assert (await api.call("POST", "/v1/responses", json=asked))[0] == 200
    sent = await api.last_prompt()
    assert "old" not in sent and sent.count("<tool_call>") == sent.count("<tool_response>") == 2


async def test_the_effort_reaches_a_template_that_reads_it(api: Api, tmp_path: Path) -> None:
    asked = {"input": "x", "reasoning": {"effort": "high", "summary": "auto"}}
    assert (await api.call("POST", "/v1/responses", json=asked))[0] == 200  # Qwen 3's template reads none
    async with serve_api(tmp_path / "harmony", tokens=with_template(GPT_OSS), context=1024) as harmony:
        assert (await harmony.call("POST", "/v1/responses", json=asked))[0] == 200
        assert "Reasoning: high" in await harmony.last_prompt()


async def test_fields_of_vllm_reach_the_chat(api: Api) -> None:
    chat = {"chat_template_kwargs": {"enable_thinking": False}, "stop": "four", "cache_salt": "mine"}
    for asked in (chat, {"reasoning": {"effort": "none"}}):
        assert (await api.call("POST", "/v1/responses", json={"input": "x"} | asked))[0] == 200
        assert (await api.last_prompt()).endswith("<think>\n\n</think>\n\n")
    _, answer = await api.call("POST", "/v1/responses", json={"input": "x"} | chat)
    assert "four" not in answer["output"][-1]["content"][0]["text"]
    forced = {"input": "x", "structured_outputs": {"choice": ["one"]}}
    await api.call("POST", "/v1/responses", json=forced)
    assert (await api.last_request()).grammar is not None
    items = [{"role": "assistant", "content": "x", "phase": "commentary"}, {"role": "user", "content": "x"}]
    assert (await api.call("POST", "/v1/responses", json={"input": items, "max_tool_calls": 3}))[0] == 200


async def test_errors_name_the_fields_that_were_given(api: Api) -> None:
    for asked, param, said in (
        ({"max_tokens": 4}, "max_tokens", "did you mean 'max_output_tokens'"),
        ({"messages": [{"role": "user"}]}, "messages", "did you mean 'input'"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens: expected at most the context"),
    ):
        status, answer = await api.call("POST", "/v1/responses", json={"input": "x"} | asked)
        assert (status, answer["error"]["param"]) == (400, param) and said in answer["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for asked, said in (
        ({"adapter": "poet"}, "unknown field 'adapter'; did you mean 'model'?"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens: expected at most the context"),
    ):
        status, answer = await api.call("POST", "/v1/chat/completions", json=chat | asked)
        assert status == 400 and answer["error"]["message"].startswith(said)


async def test_a_stream_that_fails_says_so(api: Api, client: AsyncOpenAI) -> None:
    async with await client.responses.create(model="fake", input="x", stream=True, max_output_tokens=500) as stream:
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                await api.engine.die()
            if event.type == "response.failed":
                assert event.response.error is not None
                failed = await client.responses.retrieve(event.response.id)
                assert (failed.status, failed.error) == ("failed", event.response.error)
    assert kinds[-1] == "response.failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_a_stored_response(api: Api, client: AsyncOpenAI, stream: bool) -> None:
    """Its prompt is that of all items sent again; `instructions` are those of the request alone."""

    async def ask(**asked: Any) -> Response:
        asked |= {"model": "fake", "tools": [WEATHER]}
        found: Response = await (streamed(client, **asked) if stream else client.responses.create(**asked))
        assert await client.responses.retrieve(found.id) == found
        return found

    api.reply = tokenizer().encode(CALLED, add_special=False)
    first = await ask(input="Rain?", instructions="Be kind.")
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls]
    api.reply = tokenizer().encode("It is dry.", add_special=False)
    second = await ask(input=outputs, previous_response_id=first.id)
    third = await ask(input="And now?", previous_response_id=second.id, instructions="Be brief.")
    continued = await api.last_prompt()
    assert (third.previous_response_id, third.instructions) == (second.id, "Be brief.")
    user: Any = [{"role": "user", "content": text} for text in ("Rain?", "And now?")]
    items: Any = [user[0], *first.output, *outputs, *second.output, user[1]]
    asked: Any = {"model": "fake", "input": items, "instructions": "Be brief.", "tools": [WEATHER]}
    await client.responses.create(**asked, store=False)
    assert await api.last_prompt() == continued
    listed = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
    kinds = ["message", "reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2, "message"]
    assert [item.type for item in listed] == [*kinds, "message"]
    assert [item.id for item in listed[1:5]] == [item.id for item in first.output]
    newest = await client.responses.input_items.list(third.id, limit=1)
    assert (newest.data, newest.has_more) == (listed[-1:], True)
    assert newest.data[0].content[0].to_dict() == {"type": "input_text", "text": "And now?"}  # type: ignore[union-attr]
    await client.responses.delete(first.id)
    await client.responses.create(model="fake", input="x", previous_response_id=second.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_stored_responses_are_sent_as_references(api: Api, client: AsyncOpenAI, stream: bool) -> None:
    """As Vercel's AI SDK sends them; the prompt is that of the items themselves."""
    api.reply = tokenizer().encode(CALLED, add_special=False)
    tools: Any = {"model": "fake", "tools": [WEATHER]}
    first = await client.responses.create(**tools, input="Rain?")
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls]
    question: Any = {"role": "user", "content": "Rain?"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    asked: Any = tools | {"input": [question, *references, *outputs]}
    second = await (streamed(client, **asked) if stream else client.responses.create(**asked))
    referred = await api.last_prompt()
    await client.responses.create(**tools, input=[question, *first.output, *outputs], store=False)
    assert await api.last_prompt() == referred
    await client.responses.delete(first.id)
    listed = [item.id async for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed[1:-2] == [item.id for item in first.output]
    again = await client.responses.create(**tools, input=[{"type": "item_reference", "id": listed[1]}, question])
    await client.responses.delete(second.id)
    await client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError, match="no item") as caught:
        await client.responses.create(**asked)
    assert caught.value.param == "input[1].id"


async def test_tokens_of_a_prompt_are_counted_before_it_is_answered(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "fake", "tools": [WEATHER], "instructions": "Be kind."}
    first = await client.responses.create(**asked, input="Rain?")
    assert first.usage is not None
    counted = await client.responses.input_tokens.count(**asked, input="Rain?")
    assert (counted.input_tokens, counted.object) == (first.usage.input_tokens, "response.input_tokens")
    second = await client.responses.create(**asked, input="And now?", previous_response_id=first.id)
    counted = await client.responses.input_tokens.count(**asked, input="And now?", previous_response_id=first.id)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens
    long = (await client.responses.input_tokens.count(model="fake", input="word " * 2000)).input_tokens
    assert long > 2000, "more than the context"
    short = await client.responses.input_tokens.count(model="fake", input="word " * 2000, truncation="auto")
    assert short.input_tokens == long, "one message cannot be left out"
    with pytest.raises(openai.NotFoundError, match="no response"):
        await client.responses.input_tokens.count(model="fake", input="x", previous_response_id="resp_1")


async def test_responses_that_are_not_stored(client: AsyncOpenAI) -> None:
    kept = await client.responses.create(model="fake", input="x")
    left = await client.responses.create(model="fake", input="x", store=False)
    assert (kept.store, left.store) == (True, False)
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        await client.responses.retrieve(kept.id, stream=True)
    await client.responses.delete(kept.id)
    for id in (kept.id, left.id, "resp_1"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await call(id)
        with pytest.raises(openai.NotFoundError, match="no response") as caught:
            await client.responses.create(model="fake", input="x", previous_response_id=id)
        assert caught.value.param == "previous_response_id"


async def test_a_conversation_has_at_most_as_many_items_as_one_input(client: AsyncOpenAI) -> None:
    talk: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 1500
    first = await client.responses.create(model="fake", input=talk, truncation="auto")
    with pytest.raises(openai.BadRequestError, match="4096 items"):
        await client.responses.create(model="fake", input=talk, truncation="auto", previous_response_id=first.id)
    calls: Any = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 1025
    with pytest.raises(openai.BadRequestError, match=r"input\[1024\]: expected at most 1024 calls in a row"):
        await client.responses.create(model="fake", input=calls)
