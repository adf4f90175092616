"""Every text, list and map that a request may hold has a maximum, and what a job's settings cost is bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.inspect import AnyType, DictType, ListType, StrType, StructType, Type, UnionType, VarTupleType, type_info

from coserve.api.app import ROUTES
from coserve.core.limits import MAX_BLOCK_NAMES, MAX_NAMES
from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import write_peft


def unbounded(info: Type, path: str, seen: frozenset[type] = frozenset()) -> Iterator[str]:
    """The paths of texts, lists and maps without a maximum. What may be any JSON is bounded by the body's size, and
    rows are read in a helper process."""
    match info:
        case UnionType(types=types):
            for each in types:
                yield from unbounded(each, path, seen)
        case StructType(cls=cls, fields=fields) if cls not in seen:
            for field in fields:
                yield from unbounded(field.type, f"{path}.{field.encode_name}", seen | {cls})
        case StrType(max_length=None, pattern=None):
            yield path
        case ListType(item_type=item) | VarTupleType(item_type=item):
            if info.max_length is None:
                yield f"{path}[]"
            yield from unbounded(item, f"{path}[...]", seen)
        case DictType(value_type=AnyType()):
            pass
        case DictType(key_type=key, value_type=value):
            if info.max_length is None and path != "FinetuneRequest.data[...]":
                yield f"{path}{{}}"
            yield from unbounded(key, f"{path}{{key}}", seen)
            yield from unbounded(value, f"{path}{{...}}", seen)


async def test_all_that_a_request_holds_has_a_maximum(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        bodies = [route.body for route in api.app[ROUTES] if route.body is not None]
    types = {type for body in bodies for type in (body if isinstance(body, tuple) else (body,))}
    assert {path for type in types for path in unbounded(type_info(type), type.__name__)} == set()


ROW = {"text": "the cat"}
LONG = "x" * 600
TOO_MANY: dict[str, dict[str, Any]] = {
    "rank_pattern": {"rank_pattern": {f"^{number}$": 4 for number in range(MAX_NAMES + 1)}},
    "alpha_pattern": {"alpha_pattern": {f"^{number}$": 4 for number in range(8000)}},
    "targets": {"targets": ["q_proj"] * 100_000},
    "targets_bd_a": {"bd_blocks": 2, "targets_bd_a": ["q_proj"] * (MAX_BLOCK_NAMES + 1)},
    "init": {"init": LONG},
    "targets[0]": {"targets": [LONG]},
}


@pytest.mark.parametrize("field", TOO_MANY)
async def test_a_job_with_more_is_refused_by_name(api: Api, field: str) -> None:
    asked = {"adapter": "a", "data": [ROW], "lora": TOO_MANY[field]}
    found = await api.refused(400, "invalid_request", "POST", "/finetune", json=asked)
    assert found["field"] == f"lora.{field}"


async def test_a_job_whose_adapter_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    """An import's own file may be as large as is read at most, and would be written with more white space."""
    folder = tmp_path / "files"
    async with serve_api(tmp_path / "data", data_root=tmp_path) as api:
        write_peft(folder, api.base)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"] = ["q_proj"] * 110_000
        (folder / "adapter_config.json").write_text(json.dumps(config, separators=(",", ":")))
        await api.answered(201, "POST", "/adapters", json={"name": "large", "path": str(folder)})
        asked = {"adapter": "larger", "continue_from": "large", "data": [ROW]}
        found = await api.refused(422, "unsupported_adapter", "POST", "/finetune", json=asked)
        assert found["field"] == "continue_from" and str(1 << 20) in found["message"]
