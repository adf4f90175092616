"""Further clients, as they are, against the API over a fake engine. `docs/guide/clients.md` lists all."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
import pytest_asyncio

from tests.support.api_server import REPLY, Api, serve_api, with_template
from tests.support.chat_templates import QWEN3
from tests.support.examples import on_days

ROOT = Path(__file__).parents[2]
CHAT: Any = [{"role": "user", "content": "Rain in Rome?"}]
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: str
    days: int


ASKED = Weather(city="Rome", days=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with serve_api(tmp_path_factory.mktemp("clients"), tokens=with_template(QWEN3), context=4096) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    reply = server.reply
    yield server
    server.reply = reply


def url_of(api: Api) -> str:
    return f"{api.url}/v1"


@on_days(0)
@pytest.mark.asyncio(loop_scope="module")
async def test_langchain(api: Api) -> None:
    langchain = pytest.importorskip("langchain_openai")
    async with httpx.AsyncClient() as http:
        await use_langchain(langchain, api, http)


async def use_langchain(langchain: Any, api: Api, http: httpx.AsyncClient) -> None:
    settings: Any = {"model": "fake", "base_url": url_of(api), "api_key": "none", "http_async_client": http}
    chat = langchain.ChatOpenAI(**settings)
    assert (await chat.ainvoke("hi")).content == REPLY
    assert "".join([chunk.content async for chunk in chat.astream("hi")]) == REPLY
    assert await langchain.OpenAI(**settings).ainvoke("hi") == REPLY
    api.says(CALL)
    (call,) = (await chat.bind_tools([Weather]).ainvoke("Rain?")).tool_calls
    assert (call["name"], call["args"]) == ("Weather", ASKED.model_dump())
    pieces = [chunk async for chunk in chat.bind_tools([Weather]).astream("Rain?")]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == ASKED.model_dump()
    api.says(ASKED.model_dump_json())
    assert await chat.with_structured_output(Weather, method="json_schema").ainvoke("Rain?") == ASKED
    responses = langchain.ChatOpenAI(**settings, use_responses_api=True, reasoning_effort="low")
    assert await responses.with_structured_output(Weather, method="json_schema").ainvoke("Rain?") == ASKED
    api.says(CALL)
    called = await responses.bind_tools([Weather]).ainvoke("Rain?")
    assert called.tool_calls[0]["args"] == ASKED.model_dump()
    api.says("Dry.")
    turns = [("user", "Rain?"), called, {"role": "tool", "content": "dry", "tool_call_id": called.tool_calls[0]["id"]}]
    assert (await responses.ainvoke(turns)).text == "Dry."


@pytest.mark.asyncio(loop_scope="module")
async def test_instructor(api: Api) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=url_of(api), api_key="none", max_retries=0) as client:
        for mode, text in (
            (instructor.Mode.TOOLS, json.dumps({"name": "Weather", "arguments": ASKED.model_dump()})),
            (
                instructor.Mode.RESPONSES_TOOLS,
                json.dumps({"name": "Weather", "arguments": ASKED.model_dump()}),
            ),
            (instructor.Mode.JSON_SCHEMA, ASKED.model_dump_json()),
            (instructor.Mode.JSON, ASKED.model_dump_json()),
        ):
            api.says(text)
            asking = instructor.from_openai(client, mode=mode).chat.completions
            found = await asking.create(model="fake", response_model=Weather, messages=CHAT, max_retries=0)
            assert found.model_dump() == ASKED.model_dump(), mode


LITELLM = """
import asyncio, json, sys
import litellm

async def main(url, messages, tools):
    settings = {"api_base": url, "api_key": "none", "max_retries": 0}
    found = []
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": provider + "/fake", "messages": messages} | settings
        found.append((await litellm.acompletion(**asked)).choices[0].message.content)
        stream = await litellm.acompletion(stream=True, **asked)
        found.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
    text = await litellm.atext_completion(model="text-completion-openai/fake", prompt="hi", max_tokens=99, **settings)
    (call,) = (await litellm.acompletion(tools=tools, **asked)).choices[0].message.tool_calls
    print(json.dumps([*found, text.choices[0].text, json.loads(call.function.arguments)]))

asyncio.run(main(*map(json.loads, sys.argv[1:])))
"""


@on_days(1)
@pytest.mark.asyncio(loop_scope="module")
async def test_litellm(api: Api) -> None:
    """In a process of its own, for it leaves connections open, and warns when it is imported."""
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    api.says(CALL)
    tools = [{"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}]
    arguments = map(json.dumps, (url_of(api), CHAT, tools))
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would ask its own server for prices
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LITELLM, *arguments, env=env, stdout=PIPE, stderr=PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert json.loads(output.splitlines()[-1]) == [*[CALL] * 5, ASKED.model_dump()]


OLD_OPENAI = """
import json, sys, time
import openai

assert openai.__version__.startswith("1."), openai.__version__
url, messages, tools, schema, rows = map(json.loads, sys.argv[1:])
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
asked = {"model": "fake", "messages": messages}
told = [client.chat.completions.create(**asked).choices[0].message.content]
stream = client.chat.completions.create(stream=True, **asked)
told.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
told.append(client.completions.create(model="fake", prompt="hi", max_tokens=99).choices[0].text)
told.append(client.responses.create(model="fake", input="hi").output_text)
format = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
told.append(client.chat.completions.create(response_format=format, **asked).choices[0].message.content)
(call,) = client.chat.completions.create(tools=tools, **asked).choices[0].message.tool_calls
assert [model.id for model in client.models.list()] == ["fake"]
try:
    client.chat.completions.create(model="fake", messages=messages, temperature=-1)
except openai.BadRequestError as error:
    assert error.param == "temperature", error
file = client.files.create(file=("rows.jsonl", rows.encode()), purpose="fine-tune")
job = client.fine_tuning.jobs.create(model="fake", training_file=file.id, suffix="old")
assert client.fine_tuning.jobs.retrieve(job.id).training_file == file.id
assert job.id in [one.id for one in client.fine_tuning.jobs.list()]
line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
file = client.files.create(file=("batch.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while (batch := client.batches.retrieve(batch.id)).status != "completed":
    time.sleep(0.05)
answered = json.loads(client.files.content(batch.output_file_id).text)
told.append(answered["response"]["body"]["choices"][0]["message"]["content"])
print(json.dumps([told, call.function.name, json.loads(call.function.arguments)]))
"""
OLD_SITE = Path(sys.prefix) / "openai1"
"""`make test-all` installs the older client there, beside the one that other tests use."""


@on_days(3)
@pytest.mark.asyncio(loop_scope="module")
async def test_openai_of_version_1(api: Api) -> None:
    if not OLD_SITE.exists():
        pytest.skip("openai 1.x is not installed")
    api.says(CALL)
    tools = [{"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}]
    rows = "\n".join([json.dumps({"messages": [*CHAT, {"role": "assistant", "content": "No."}]})] * 10)
    arguments = map(json.dumps, (url_of(api), CHAT, tools, Weather.model_json_schema(), rows))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OLD_OPENAI, *arguments),
        env=os.environ | {"PYTHONPATH": str(OLD_SITE)},
        stdout=PIPE,
        stderr=PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    told, name, called = json.loads(output.splitlines()[-1])
    assert set(told) == {CALL} and (name, called) == ("Weather", ASKED.model_dump())


@on_days(5)
@pytest.mark.asyncio(loop_scope="module")
async def test_guidellm(api: Api, tmp_path: Path) -> None:
    pytest.importorskip("guidellm")
    options = {
        "--backend": f"kind=openai_http,target={api.url}",
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=3",
        "--tokenizer": f"kind=hf_auto,model={ROOT / 'coserve' / 'assets' / 'tiny'}",
        "--data": "kind=synthetic_text,prompt_tokens=8,output_tokens=8",
        "--output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [sys.executable, "-m", "guidellm", "run", *(part for pair in options.items() for part in pair)]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--disable-console",
        env=os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        stderr=PIPE,
        cwd=tmp_path,
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (3, 0)
    assert {one["output_tokens"] for one in requests["successful"]} == {len(api.reply)}


def test_every_row_of_the_table_has_its_test() -> None:
    rows = re.findall(r"\| \[?`(tests/[\w/.]+)(?:::(\w+))?`", (ROOT / "docs/guide/clients.md").read_text("utf-8"))
    assert len(rows) > 8
    for path, name in rows:
        assert f"def {name}" in (ROOT / path).read_text("utf-8"), (path, name)
