"""Whatever a base's chat template does, the API answers, with a typed error, and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.api_server import Api, serve_api, with_template
from tests.support.examples import on_days

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'half' %}{{ '%c' % 55296 }}"
    "{% elif m.content == 'say' %}{{ raise_exception('%c' % 55296) }}"
    "{% elif m.content == 'large' %}{{ '%999999999d' % 1 }}"
    "{% elif m.content == 'indent' %}{{ 'x' | indent(1000000000, true) }}"
    "{% elif m.content == 'separators' %}{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}"
    "{% elif m.content == 'long' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {},
    "/v1/chat/completions": {"model": "fake"},
    "/tokenize": {},
}


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
