"""A chat has one form: requests of each API and rows of each format render the same text. Whatever a base's template
does, the API answers, with a typed error, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coserve.core.errors import InvalidRequest
from tests.support.api_server import Api, form, serve_api, with_template
from tests.support.chat_templates import PHI_3, QWEN3
from tests.support.examples import on_days

TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {"maximum": 10**30, "default": None}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Köln"}}}
PLAIN = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain?\nSun?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "c1", "name": "sky"},
]
AS_SENT = [
    {"role": "developer", "content": "Be kind.", "tool_calls": None},
    {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Sun?"}], "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "sky", "arguments": '{"city": "Köln"}'}}],
    },
    PLAIN[3] | {"weight": None},
]
"""The same with OpenAI's content parts, arguments as text, and fields that are null."""
ANSWER = {"role": "assistant", "content": "No."}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "root").mkdir()
    async with serve_api(folder / "data", tokens=with_template(QWEN3), context=1024, data_root=folder / "root") as api:
        yield api


@pytest.mark.parametrize("arguments", ['{"city": "Kö', "[1]", "no JSON"])
async def test_arguments_that_a_model_wrote_wrong_are_shown_to_it(api: Api, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": arguments}}
    chat = {"messages": [PLAIN[1], {"role": "assistant", "tool_calls": [call]}, PLAIN[3]], "tools": TOOLS}
    assert json.dumps(arguments, ensure_ascii=False) in await prompt_of(api, "/v1/chat/completions", chat)


async def test_a_template_that_reads_each_argument_gets_wrong_ones_as_one(tmp_path: Path) -> None:
    """Qwen3-Coder's, Qwen3.5's and GLM's refuse a text."""
    each = "{% for name, value in call.function.arguments|items %}<{{ name }}>{{ value }}{% endfor %}"
    template = QWEN3.replace("{{ call.function.arguments | tojson }}", each)
    call = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Kö'}}
    chat = {"messages": [PLAIN[1], {"role": "assistant", "tool_calls": [CALL, call]}, PLAIN[3]]}
    async with serve_api(tmp_path, tokens=with_template(template), context=1024) as reads:
        text = await prompt_of(reads, "/v1/chat/completions", chat)
        assert "<city>Köln" in text and '<arguments>{"city": "Kö' in text
        refused = await reads.answered(
            400, "POST", "/v1/chat/completions", json={"messages": [PLAIN[2] | {"role": "user"}]}
        )
        assert refused["error"]["param"] == "messages[0].tool_calls"


async def test_documents_are_shown_by_a_template_that_reads_them(api: Api, tmp_path: Path) -> None:
    asked = {"messages": [PLAIN[1]], "documents": [{"title": "Sky", "text": "It is dry."}]}
    refused = await api.answered(400, "POST", "/v1/chat/completions", json=asked)
    assert refused["error"]["param"] == "documents"
    template = "{% for one in documents or [] %}[{{ one.title }}: {{ one.text }}]{% endfor %}" + QWEN3
    async with serve_api(tmp_path / "read", tokens=with_template(template), context=1024) as reads:
        whole = await prompt_of(reads, "/v1/chat/completions", asked)
        option = {"messages": [PLAIN[1]], "chat_template_kwargs": {"documents": asked["documents"]}}
        assert whole.startswith("[Sky: It is dry.]") and whole == await prompt_of(reads, "/tokenize", option)
        assert not (await prompt_of(reads, "/v1/chat/completions", {"messages": [PLAIN[1]]})).startswith("[")


async def prompt_of(api: Api, path: str, body: dict[str, Any]) -> str:
    """The text of the prompt that the engine got."""
    answer = await api.answered(200, "POST", path, json=body)
    ids = answer["tokens"] if path == "/tokenize" else (await api.last_request()).prompt
    return with_template(None).decode(ids, skip_special=False)


async def rows_of(api: Api, row: dict[str, Any], *, arrow: bool = True) -> tuple[int, int]:
    """Tokens of a row, and those that are learned; the same whether it comes inline, as JSONL or as parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    if arrow:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), api.root / "rows.parquet")
    found = []
    for body in (
        {"json": {"adapter": "a", "data": [row | {"text": None}]}},
        {"data": form({"adapter": "sent"}, ("corpus", json.dumps(row | {"chosen": None}).encode()))},
        *([{"json": {"adapter": "b", "path": "rows.parquet"}}] if arrow else []),
    ):
        job = await api.answered(202, "POST", "/finetune", **body)
        found.append((job["tokens"], job["target_tokens"]))
    assert len(set(found)) == 1
    return found[0]


PATHS = ("/generate", "/v1/chat/completions", "/tokenize")


async def test_requests_render_tools_calls_and_parts(api: Api) -> None:
    expected = with_template(QWEN3).chat(PLAIN, tools=TOOLS)
    text = with_template(None).decode(expected, skip_special=False)
    assert "Köln" in text and "sky" in text and str(10**30) in text
    for messages in (PLAIN, AS_SENT):
        for path in PATHS:
            body = {"messages": messages, "tools": TOOLS} | ({} if path == "/tokenize" else {"max_tokens": 1})
            assert await prompt_of(api, path, body) == text, path


async def test_the_last_message_is_continued(api: Api) -> None:
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No, the"}]
    render = with_template(QWEN3).chat
    for options, ids in (
        ({"continue_final_message": True}, render(messages, continue_final=True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, render(messages, continue_final=True)),
        ({"add_generation_prompt": False}, render(messages, add_generation_prompt=False)),
    ):
        expected = with_template(None).decode(ids, skip_special=False)
        for path in PATHS:
            body = {"messages": messages} | options | ({} if path == "/tokenize" else {"max_tokens": 1})
            assert await prompt_of(api, path, body) == expected, (path, options)
    status, answer = await api.call("POST", "/generate", json={"prompt": "x", "continue_final_message": True})
    assert (status, answer["error"]["field"]) == (400, "continue_final_message")


async def test_what_no_process_can_pass_on_is_refused(api: Api) -> None:
    """Tools so deep that another process could not read them, and integers that MessagePack, which long requests take,
    does not have. `/tokenize` needs no other process: how deep it may be is Python's to say."""
    deep = b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": ' + b"[" * 985 + b"]" * 985 + b"}]}"
    number = json.dumps({"messages": [{"role": "user", "content": "x" * 70_000}], "tools": TOOLS}).encode()
    for path, body in product(PATHS, (deep, number)):
        status, answer = await api.call("POST", path, data=body, headers={"Content-Type": "application/json"})
        assert status in ((200, 400) if path == "/tokenize" else (400,)), answer


async def test_tools_are_rendered_whether_they_may_be_called_or_not(api: Api) -> None:
    text = with_template(None).decode(with_template(QWEN3).chat(PLAIN, tools=TOOLS), skip_special=False)
    for choice in ("none", "auto", None):
        body = {"messages": PLAIN, "tools": TOOLS, "tool_choice": choice}
        assert await prompt_of(api, "/v1/chat/completions", body) == text


async def test_rows_are_requests_with_their_answer(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "sky"}}]
    whole = with_template(QWEN3).encode_whole_chat([*PLAIN, ANSWER], tools)
    for messages, arrow in ((PLAIN, True), (AS_SENT, False)):  # a column has one type
        before = [one | {"weight": 0} if one["role"] == "assistant" else one for one in messages]
        tokens, learned = await rows_of(
            api, {"messages": [*before, ANSWER | {"weight": 1}], "tools": tools}, arrow=arrow
        )
        assert tokens == len(whole) and 0 < learned < tokens


async def test_reasoning_of_earlier_answers_and_of_rows(api: Api) -> None:
    """Templates that read it get it. A row that would lose it is refused."""
    thoughtful = {"role": "assistant", "content": "No.", "reasoning_content": "It is dry."}
    messages = [PLAIN[1], thoughtful, PLAIN[3]]
    for path in PATHS:
        assert "<think>\nIt is dry.\n</think>\n\nNo." in await prompt_of(api, path, {"messages": messages})
    status, answer = await api.call("POST", "/tokenize", json={"messages": [PLAIN[1] | {"reasoning_content": "x"}]})
    assert (status, answer["error"]["param"]) == (400, "messages[0].reasoning_content")
    chat = [PLAIN[1], thoughtful]
    tokens, learned = await rows_of(api, {"messages": chat}, arrow=False)
    assert tokens == len(with_template(QWEN3).encode_whole_chat(chat)) > learned
    for encode in (with_template(PHI_3).encode_whole_chat, with_template(PHI_3).encode_chat_for_training):
        with pytest.raises(InvalidRequest, match="leaves reasoning_content out"):
            encode(chat)


@pytest.mark.parametrize("path", PATHS)
async def test_variables_of_the_template(api: Api, path: str) -> None:
    body = {"messages": PLAIN[:2]}
    plain = await prompt_of(api, path, body)
    assert await prompt_of(api, path, body | {"chat_template_kwargs": {"enable_thinking": True}}) == plain
    without = await prompt_of(api, path, body | {"chat_template_kwargs": {"enable_thinking": False}})
    assert without == plain + "<think>\n\n</think>\n\n"
    assert await prompt_of(api, path, body | {"chat_template_kwargs": {"thinking": False}}) == plain
    await api.answered(400, "POST", path, json=body | {"chat_template_kwargs": {"thinking": True}})
    status, answer = await api.call("POST", path, json=body | {"chat_template_kwargs": {"enable_thinkin": False}})
    assert status == 400 and "got 'enable_thinkin'" in answer["error"]["message"], answer
    answer = await api.answered(400, "POST", path, json={"prompt": "x", "chat_template_kwargs": {"enable_thinking": 1}})


async def test_variables_of_the_template_in_rows(api: Api) -> None:
    row = {"messages": [*PLAIN[:2], ANSWER]}
    tokens, learned = await rows_of(api, row)
    assert await rows_of(api, row | {"chat_template_kwargs": {"enable_thinking": True}}) == (tokens, learned)
    less = await rows_of(api, row | {"chat_template_kwargs": {"enable_thinking": False}})
    assert less[0] == tokens and less[1] < learned
    assert await rows_of(api, {"prompt": row["messages"][:2], "completion": [ANSWER]}) == (tokens, learned)
    bad = {"adapter": "a", "data": [row, row | {"chat_template_kwargs": {"tokenize": True}}]}
    status, answer = await api.call("POST", "/finetune", json=bad)
    assert (status, answer["error"]["line"]) == (422, 2)
    assert "a variable that the base's chat template reads" in answer["error"]["message"]


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'half' %}{{ '%c' % 55296 }}"
    "{% elif m.content == 'say' %}{{ raise_exception('%c' % 55296) }}"
    "{% elif m.content == 'large' %}{{ '%999999999d' % 1 }}"
    "{% elif m.content == 'indent' %}{{ 'x' | indent(1000000000, true) }}"
    "{% elif m.content == 'separators' %}{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}"
    "{% elif m.content == 'long' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
ROUTES: dict[str, dict[str, Any]] = {"/generate": {}, "/v1/chat/completions": {"model": "fake"}, "/tokenize": {}}


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


async def check(api: Api, content: str, says: str) -> None:
    for path, fields in ROUTES.items():
        status, body = await api.call("POST", path, json=chat(content) | fields)
        assert status == 400 and says in body["error"]["message"], body
    row = {"messages": [*chat(content)["messages"], {"role": "assistant", "content": "b"}]}
    status, body = await api.call("POST", "/finetune", json={"adapter": "poet", "data": [row]})
    assert status in (400, 422) and says in body["error"]["message"], body
    status, body = await api.call("POST", "/tokenize", json=chat("plain"))
    assert (status, body["count"] > 0) == (200, True)


async def test_text_that_is_none_and_text_without_end(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data", tokens=with_template(TEMPLATE)) as api:
        await check(api, "half", "writes half of a surrogate pair")
        await check(api, "say", "refuses the messages: ?")
        for content in ("large", "indent", "separators"):
            await check(api, content, "exceeds its limits: 512 MiB of memory")


@on_days(4)
async def test_a_template_without_end_does_not_stop_other_requests(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data", tokens=with_template(TEMPLATE)) as api:
        endless = asyncio.create_task(api.call("POST", "/generate", json=chat("long")))
        await asyncio.sleep(0)
        await api.works()
        assert (await api.call("POST", "/generate", json=chat("plain")))[0] == 200
        assert not endless.done()
        status, body = await endless
        assert (status, body["error"]["field"]) == (400, "messages")
        assert "exceeds its limits: 5 s of processor time" in body["error"]["message"]
        assert (await api.call("POST", "/generate", json=chat("plain")))[0] == 200
