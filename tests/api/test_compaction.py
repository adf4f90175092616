"""`POST /v1/responses/compact`: a summary that the model writes replaces its own part of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.api_server import Api, serve_api, with_template
from tests.support.chat_templates import QWEN3

if TYPE_CHECKING:
    from openai import AsyncOpenAI

openai = pytest.importorskip("openai")

SUMMARY = "one two three"
TALK: Any = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Rain?"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "dry"},
    {"role": "assistant", "content": "No rain."},
]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=1024) as api:
        api.says(SUMMARY)
        yield api


async def test_a_summary_replaces_answers_and_calls(api: Api, client: AsyncOpenAI) -> None:
    short = await client.responses.compact(model="fake", input=TALK, extra_body={"tools": [], "temperature": 0})
    asked = await api.last_prompt()
    assert "No rain." in asked and "dry" in asked and asked.rstrip().endswith("<|im_start|>assistant")
    assert "Summarise this conversation" in asked
    assert short.object == "response.compaction" and short.usage.output_tokens > 0
    system, question, summary = short.output
    assert [system.to_dict(warnings=False)["role"], question.to_dict(warnings=False)["role"]] == ["developer", "user"]
    assert question.to_dict(warnings=False)["content"] == [{"type": "input_text", "text": "Rain?"}]
    assert summary.type == "compaction" and summary.encrypted_content == SUMMARY
    items: Any = [item.to_dict(warnings=False) for item in short.output]
    await client.responses.create(model="fake", input=[*items, {"role": "user", "content": "And snow?"}])
    continued = await api.last_prompt()
    assert f"<|im_start|>assistant\n{SUMMARY}" in continued and "No rain." not in continued and "Rain?" in continued
    again = await client.responses.compact(model="fake", input=items)
    assert [item.type for item in again.output] == ["message", "message", "compaction"]


async def test_a_stored_conversation_is_compacted_by_its_id(api: Api, client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="fake", input="Rain?")
    short = await client.responses.compact(model="fake", previous_response_id=first.id)
    assert [item.type for item in short.output] == ["message", "compaction"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(short.id)


async def test_a_question_without_an_answer_is_asked_once(api: Api, client: AsyncOpenAI) -> None:
    """Templates often refuse two messages of the user after one another."""
    await client.responses.compact(model="fake", input="Rain?")
    assert (await api.last_prompt()).count("<|im_start|>user") == 1


STRICT = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_templates_whose_roles_alternate_read_a_compaction(tmp_path: Path) -> None:
    """Gemma's and Mistral's refuse two messages of the user after one another, which it leaves."""
    async with serve_api(tmp_path, tokens=with_template(STRICT), context=1024) as api, api.openai() as client:
        api.says(SUMMARY)
        talk: Any = [{"role": "user", "content": "Rain?"}]
        for question in ("Snow?", "Wind?"):
            talk += [{"role": "assistant", "content": "No."}, {"role": "user", "content": question}]
        for _ in range(2):
            short = await client.responses.compact(model="fake", input=talk)
            items: Any = [item.to_dict(warnings=False) for item in short.output]
            await client.responses.create(model="fake", input=[*items, {"role": "user", "content": "Hail?"}])
            asked = await api.last_prompt()
            assert "<|im_start|>user\nRain?\n\nSnow?\n\nWind?<|im_end|>" in asked
            talk = items


async def test_log_probabilities_are_no_part_of_a_compaction(client: AsyncOpenAI) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    short = await client.responses.compact(model="fake", input=TALK, extra_body=wanted)
    assert short.output[-1].type == "compaction"


async def test_what_cannot_be_compacted_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at least one item"):
        await client.responses.compact(model="fake")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.compact(model="fake", input="word " * 2000)
    wrong: Any = [{"type": "compaction", "encrypted_content": None}, TALK[1]]
    with pytest.raises(openai.BadRequestError, match="text of a compaction"):
        await client.responses.create(model="fake", input=wrong)


async def test_a_summary_that_is_cut_is_no_compaction(client: AsyncOpenAI) -> None:
    """What it would replace would be lost."""
    with pytest.raises(openai.BadRequestError, match="room for a whole summary") as caught:
        await client.responses.compact(model="fake", input=TALK, extra_body={"max_output_tokens": 1})
    assert caught.value.body["param"] == "max_output_tokens"


async def test_a_model_that_writes_nothing_is_no_fault_of_the_limit(api: Api, client: AsyncOpenAI) -> None:
    api.reply = [0]
    with pytest.raises(openai.BadRequestError, match="the model wrote none") as caught:
        await client.responses.compact(model="fake", input=TALK)
    assert caught.value.body["param"] == "input"
