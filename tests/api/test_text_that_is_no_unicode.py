"""Half a surrogate pair, and bytes that are no UTF-8, wherever a client's text goes: refused, never a fault of the
daemon."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import write_peft

HALF = "\ud800"
ROWS = [{"text": "the cat"}]
TRAINING = {"sample_prompts": [HALF]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("/generate", {"prompt": HALF}),
    "message": ("/generate", {"messages": [{"role": "user", "content": HALF}]}),
    "unknown field": ("/generate", {"prompt": "x", HALF: 1}),
    "TGI": ("/generate", {"inputs": HALF}),
    "completion": ("/v1/completions", {"prompt": ["x", HALF]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
    "part": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}),
    "tokenize": ("/tokenize", {"prompt": HALF}),
    "row": ("/finetune", {"adapter": "a", "data": [{"text": HALF}]}),
    "row's field": ("/finetune", {"adapter": "a", "data": [{HALF: "x"}]}),
    "metadata's key": ("/finetune", {"adapter": "a", "data": ROWS, "metadata": {HALF: "x"}}),
    "sample": ("/finetune", {"adapter": "a", "data": ROWS, "training": TRAINING}),
    "import": ("/adapters", {"name": HALF, "path": "x"}),
    "conversion": ("/adapters/poet/convert", {"bd_blocks": 2, "name": HALF}),
}


async def asked(api: Api, head: bytes, body: bytes = b"") -> int:
    """The status of a request, each byte of which is as given."""
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    return int((await api.raw(head + b"\r\nHost: localhost\r\n" + length + body)).split()[1])


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    root = tmp_path / "root"
    root.mkdir()
    async with serve_api(tmp_path / "data", data_root=root) as api:
        yield api


async def test_in_a_body(api: Api) -> None:
    for path, body in BODIES.values():
        for content in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")):
            async with api.http.post(path, data=content, headers={"Content-Type": "application/json"}) as response:
                text = await response.text()
                assert 400 <= response.status < 500 and "too early" not in text, (path, body, text)
    await api.works()


BAD = [b"%FF", b"%ED%A0%80", b"%00", b"\xff", b"\xed\xa0\x80"]
HEADS = [
    b"GET /adapters/BAD HTTP/1.1",
    b"GET /adapters?after=BAD HTTP/1.1",
    b"GET /finetune/BAD HTTP/1.1",
    b"GET /finetune?after=BAD HTTP/1.1",
    b"GET /finetune/BAD/events HTTP/1.1",
    b"GET /v1/models/BAD HTTP/1.1",
    b"DELETE /adapters/BAD HTTP/1.1",
    b"GET /BAD HTTP/1.1",
]


@pytest.mark.parametrize("head", HEADS)
async def test_in_a_url(api: Api, head: bytes) -> None:
    for bad in BAD:
        assert 200 <= await asked(api, head.replace(b"BAD", bad)) < 500, bad
    await api.works()


@pytest.mark.parametrize("name", [b"Idempotency-Key", b"Authorization", b"Origin", b"Content-Type", b"X-Request-Id"])
async def test_in_a_header(api: Api, name: bytes) -> None:
    body = json.dumps({"adapter": "a", "data": ROWS}).encode()
    for bad in (b"\xff", b"\xed\xa0\x80", b"a\xc3"):
        kind = b"" if name == b"Content-Type" else b"\r\nContent-Type: application/json"
        head = b"POST /finetune HTTP/1.1" + kind + b"\r\n" + name + b": " + bad
        assert await asked(api, head, body) < 500, bad
    assert await asked(api, b"GET /finetune/x/events HTTP/1.1\r\nLast-Event-ID: \xff") < 500
    await api.works()


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam")
@pytest.mark.parametrize(
    "name", [b'name="file"; filename="\xff"', b'name="\xff"', b"name=\"file\"; filename*=UTF-8''%ED%A0%80"]
)
async def test_in_the_names_of_a_form(api: Api, name: bytes) -> None:
    settings = b'--b\r\nContent-Disposition: form-data; name="settings"\r\n\r\n{"adapter": "poet"}\r\n'
    file = b"--b\r\nContent-Disposition: form-data; " + name + b'\r\n\r\n{"text": "cat"}\r\n--b--\r\n'
    head = b"POST /PATH HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b"
    for path in (b"finetune", b"adapters"):
        assert await asked(api, head.replace(b"PATH", path), settings + file) < 500
    await api.works()


async def test_in_an_adapters_files(api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "root" / "files"
    asked = {"name": "poet", "path": str(folder)}
    write_peft(folder, api.base)
    good = json.loads((folder / "adapter_config.json").read_text())
    for key in ("revision", "peft_version", "base_model_name_or_path", "target_modules", "exclude_modules", HALF):
        bad = [HALF] if key.endswith("modules") else HALF
        config = good | {key: bad}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found = await api.refused(422, "corrupt_adapter", "POST", "/adapters", json=asked)
        assert "surrogate" in found["message"]
    (folder / "adapter_config.json").write_text(json.dumps(good))
    status, body = await api.call("POST", "/adapters", json=asked)
    assert (status, body["version"]) == (201, 1), "no refused import has taken a version"
