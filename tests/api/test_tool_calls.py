"""Tool calls and reasoning in answers: parsed by family, whole or streamed, and read by the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.answers.deltas import AnswerDelta
from coserve.api.answers.families import FAMILIES, tool_family
from coserve.api.answers.parser import AnswerFormat, AnswerParser
from coserve.api.answers.typed_arguments import typed
from coserve.core.link.generation import Generate
from tests.support.api_server import Api, serve_api, tokenizer, with_template
from tests.support.chat_templates import GPT_OSS, PHI_3, QWEN3, QWEN3_5
from tests.support.real_server import serve_real

if TYPE_CHECKING:
    from openai import AsyncOpenAI

openai = pytest.importorskip("openai")

WEATHER = '{"city": "Köln \\"}]</tool_call>[TOOL_CALLS]", "days": [1, {"a": null}]}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
LLAMA3 = f'{{"name": "weather", "parameters": {WEATHER}}}'
NEW_MISTRAL = f"[TOOL_CALLS]weather[ARGS]{WEATHER}"
QWEN = f"<tool_call>\n<function=weather>\n<parameter=city>\n{json.loads(WEATHER)['city']}\n</parameter>\n"
QWEN += '<parameter=days>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>'
GLM = f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{json.loads(WEATHER)['city']}</arg_value>\n"
GLM += '<arg_key>days</arg_key><arg_value>[1, {"a": null}]</arg_value>\n</tool_call>'
SEEK = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
SEEKS, SEEK_ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OLD_SEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{WEATHER}\n```<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}"
NEXT = "<|start|>assistant"
Call = tuple[str, str]
ONE, TWO = [("weather", WEATHER)], [("weather", WEATHER)] * 2
TYPED = [("weather", WEATHER.replace('"days": [1, {"a": null}]', '"days": [1,{"a":null}]'))]
SCHEMAS: Any = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}}
PARSED: tuple[tuple[str, str, str, list[Call]], ...] = (
    ("hermes", " Just text. \n", " Just text. \n", []),
    ("hermes", HERMES, "", ONE),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", "Let me see.", TWO),
    ("hermes", HERMES.removesuffix("</tool_call>") + HERMES, "", TWO),
    ("hermes", f"{HERMES}\nDone", "\nDone", ONE),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "id": 7, "x": [1]}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    *(
        ("hermes", text, text, [])
        for text in (
            "<tool_call>\n<b>\n</tool_call>",
            '<tool_call>{"name": "',
            "a < b <tool",
            '<tool_call>{"a": 1} ',
            "",
        )
    ),
    ("llama3", LLAMA3, "", ONE),
    ("llama3", f"<|python_tag|>{LLAMA3}; {LLAMA3}", "", TWO),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", f"Calling {LLAMA3}", f"Calling {LLAMA3}", []),
    ("llama3", f"{LLAMA3} and more", " and more", ONE),
    ("llama3", ' {"answer": [1]} ', ' {"answer": [1]} ', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}]', "", ONE),
    ("mistral", f"Hm. [TOOL_CALLS][{', '.join([LLAMA3] * 2)}]", "Hm.", TWO),
    ("mistral", NEW_MISTRAL * 2, "", TWO),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{WEATHER}", "", ONE),
    ("mistral", f"[TOOL_CALLS] weather{WEATHER} then", " then", ONE),
    ("qwen-xml", QWEN, "", TYPED),
    ("qwen-xml", f"Let me see.\n\n{QWEN}\n{QWEN}\n", "Let me see.", TYPED * 2),
    ("qwen-xml", QWEN.removesuffix("</tool_call>") + QWEN, "", TYPED * 2),
    ("qwen-xml", "<tool_call><function=f></function></tool_call> Done", " Done", [("f", "{}")]),
    ("qwen-xml", "<tool_call><function=f><parameter=a>\n\n x\n\n</parameter>", "", [("f", '{"a": "\\n x\\n"')]),
    *(
        ("qwen-xml", text, text, [])
        for text in ("<tool_call>\n<b>", "<tool_call>\n<function=f>\n{", "<tool_call><function=>", HERMES, QWEN[:40])
    ),
    ("glm", GLM, "", TYPED),
    ("glm", f"Let me see.\n{GLM}\n{GLM}", "Let me see.", TYPED * 2),
    ("glm", "<tool_call>f</tool_call>\nDone", "\nDone", [("f", "{}")]),
    *(
        ("glm", text, text, [])
        for text in (
            "<tool_call>no call</tool_call>",
            "<tool_call>f<sep></tool_call>",
            "<tool_call></tool_call>",
            HERMES,
            "<tool",
        )
    ),
    ("deepseek", f"{SEEKS}{SEEK}{SEEK_ENDS}", "", ONE),
    ("deepseek", f"Hm. {SEEKS}{SEEK}\n{SEEK}{SEEK_ENDS} Done", "Hm. Done", TWO),
    ("deepseek", f"{SEEKS}{OLD_SEEK}\n{OLD_SEEK}{SEEK_ENDS}", "", TWO),
    *(("deepseek", text, text, []) for text in ("<｜tool", SEEKS, SEEKS + " Hm", "a ``` {")),
    ("gpt-oss", " Just text. \n", " Just text. \n", []),
    ("gpt-oss", f"{HARMONY}<|call|>", "", ONE),
    ("gpt-oss", f" to=functions.weather<|channel|>commentary json<|message|>{WEATHER}", "", ONE),
    ("gpt-oss", f"<|channel|>commentary<|message|>Let me see.<|end|>{NEXT}{HARMONY}", "Let me see.", ONE),
    ("gpt-oss", f"<|channel|>final<|message|>A<|end|>{NEXT}<|channel|>final<|message|>B <|en", "A\nB <|en", []),
    ("gpt-oss", "<|channel|>commentary to=functions.f<|message|><|call|>", "", [("f", "{}")]),
    ("gpt-oss", "A<|end|> B", "A\n B", []),
    *(("mistral", text, text, []) for text in ("[TOOL", "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]no call")),
)
"""Family, text, and the content and the calls in it."""
THOUGHT = (
    (False, "<think>\nHm\n\nso.\n</think>\n\nYes.", "Hm\n\nso.", "Yes."),
    (True, "Hm\n</think>\n\nYes.", "Hm", "Yes."),
    (True, "<think>Hm</think>Yes.", "Hm", "Yes."),
    (True, "Hm </thin", "Hm </thin", ""),
    (False, "<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
    (False, "\nYes. <think>", "", "\nYes. <think>"),
    (False, "<thin", "", "<thin"),
)
"""Whether the prompt begins the reasoning, the text, and the reasoning and the content in it."""


def parsed(parser: AnswerParser, pieces: list[str]) -> AnswerDelta:
    return AnswerDelta.joined([*map(parser.push, pieces), parser.flush()])


def parser_of(family: str, *, inside: bool = False, parallel: bool = True) -> AnswerParser:
    return AnswerParser(AnswerFormat(FAMILIES[family], thinks=True, parallel=parallel, schemas=SCHEMAS), inside=inside)


@pytest.mark.parametrize(("family", "text", "content", "calls"), PARSED)
def test_calls_in_a_text(family: str, text: str, content: str, calls: list[Call]) -> None:
    for pieces in ([text], list(text)):
        found = parsed(parser_of(family), pieces)
        assert (found.content, [(call.name, call.arguments) for call in found.calls]) == (content, calls)
        assert [call.index for call in found.calls] == list(range(len(calls)))


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_in_a_text(inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = parsed(parser_of("hermes", inside=inside), pieces)
        assert (found.reasoning, found.content) == (reasoning, content)


MARKS = (
    SEEKS,
    SEEK_ENDS,
    NEXT,
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "</function>",
    "</parameter>",
    "<parameter=a>",
)


def test_reasoning_in_channels() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}<|channel|>analysis to=python<|message|>1 <<|end|>{NEXT}"
    for pieces in ([text + HARMONY], list(text + HARMONY)):
        found = parsed(parser_of("gpt-oss"), pieces)
        assert (found.content, found.reasoning, len(found.calls)) == ("", "Hm.\n1 <", 1)
        quiet = AnswerFormat(FAMILIES["gpt-oss"], thinks=False, shows_reasoning=False)
        found = parsed(AnswerParser(quiet, inside=False), pieces)
        assert (found.content, found.reasoning, found.calls) == (WEATHER, "", [])  # the request has no tools


def test_types_of_arguments() -> None:
    """The schema says what is a text; where it says nothing, JSON is JSON."""
    schema = {
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "size": {"enum": ["1", "2"]},
            "count": {"type": "integer"},
        }
    }
    for name, text, value in (
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "[5]", "[5]"),
        ("size", "1", "1"),
        ("count", " 7 ", 7),
        ("count", "many", "many"),
        ("other", "True", True),
        ("other", '{"a": 1.5}', {"a": 1.5}),
        ("other", "0123", "0123"),
    ):
        assert typed(text, schema, name) == value, (name, text)


STARTED: dict[str, str] = {
    "hermes": HERMES,
    "qwen-xml": QWEN,
    "glm": GLM,
    "mistral": NEW_MISTRAL,
    "deepseek": f"{SEEKS}{SEEK}{SEEK_ENDS}",
    "gpt-oss": f"{HARMONY}<|call|>",
    "llama3": LLAMA3,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_with_a_format_is_a_call_or_a_text(family: str, size: int) -> None:
    starts = FAMILIES[family].starts(["play", "weather"])
    format = AnswerFormat(FAMILIES[family], thinks=False, schemas=SCHEMAS, calls=starts)
    quoted = json.dumps({"said": STARTED[family]})
    for text, content, calls in (
        (STARTED[family], "", 1),
        (quoted, quoted, 0),
        ('{"name": "play"}', '{"name": "play"}', 0),
    ):
        found = parsed(AnswerParser(format, inside=False), [text[at : at + size] for at in range(0, len(text), size)])
        assert (found.content, len(found.calls)) == (content, calls)


TEXTS = st.lists(
    st.sampled_from(
        [text for _, text, _, _ in (*PARSED, *THOUGHT)] + [*MARKS, "<think>", "</think>", "\n", " ", '"', "}", ","]
    )
    | st.text(alphabet='<[{"}]>\\,: \nanme', max_size=8),
    max_size=4,
).map("".join)


@given(family=st.sampled_from(sorted(FAMILIES)), text=TEXTS, inside=st.booleans(), data=st.data())
def test_deltas_add_up_to_the_whole_at_any_cut(family: str, text: str, inside: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    whole = parsed(parser_of(family, inside=inside), [text])
    assert parsed(parser_of(family, inside=inside), pieces) == whole
    only = parsed(parser_of(family, inside=inside, parallel=False), pieces)
    assert only == AnswerDelta(whole.content, whole.reasoning, whole.calls[:1])


def test_the_template_names_the_family() -> None:
    llama = "<|start_header_id|>{{ '\"parameters\": ' }}"
    for template, family in (
        (QWEN3, "hermes"),
        ("<tool_call>\n<function=", "qwen-xml"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        (GPT_OSS, "gpt-oss"),
        (llama, "llama3"),
        ("[TOOL_CALLS]", "mistral"),
    ):
        assert tool_family(template, "auto") is FAMILIES[family]
    for template in (None, PHI_3):
        assert tool_family(template, "auto") is None
        assert tool_family(template, "hermes") is FAMILIES["hermes"]
    assert tool_family(QWEN3, "none") is None


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHAT: Any = [{"role": "user", "content": "Rain?"}]
SAID = f"<think>\nHm.\n</think>\n\nLet me see.\n{HERMES}\n{HERMES}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("qwen")
    async with serve_api(folder, tokens=with_template(QWEN3_5), context=4096) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(qwen: Api) -> AsyncIterator[AsyncOpenAI]:
    async with qwen.openai() as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_the_openai_client_reads_calls_and_reasoning(qwen: Api, client: AsyncOpenAI) -> None:
    qwen.says(SAID)
    done = await client.chat.completions.create(model="fake", messages=CHAT, tools=TOOLS, n=2)
    for choice in done.choices:
        message = choice.message
        assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}
        assert message.tool_calls is not None
        assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("function", "weather", WEATHER)
        ] * 2
    messages = [choice.message for choice in done.choices]
    assert len({call.id for message in messages for call in message.tool_calls or []}) == 4
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in messages[0].tool_calls or []]
    await client.chat.completions.create(model="fake", messages=[*CHAT, messages[0], *answers], tools=TOOLS)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_openai_client_reads_streamed_calls(qwen: Api, client: AsyncOpenAI) -> None:
    qwen.says(SAID)
    stream = client.chat.completions.stream(model="fake", messages=CHAT, tools=TOOLS)
    reasoning = ""
    async with stream as events:
        async for event in events:
            if event.type == "chunk":
                for chosen in event.chunk.choices:
                    extra = chosen.delta.model_extra or {}
                    assert extra.get("reasoning") == extra.get("reasoning_content")
                    reasoning += extra.get("reasoning", "")
        done = await events.get_final_completion()
    (choice,) = done.choices
    assert (reasoning, choice.message.content, choice.finish_reason) == ("Hm.", "Let me see.", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == TWO
    assert len({call.id for call in calls}) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_request_asks_of_its_calls(qwen: Api, client: AsyncOpenAI) -> None:
    qwen.says(f"Hm.\n</think>\n\n{HERMES}{HERMES}")
    one = await client.chat.completions.create(
        model="fake", messages=CHAT, tools=TOOLS, parallel_tool_calls=False, tool_choice="auto"
    )
    assert (one.choices[0].message.content, len(one.choices[0].message.tool_calls or [])) == (None, 1)
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    unthinking = await client.chat.completions.create(model="fake", messages=CHAT, tools=TOOLS, extra_body=extra)
    assert unthinking.choices[0].message.content == "Hm.\n</think>"
    for asked in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        plain = await client.chat.completions.create(model="fake", messages=CHAT, extra_body=asked)
        assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (HERMES * 2, "stop")
        assert plain.choices[0].message.tool_calls is None
    qwen.says(LLAMA3)
    schema: Any = {"type": "json_object"}
    whole = await client.chat.completions.create(model="fake", messages=CHAT, tools=TOOLS, response_format=schema)
    assert whole.choices[0].message.content == LLAMA3  # a constrained text has no reasoning, though the prompt opens it


@pytest.mark.asyncio(loop_scope="module")
async def test_with_a_format_the_model_calls_a_tool_or_answers_in_it(qwen: Api, client: AsyncOpenAI) -> None:
    """A text in the format has no calls, whatever it contains. The engine lets a text begin like a call."""
    asked: Any = {"messages": CHAT, "tools": TOOLS, "response_format": {"type": "json_object"}}
    quoted = json.dumps({"said": HERMES})
    for said, content, calls in ((HERMES, "", 1), (HERMES * 2, "", 2), (quoted, quoted, 0), ("{", "{", 0)):
        qwen.says(said)
        whole = await client.chat.completions.create(model="fake", **asked)
        message = whole.choices[0].message
        assert (message.content or "", len(message.tool_calls or [])) == (content, calls)
        stream = await client.chat.completions.create(model="fake", stream=True, **asked)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == content
        assert (
            len([call for delta in deltas for call in delta.tool_calls or [] if call.function and call.function.name])
            == calls
        )
    for more, calls in (({}, (("<tool_call>",),)), ({"tool_choice": "none"}, ()), ({"tools": None}, ())):
        before = len(await qwen.engine.saw(Generate))
        await client.chat.completions.create(model="fake", **asked | more)
        *_, sent = await qwen.engine.saw(Generate, before + 1)
        assert sent.grammar is not None and sent.grammar.calls == calls


NAMED: Any = {"type": "function", "function": {"name": "play"}}


def allowed(name: str, mode: str) -> Any:
    tool = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}


CHOICES: Any = [
    {"type": "function", "function": {"name": "stop", "parameters": {"additionalProperties": False}}},
    {
        "type": "function",
        "function": {
            "name": "play",
            "parameters": {
                "properties": {"mood": {"$ref": "#/$defs/Mood"}},
                "required": ["mood"],
                "additionalProperties": False,
                "$defs": {"Mood": {"enum": ["sad", "glad"]}},
            },
        },
    },
]


async def test_a_forced_call_follows_its_schema(tmp_path: Path) -> None:
    """With a real engine, which would write anything else."""
    async with serve_real(tmp_path) as api, api.openai() as client:
        for choice, names in (
            ("required", {"play", "stop"}),
            (NAMED, {"play"}),
            (allowed("stop", "required"), {"stop"}),
        ):
            asked: Any = {"messages": CHAT, "tools": CHOICES, "tool_choice": choice, "seed": 1, "max_tokens": 200}
            done = await client.chat.completions.create(model="bundled", n=2, **asked)
            for each in done.choices:
                assert (each.message.content, each.finish_reason) == (None, "tool_calls")
                (call,) = each.message.tool_calls or []
                assert call.function.name in names
                if call.function.name == "play":
                    assert json.loads(call.function.arguments)["mood"] in ("sad", "glad")
        formatted: Any = asked | {"response_format": {"type": "json_object"}}  # of a text, which there is not
        same = await client.chat.completions.create(model="bundled", n=2, **formatted)
        assert [[call.function for call in choice.message.tool_calls or []] for choice in same.choices] == [
            [call.function for call in choice.message.tool_calls or []] for choice in done.choices
        ]


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_that_cannot_be_kept_are_refused(client: AsyncOpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "play", "parameters": {"$defs": {"Mood": {}}}}}
    sometimes = "expected auto, none, required or a function's name, got 'sometimes'"
    for asked, field, said in (
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tool_choice": NAMED, "tools": TOOLS}, "tool_choice", ""),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", sometimes),
        ({"tool_choice": allowed("play", "auto"), "tools": TOOLS}, "tool_choice", ""),
        ({"tool_choice": allowed("play", "none"), "tools": CHOICES}, "tool_choice", ""),
        ({"tool_choice": NAMED, "tools": CHOICES, "guided_regex": "a"}, "tool_choice", ""),
        ({"tool_choice": "required", "tools": [*CHOICES, other]}, "tools", ""),
        (
            {"tool_choice": "required", "tools": [{"type": "function"}]},
            "tools",
            "expected a field 'function', got none",
        ),
        ({"tool_choice": "required", "tools": [{"type": "x"}]}, "tools", "[0].type: expected one of function"),
        ({"tools": [{"type": "web_search"}]}, "tools", "[0].type: expected one of function, got 'web_search'"),
        ({"tools": [{"type": "function", "name": "play"}]}, "tools", "expected a field 'function', got none"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=CHAT, extra_body=asked)
        assert caught.value.param == field and said in str(caught.value)


@pytest.mark.parametrize("responses", [False, True])
async def test_the_model_sees_allowed_tools_alone(tmp_path: Path, responses: bool) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=4096) as api:
        async with api.openai() as client:
            if responses:
                tools: Any = [{"type": "function", **tool["function"]} for tool in CHOICES]
                choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "play"}]}
                asked: Any = {"input": "Hi", "tools": tools, "tool_choice": choice}
                await client.responses.create(model="fake", **asked)
            else:
                choice = allowed("play", "auto")
                await client.chat.completions.create(model="fake", messages=CHAT, tools=CHOICES, tool_choice=choice)
        (sent,) = await api.engine.saw(Generate)
    prompt = tokenizer().decode(sent.prompt, skip_special=False)
    assert '"play"' in prompt and '"stop"' not in prompt


async def test_the_setting_goes_before_the_template(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(PHI_3), context=4096, tool_parser="mistral") as api:
        api.says(NEW_MISTRAL)
        _, done = await api.call("POST", "/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS})
    (call,) = done["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": WEATHER}
    assert len(call["id"]) == 9


async def test_tools_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(PHI_3), context=4096) as api:
        asked: Any = {"messages": CHAT, "tools": TOOLS}
        for format in ("text", "json_object"):
            hidden = asked | {"response_format": {"type": format}}
            status, refused = await api.call("POST", "/v1/chat/completions", json=hidden)
            assert (status, refused["error"]["param"]) == (400, "tools")
        for choice in ("none", "required"):
            assert (await api.call("POST", "/v1/chat/completions", json=asked | {"tool_choice": choice}))[0] == 200


async def test_channels_and_effort(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(GPT_OSS), context=4096) as api:
        api.says(f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}{HARMONY}")
        asked: Any = {"messages": CHAT, "tools": TOOLS, "reasoning_effort": "high"}
        _, done = await api.call("POST", "/v1/chat/completions", json=asked)
        (sent,) = await api.engine.saw(Generate)
        hidden = {"messages": CHAT, "include_reasoning": False}
        _, plain = await api.call("POST", "/v1/chat/completions", json=hidden)
    assert "Reasoning: high" in tokenizer().decode(sent.prompt, skip_special=False)
    message = done["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [WEATHER]
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": WEATHER, "refusal": None}


@pytest.mark.asyncio(loop_scope="module")
async def test_an_effort_that_no_template_reads_is_taken_and_none_turns_thinking_off(qwen: Api) -> None:
    prompts = {}
    for effort in ("high", "none", None):
        asked: Any = {"messages": CHAT, "reasoning_effort": effort}
        await qwen.answered(200, "POST", "/v1/chat/completions", json=asked)
        prompts[effort] = await qwen.last_prompt()
    assert prompts["high"] == prompts[None] and "</think>" not in prompts[None]
    assert prompts["none"].split()[-2:] == ["<think>", "</think>"]
