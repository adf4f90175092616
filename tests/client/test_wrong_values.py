"""Values that JSON lacks are refused before anything is sent, with the path of the value; msgspec would make texts of
some of them."""

from __future__ import annotations

import array
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from coserve.core.errors import InvalidRequest
from coserve.core.messages import ChatMessage
from coserve.core.schemas.adapters import Distillation
from coserve.core.training.settings import Optimizer
from coserve.core.types import LoraSettings
from tests.support.sdk import GENERATED, Daemon, job, reply

EXPECTED = "expected str, int, float, bool, None, list or dict"
NOT_JSON = [
    *(b"a", bytearray(b"a"), memoryview(b"a"), uuid.UUID(int=1), Decimal(1), datetime.now(UTC), date(2026, 1, 1)),
    *(time(1), timedelta(1), {"a"}, frozenset(), msgspec.Raw(b"1"), Path("a"), object(), np.int64(1), np.float64(1)),
    *(np.str_("a"), np.array([1]), MappingProxyType({}), Enum("Kind", {"A": b"a"}).A),
]


def kind(value: object) -> str:
    return type(value).__name__


class Role(StrEnum):
    USER = "user"


async def refused(call: str, *arguments: object, **named: Any) -> InvalidRequest:
    daemon = Daemon()
    with pytest.raises(InvalidRequest) as caught:
        await getattr(daemon.client, call)(*arguments, **named)
    assert daemon.requests == []
    return caught.value


@pytest.mark.parametrize("value", NOT_JSON, ids=kind)
async def test_what_json_lacks_is_no_text_of_a_row(value: object) -> None:
    error = await refused("finetune", "a", [{"text": "x"}, {"prompt": "x", "completion": value}])
    found = "bytes" if isinstance(value, Enum) else kind(value)
    assert str(error) == f"data[1].completion: {EXPECTED}, got {found}"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "x", "chosen": "x", "rejected": b"x"}, "data[0].rejected"),
        ({"messages": [{"role": "user", "content": b"x"}]}, "data[0].messages[0].content"),
        ({"messages": (ChatMessage(role="user", content=b"x"),)}, "data[0].messages[0].content"),  # type: ignore[arg-type]
        ({"messages": [{"role": "user", "content": "x", "weight": Decimal(0)}]}, "data[0].messages[0].weight"),
        ({"tools": [{"enum": [1, "a", b"x"]}]}, "data[0].tools[0].enum[2]"),
        ({b"text": "x"}, "data[0].b'text'"),
        ({"tools": [{None: "x"}]}, "data[0].tools[0].None"),
    ],
)
async def test_the_path_of_a_wrong_value_is_told(row: Mapping[Any, Any], field: str) -> None:
    error = await refused("finetune", "a", [row])
    assert error.field == field and "expected str" in str(error)


async def test_rows_that_go_as_a_file_are_checked_too() -> None:
    rows: list[dict[str, object]] = [{"text": "x" * (1 << 20)} for _ in range(9)]
    error = await refused("finetune", "a", [*rows, {"text": b"x"}])
    assert error.field == "data[9].text"


async def test_rows_of_a_distillation_are_checked_too() -> None:
    error = await refused("convert_adapter", "a", 2, distill=Distillation(data=[{"text": b"x"}]))
    assert error.field == "distill.data[0].text"


async def test_a_row_may_be_made_over_for_the_next_one() -> None:
    def rows() -> Iterator[dict[str, str]]:
        row = {}
        for text in "ab":
            row["text"] = text
            yield row

    daemon = Daemon(reply(job(), 202), reply(job(), 202))
    await daemon.client.finetune("a", rows())
    await daemon.client.finetune("a", np.array([{"text": text} for text in "ab"]))
    bodies = [msgspec.json.decode(request.body or b"") for request in daemon.requests]  # type: ignore[arg-type]
    assert [body["data"] for body in bodies] == [[{"text": "a"}, {"text": "b"}]] * 2


async def test_rows_hold_whatever_json_has() -> None:
    row = {"a": [1, 2.5, True, None, "ä", 2**70], "b": {"c": ("d",), "e": {}, "7": []}, "role": Role.USER}
    daemon = Daemon(reply(job(), 202), reply(job(), 202))
    await daemon.client.finetune("a", [row, MappingProxyType({"text": "x"})])
    body = daemon.requests[0].body
    assert isinstance(body, bytes)
    expected = {**row, "b": {"c": ["d"], "e": {}, "7": []}, "role": "user"}
    assert msgspec.json.decode(body)["data"] == [msgspec.json.decode(msgspec.json.encode(expected)), {"text": "x"}]
    await daemon.client.finetune("a", [{"text": "x"}], training={"optimizer": Optimizer.LION})


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ({"metadata": {"who": b"me"}}, "metadata.who"),
        ({"metadata": "me"}, "metadata"),
        ({"lora": {"targets": [b"q_proj"]}}, "lora.targets[0]"),
        ({"lora": {"r": np.int64(4)}}, "lora.r"),
        ({"lora": LoraSettings(r=b"x")}, "lora.r"),  # type: ignore[arg-type]
        ({"training": {"optimizer": b"lion"}}, "training.optimizer"),
        ({"training": {"sample_prompts": [b"x"]}}, "training.sample_prompts[0]"),
        ({"continue_from": b"a"}, "continue_from"),
    ],
)
async def test_settings_of_a_job(named: dict[str, object], field: str) -> None:
    for rows in ({"data": [{"text": "x"}]}, {"file": b"{}\n"}):
        error = await refused("finetune", "a", **rows, **named)
        assert error.field == field and "expected" in str(error)


@pytest.mark.parametrize("data", [5, b"{}\n", {"text": "x"}])
async def test_what_is_no_list_of_rows(data: object) -> None:
    error = await refused("finetune", "a", data)
    assert str(error.field).startswith("data")


@pytest.mark.parametrize("prompt", [b"The", bytearray(b"The"), memoryview(b"The"), {1: 2}, {1, 2}, 5, 1.5], ids=kind)
async def test_what_is_neither_a_text_nor_token_ids(prompt: object) -> None:
    error = await refused("generate", prompt)
    assert str(error) == f"prompt: expected a text or token ids, got {kind(prompt)}"


@pytest.mark.parametrize("wrong", ["a", b"a", 1.5, None, Decimal(1), np.array([1, 2]), np.float64(1)], ids=kind)
async def test_what_is_no_token_id(wrong: object) -> None:
    error = await refused("generate", [1, wrong])
    assert str(error) == f"prompt[1]: expected int, got {kind(wrong)}"


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2]), [1, np.int64(2)], array.array("B", [1, 2]), range(1, 3), (each for each in (1, 2))]
)
async def test_token_ids_of_any_kind(prompt: Any) -> None:
    daemon = Daemon(reply(GENERATED))
    await daemon.client.generate(prompt)
    assert daemon.requests[0].body == b'{"prompt":[1,2]}'


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ({"prompt": np.str_("x")}, "prompt"),
        ({"prompt": "x", "max_tokens": np.int64(3)}, "max_tokens"),
        ({"prompt": "x", "temperature": Decimal(1)}, "temperature"),
        ({"prompt": "x", "stop": [b"x"]}, "stop[0]"),
        ({"prompt": "x", "logit_bias": {np.int64(7): 1.0}}, "logit_bias.7"),
        ({"prompt": "x", "adapter": b"a"}, "adapter"),
        ({"messages": [{"role": "user", "content": b"x"}]}, "messages.content"),
        ({"messages": [ChatMessage(role="user", content=b"x")]}, "messages[0].content"),  # type: ignore[arg-type]
        ({"messages": 5}, "messages"),
    ],
)
async def test_options_of_generate(named: dict[str, object], field: str) -> None:
    error = await refused("generate", **named)
    assert error.field == field and "expected" in str(error)


HALF = "a\ud83d"
"""A text that was cut within a character."""


@pytest.mark.parametrize(
    ("call", "named", "field"),
    [
        ("generate", {"prompt": HALF}, "prompt"),
        ("generate", {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        ("generate", {"messages": [{"role": HALF, "content": "x"}]}, "messages"),
        ("generate", {"prompt": "x", "stop": ["x", HALF]}, "stop[1]"),
        ("finetune", {"adapter": "a", "data": [{"text": "x"}, {"text": HALF}]}, "data[1].text"),
        ("finetune", {"adapter": "a", "data": [{"messages": [{"content": HALF}]}]}, "data[0].messages[0].content"),
        ("finetune", {"adapter": "a", "data": [{HALF: "x"}]}, "data[0]"),
        ("finetune", {"adapter": "a", "file": b"{}", "metadata": {"a": HALF}}, "metadata.a"),
        ("import_adapter", {"name": HALF, "path": "a"}, "name"),
    ],
)
async def test_half_a_character_is_no_text(call: str, named: dict[str, object], field: str) -> None:
    error = await refused(call, **named)
    assert error.field == field
    assert str(error).startswith(f"{field}: expected") and str(error).isascii()


async def test_half_a_character_is_no_key() -> None:
    error = await refused("finetune", "a", file=b"{}", metadata={HALF: "x"})
    assert "expected keys in valid UTF-8" in str(error)


async def test_a_row_that_contains_itself() -> None:
    row: dict[str, object] = {"text": "x"}
    row["messages"] = [row]
    error = await refused("finetune", "a", [{"text": "x"}, row])
    assert error.field == "data" and "does one contain itself?" in str(error)


@pytest.mark.parametrize("key", ["", "a\nb", "a\r\nX-Other: b", "a\0", " a", "a ", "ä", HALF, b"a", 5])
async def test_an_idempotency_key_that_no_header_can_have(key: object) -> None:
    error = await refused("finetune", "a", [{"text": "x"}], idempotency_key=key)
    assert error.field == "idempotency_key" and "expected" in str(error)
