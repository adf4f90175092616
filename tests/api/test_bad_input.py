"""Bad input: each case has its leaf and its field, and after each a good request succeeds."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coserve.api.http.bodies import MAX_JSON_BYTES
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import CoserveError
from coserve.core.schemas.adapters import ImportRequest
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.state.failpoints import armed
from tests.support.api_server import Api, form, serve_api
from tests.support.examples import examples
from tests.support.fake_engine import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")
BAD = "invalid_request"
PROMPT = {"prompt": "x"}

GENERATE: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, BAD, "prompt"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, BAD, "prompt"),
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"messages": []}, "empty_prompt", "messages"),
    ({"prompt": "word " * CONTEXT}, "prompt_too_long", "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt_too_long", "prompt"),
    ({"prompt": "x" * 100_000}, "prompt_too_long", "prompt"),
    ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "prompt_too_long", "messages"),
    ({"messages": [{"role": "root", "content": "x"}]}, BAD, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool": 1}]}, "unknown_field", "messages[0].tool"),
    ({"prompt": ["a", "b"]}, BAD, "prompt[0]"),
    ({"prompt": 5}, BAD, "prompt"),
    ({"prompt": [-1]}, BAD, "prompt[0]"),
    ({"prompt": [1 << 31]}, BAD, "prompt[0]"),
    ({"prompt": [4096]}, BAD, "prompt"),
    (PROMPT | {"max_tokens": 0}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": -1}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": CONTEXT + 1}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": 1 << 70}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": "5"}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": 5.5}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": True}, BAD, "max_tokens"),
    (PROMPT | {"max_tokens": 5, "min_tokens": 6}, BAD, "min_tokens"),
    (PROMPT | {"n": 129}, BAD, "n"),
    (PROMPT | {"n": 0}, BAD, "n"),
    (PROMPT | {"temperature": -0.1}, BAD, "temperature"),
    (PROMPT | {"temperature": "hot"}, BAD, "temperature"),
    (PROMPT | {"top_p": 0}, BAD, "top_p"),
    (PROMPT | {"top_p": 1.01}, BAD, "top_p"),
    (PROMPT | {"top_k": -1}, BAD, "top_k"),
    (PROMPT | {"min_p": 2}, BAD, "min_p"),
    (PROMPT | {"repetition_penalty": 0}, BAD, "repetition_penalty"),
    (PROMPT | {"repetition_penalty": 5e-324}, BAD, "repetition_penalty"),
    (PROMPT | {"presence_penalty": 2.1}, BAD, "presence_penalty"),
    (PROMPT | {"frequency_penalty": -2.1}, BAD, "frequency_penalty"),
    (PROMPT | {"stop": [""]}, BAD, "stop[0]"),
    (PROMPT | {"stop": ["x"] * 17}, BAD, "stop"),
    (PROMPT | {"stop": "x" * 257}, BAD, "stop"),
    (PROMPT | {"stop_token_ids": [4096]}, BAD, "stop_token_ids"),
    (PROMPT | {"stop_token_ids": [1] * 17}, BAD, "stop_token_ids"),
    (PROMPT | {"logprobs": 21}, BAD, "logprobs"),
    (PROMPT | {"logit_bias": {"1": 1, "a": 1}}, BAD, "logit_bias.a"),
    (PROMPT | {"logit_bias": {"4096": 1}}, BAD, "logit_bias"),
    (PROMPT | {"logit_bias": {"1": 101}}, BAD, "logit_bias.1"),
    (PROMPT | {"logit_bias": {str(i): 1 for i in range(1025)}}, BAD, "logit_bias"),
    (PROMPT | {"seed": -1}, BAD, "seed"),
    (PROMPT | {"slo_ttft": 0}, BAD, "slo_ttft"),
    (PROMPT | {"best_of": 2}, "unknown_field", "best_of"),
    (PROMPT | {"adapter": "../../etc"}, BAD, "adapter"),
    (PROMPT | {"adapter": "a;$(id)"}, BAD, "adapter"),
    (PROMPT | {"adapter": "a\n"}, BAD, "adapter"),
    (PROMPT | {"adapter": ""}, BAD, "adapter"),
    (PROMPT | {"adapter": "a@0"}, BAD, "adapter"),
    (PROMPT | {"adapter": "x" * 65}, BAD, "adapter"),
]

JOB: dict[str, Any] = {"adapter": "poet", "data": [{"text": "a b c"}]}
# What a setting may be is tested where it is decided (tests/lora/test_targets.py, tests/finetune/test_job.py).
FINETUNE: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"data": JOB["data"]}, 400, BAD, "adapter"),
    ({"adapter": "poet"}, 400, BAD, "data"),
    (JOB | {"path": "x"}, 400, BAD, "data"),
    (JOB | {"adapter": "x/y/z"}, 400, BAD, "adapter"),
    (JOB | {"data": []}, 422, "empty_corpus", None),
    (JOB | {"data": [{"text": "a b"}, {"txt": "a"}]}, 422, "malformed_row", None),
    (JOB | {"data": [{"prompt": "a", "completion": ""}]}, 422, "no_targets", None),
    (JOB | {"data": [1]}, 400, BAD, "data[0]"),
    (JOB | {"lora": {"r": 0}}, 400, BAD, "lora.r"),
    (JOB | {"lora": {"targets": "q_proj"}}, 400, BAD, "lora.targets"),
    (JOB | {"lora": {"targets": "(?!q).*"}}, 400, BAD, "lora.targets"),
    (JOB | {"lora": {"rank": 4}}, 400, "unknown_field", "lora.rank"),
    (JOB | {"training": {"epochs": 1, "steps": 1}}, 400, BAD, "training.steps"),
    (JOB | {"training": {"steps": 0}}, 400, BAD, "training.steps"),
    (JOB | {"training": {"learning_rate": "fast"}}, 400, BAD, "training.learning_rate"),
    (JOB | {"training": {"max_length": CONTEXT + 1}}, 400, BAD, "training.max_length"),
    (JOB | {"training": {"optimizer": "lion", "eps": 1e-6}}, 400, BAD, "training.eps"),
    (JOB | {"training": {"schedule": "zigzag"}}, 400, BAD, "training.schedule"),
    (JOB | {"training": {"early_stopping_patience": 1}}, 400, BAD, "training.early_stopping_patience"),
    (JOB | {"metadata": {"a": "b", "run": 1, "c": 2}}, 400, BAD, "metadata.run"),
    (JOB | {"metadata": {"a": "b", "k" * 65: "c"}}, 400, BAD, f"metadata.{'k' * 65}"),
    (JOB | {"lora": {"rank_pattern": {"q_proj": "x"}}}, 400, BAD, "lora.rank_pattern.q_proj"),
    (JOB | {"continue_from": "nobody"}, 404, "adapter_not_found", "continue_from"),
    (JOB | {"teacher": "nobody"}, 404, "adapter_not_found", "teacher"),
    ({"adapter": "poet", "path": "../secret.jsonl"}, 403, "forbidden_path", "path"),
    ({"adapter": "poet", "path": "/etc/passwd"}, 403, "forbidden_path", "path"),
    ({"adapter": "poet", "path": "link.jsonl"}, 403, "forbidden_path", "path"),
    ({"adapter": "poet", "path": "none.jsonl"}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "a\0b"}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "."}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "loop"}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "loop/rows.jsonl"}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "x" * 300}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "x/" * 2000}, 400, BAD, "path"),
    ({"adapter": "poet", "path": "file.jsonl/rows.jsonl"}, 400, BAD, "path"),
]


@pytest.fixture(scope="module")
def api(lasting_api: Api) -> Api:
    """With files in its root that paths may lead to."""
    root = lasting_api.root
    (root.parent / "secret.jsonl").write_text('{"text": "secret"}')
    (root / "link.jsonl").symlink_to(root.parent / "secret.jsonl")
    (root / "loop").symlink_to("loop")
    (root / "file.jsonl").touch()
    return lasting_api


@pytest.mark.parametrize(("body", "code", "field"), GENERATE, ids=lambda value: str(value)[:40])
async def test_generate(api: Api, body: dict[str, Any], code: str, field: str | None) -> None:
    error = await api.refused(400, code, "POST", "/generate", json=body)
    assert error["field"] == field
    assert len(error["message"]) < 300


@pytest.mark.parametrize(("body", "status", "code", "field"), FINETUNE, ids=lambda value: str(value)[:40])
async def test_finetune(api: Api, body: dict[str, Any], status: int, code: str, field: str | None) -> None:
    if body.get("path") not in (None, "."):  # imports read the same paths; a folder is what they want
        await api.refused(status, code, "POST", "/adapters", json={"name": "poet", "path": body["path"]})
    error = await api.refused(status, code, "POST", "/finetune", json=body)
    assert error["field"] == field
    assert str(api.root.parent) not in error["message"]
    assert api.folder.job_ids() == []
    if code == "malformed_row":
        assert error["line"] == 2


async def test_messages_say_what_was_expected_and_what_came(api: Api) -> None:
    for body, message in (
        (PROMPT | {"n": 129}, "expected an integer <= 128, got 129"),
        (PROMPT | {"top_k": "x"}, "expected an integer or null, got a string"),
        (PROMPT | {"stop": ["x"] * 17}, "expected an array of length <= 16, got 17 entries"),
        (PROMPT | {"cache_salt": "x" * 257}, "expected a string of length <= 256, got 257 characters"),
        (PROMPT | {"logit_bias": {"1": 1, "2": -101}}, "expected a number >= -100.0, got -101"),
        (PROMPT | {"logit_bias": {"x": 1}}, "key: expected an integer, got a string"),
        (PROMPT | {"max_tokens": CONTEXT + 1}, f"expected at most the context, {CONTEXT}, got {CONTEXT + 1}"),
    ):
        assert (await api.refused(400, BAD, "POST", "/generate", json=body))["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b'{"prompt": "x"} {}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", ["/generate", "/finetune", "/adapters"])
async def test_malformed_json(api: Api, path: str, body: bytes) -> None:
    found = await api.answered(400, "POST", path, data=body)
    assert found["error"]["code"] in ("malformed_json", "unknown_field", BAD)
    if path == "/generate":
        assert found["error"]["code"] == ("unknown_field" if body.startswith(b'{"a"') else "malformed_json")
    await api.works()


async def test_huge_numbers_are_no_infinities(api: Api) -> None:
    error = await api.refused(400, BAD, "POST", "/generate", data=b'{"prompt": "x", "temperature": 1e999}')
    assert error["field"] == "temperature"


@pytest.mark.parametrize(
    ("content", "code", "line"), [(b'{"text": "a b"}\n{"text": \n', "malformed_row", 2), (b"", "empty_corpus", None)]
)
async def test_malformed_jsonl(api: Api, content: bytes, code: str, line: int | None) -> None:
    upload = form({"adapter": "poet"}, ("rows.jsonl", content))
    error = await api.refused(422, code, "POST", "/finetune", data=upload)
    assert error.get("line") == line
    assert list(api.folder.staging.iterdir()) == []
    assert api.folder.job_ids() == []


def _form(*parts: tuple[str, bytes, str | None]) -> aiohttp.FormData:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, content, filename in parts:
        form.add_field(name, io.BytesIO(content) if filename else content.decode(), filename=filename)
    return form


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([], 400, BAD),
        ([("file", b"{}", "a")], 400, BAD),
        ([("settings", b'{"adapter": "a"}', None)], 400, BAD),
        ([("settings", b'{"adapter": "a"}', None)] * 2, 400, BAD),
        ([("settings", b'{"adapter": "a"}', None), ("other", b"", "a")], 400, BAD),
        ([("settings", b'{"adapter": "a"}', None), ("file", b"", "a"), ("file", b"", "b")], 400, BAD),
        ([("settings", b"{", None), ("file", b'{"text": "a b"}', "a")], 400, "malformed_json"),
        ([("settings", b" " * ((1 << 20) - 1000), None), ("file", b"x" * 2000, "a")], 413, "body_too_large"),
    ],
)
async def test_malformed_uploads(api: Api, parts: list[tuple[str, bytes, str | None]], status: int, code: str) -> None:
    await api.refused(status, code, "POST", "/finetune", data=_form(*parts))


@pytest.mark.parametrize(
    "body", [b"", b"--x", b"--x\r\n\r\n", b"--y--", b"--x\r\nContent-Disposition: form-data", b"x" * 9999]
)
@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "multipart/form-data", "multipart/form-data; boundary="]
)
async def test_what_only_says_it_is_multipart(api: Api, body: bytes, kind: str) -> None:
    await api.refused(400, BAD, "POST", "/finetune", data=body, headers={"Content-Type": kind})


@pytest.mark.parametrize("path", ["/finetune", "/v1/files"])
async def test_a_part_of_an_upload_without_a_name(api: Api, path: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; filename="a"\r\n\r\nb\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    error = await api.refused(400, BAD, "POST", path, data=body, headers=kind)
    assert "expected a name" in error["message"]


async def test_bodies_over_the_limit(api: Api) -> None:
    large = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    await api.refused(413, "body_too_large", "POST", "/generate", data=io.BytesIO(large))
    await api.refused(413, "body_too_large", "POST", "/generate", data=pieces())  # chunked
    upload = form({"adapter": "a"}, ("a", large))
    refused = await api.refused(413, "body_too_large", "POST", "/finetune", data=upload)
    assert "as a file" not in refused["message"]


PAD = " " * (64 << 10)
"""White space: a body that is decoded in a helper process."""


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "large"])
async def test_a_field_twice(api: Api, pad: str) -> None:
    """Which of its values counts differs between readers of JSON. OpenAI's API takes the last one."""
    for path, body, name in (
        ("/generate", '"prompt": "x", "max_tokens": 4, "max_tokens": 5', "max_tokens"),
        ("/generate", '"prompt": "x", "logit_bias": {"1": 2, "1": 3}', "1"),
        ("/finetune", '"adapter": "a", "data": [{"text": "a b", "text": "c d"}]', "text"),
        (
            "/finetune",
            '"adapter": "a", "data": [{"text": "a b"}], "training": {"seed": 1, "steps": 1, "s\\u0065ed": 1}',
            "seed",
        ),
        ("/adapters/a/rollback", '"version": 1, "version": 2', "version"),
    ):
        refused = await api.refused(400, BAD, "POST", path, data=f"{{{pad}{body}}}".encode())
        assert (refused["field"], refused["message"]) == (name, f"field {name!r} twice in one object")
    for path, body in (
        ("/generate", '"inputs": "a b", "inputs": "x"'),
        ("/v1/completions", '"model": "fake", "prompt": "x", "max_tokens": 4, "max_tokens": 5'),
    ):
        _ = await api.answered(200, "POST", path, data=f"{{{pad}{body}}}".encode())


async def test_the_bases_name_for_an_adapter(api: Api) -> None:
    rows = [{"text": "a b"}]
    teacher = "it cannot be a teacher; expected an adapter, as NAME or NAME@VERSION"
    for path, body, says in (
        ("/generate", {"prompt": "x", "adapter": "fake"}, "leave the field out"),
        ("/finetune", {"adapter": "a", "data": rows, "continue_from": "fake"}, "leave the field out"),
        ("/finetune", {"adapter": "a", "data": rows, "teacher": "fake"}, teacher),
        ("/finetune", {"adapter": "a", "data": rows, "teacher": "fake@1"}, teacher),
        ("/adapters/fake/convert", {"bd_blocks": 2}, "it has nothing to convert; expected an adapter"),
    ):
        refused = await api.refused(404, "adapter_not_found", "POST", path, json=body)
        assert refused["message"] == f"'fake' is the base itself: {says}"
        assert refused["field"] in (*body, "adapter")


async def test_a_corpus_too_large_for_json_is_told_how_to_come(tmp_path: Path) -> None:
    async with serve_api(tmp_path, max_body_bytes=64 << 20) as api:
        body = io.BytesIO(bytes(MAX_JSON_BYTES + 1))
        refused = await api.refused(413, "body_too_large", "POST", "/finetune", data=body)
        assert "a larger corpus goes as a file, of at most 67108864 bytes" in refused["message"]


@pytest.mark.parametrize("count", [1, 5000])
@pytest.mark.parametrize(
    "row", [b'{"prompt": "a", "completion": "b"}\n', b'{"question": "a"}\n', b"prompt,completion\n", b"[{}]\n"]
)
async def test_rows_without_settings_are_told_how_a_file_comes(api: Api, row: bytes, count: int) -> None:
    """`curl --data-binary @rows.jsonl` sends a file as the body."""
    answer = await api.answered(400, "POST", "/finetune", data=io.BytesIO(row * count))
    assert """curl -F 'settings={"adapter": "NAME"}' -F file=@FILE""" in answer["error"]["message"]
    status, answer = await api.call("POST", "/finetune", data=b'{"adapter": "a", "prompt": "b"}')
    assert (status, answer["error"]["message"]) == (400, "unknown field 'prompt'")


async def test_paths_methods_pages(api: Api) -> None:
    await api.refused(404, "not_found", "GET", "/nowhere")
    await api.refused(404, "not_found", "GET", "/adapters/..%2f..%2fetc")
    await api.refused(404, "not_found", "GET", "/adapters/a%00b")
    await api.refused(404, "job_not_found", "GET", "/finetune/job-none")
    await api.refused(404, "job_not_found", "GET", "/finetune/job-none/events")
    await api.refused(404, "job_not_found", "GET", "/finetune?after=job-none")
    await api.refused(404, "adapter_not_found", "DELETE", "/adapters/a@1")
    for limit in ("0", "101", "-1", "x", "1e1", "9" * 5000, ""):
        assert (await api.refused(400, BAD, "GET", "/adapters", params={"limit": limit}))["field"] == "limit"
    await api.refused(400, "unknown_field", "GET", "/finetune?page=2")
    for sent in ({"headers": {"Last-Event-ID": "x"}}, {"params": {"after": "x"}}):
        error = await api.refused(400, BAD, "GET", "/finetune/x/events", **sent)
        assert error["field"] == ("Last-Event-ID" if "headers" in sent else "after")
    async with api.http.put("/generate") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_full_disks_refuse_jobs_and_lose_nothing(api: Api) -> None:
    for point in ("corpus.temp_write", "corpus.before_file_fsync", "registry.before_commit"):
        with armed(f"{point}=ENOSPC"):
            await api.error(507, "storage_full", "POST", "/finetune", json=JOB)
        assert api.folder.job_ids() == []
        await api.works()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
_PATHS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/generate": (GenerateRequest, PROMPT),
    "/finetune": (FinetuneRequest, JOB),
    "/adapters": (ImportRequest, {"name": "poet", "path": "x"}),
    "/v1/completions": (CompletionRequest, PROMPT),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
}
"""What each path takes, and its least body."""


def _bodies(path: str) -> st.SearchStrategy[tuple[str, object]]:
    """Some of the path's fields with any values, alone or beside those that it needs; or any JSON."""
    struct, least = _PATHS[path]
    fields = st.dictionaries(st.sampled_from(struct.__struct_fields__), _JSON, max_size=5)
    return st.tuples(st.just(path), fields | fields.map(lambda body: least | body) | _JSON)


_KNOWN = {400, 403, 404, 413, 422}


async def test_random_bad_bodies_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    """Whatever the body, the answer is an error of the tree, or a success; the next good request succeeds."""
    async with serve_api(tmp_path / "data", max_jobs=1) as api:
        loop = asyncio.get_running_loop()

        async def one(path: str, body: object, cut: bool) -> None:
            content = json.dumps(body).encode()
            status, found = await api.call("POST", path, data=content[:-1] if cut else content)
            assert status in _KNOWN | {200, 202, 429}, found
            if status >= 400 and not path.startswith("/v1"):
                assert found["error"]["code"] in _codes(CoserveError)
            await api.works()

        @settings(
            max_examples=examples(200),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=bool(os.getenv("CI")),
        )
        @given(st.sampled_from(sorted(_PATHS)).flatmap(_bodies), st.booleans())
        def random(asked: tuple[str, object], cut: bool) -> None:
            asyncio.run_coroutine_threadsafe(one(*asked, cut), loop).result(20)

        await asyncio.to_thread(random)


def _codes(tree: type[CoserveError]) -> set[str]:
    return {tree.code}.union(*(_codes(leaf) for leaf in tree.__subclasses__()))
