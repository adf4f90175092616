"""API keys, projects and quotas: what a key may do, what it sees, and what is left of its project's quota."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from coserve.api.access.keys import KeyRing
from coserve.api.access.quotas import Quotas, duration
from coserve.api.access.scopes import scopes_of
from coserve.api.app import ROUTES
from coserve.core.access.principal import Scope
from coserve.core.access.schemas import CreateKey, Quota
from coserve.core.errors import QuotaExceeded, Unauthorized
from coserve.core.link.generation import Generate
from coserve.core.link.jobs import JobSnapshot
from coserve.core.names import CHECKPOINT_STATE
from coserve.core.types import AdapterRef, LoraSettings
from coserve.state.session_states import SessionState, write_state
from tests.support.api_server import Api, form, serve_api
from tests.support.fake_engine import write_peft

OWNER = "the-daemons-own-key"
ROW = {"text": "the cat sat on the mat"}
ROWS_FILE = json.dumps(ROW).encode() * 3


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(api: Api, key: str, method: str, path: str, **kwargs: Any) -> tuple[int, Any]:
    return await api.call(method, path, headers=bearer(key) | kwargs.pop("headers", {}), **kwargs)


async def new_key(api: Api, project: str, *scopes: str, **more: Any) -> tuple[str, str]:
    """The id and the secret of a new key."""
    body = {"project": project, "scopes": scopes, **more}
    status, made = await ask(api, OWNER, "POST", "/admin/keys", json=body)
    assert status == 201, made
    return made["key"]["id"], made["secret"]


async def quota(api: Api, project: str, **limits: int) -> None:
    assert (await ask(api, OWNER, "PUT", f"/admin/quotas/{project}", json=limits))[0] == 200


async def used(api: Api, project: str) -> object:
    status, body = await ask(api, OWNER, "GET", "/admin/quotas")
    assert status == 200
    return body["used"][project]


def rows_file(content: Any = ROWS_FILE, purpose: str = "fine-tune") -> aiohttp.FormData:
    made = aiohttp.FormData()
    made.add_field("purpose", purpose)
    made.add_field("file", content, filename="rows.jsonl")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with serve_api(tmp_path_factory.mktemp("shared") / "data", api_key=OWNER) as api:
        yield api


@pytest.mark.asyncio(loop_scope="module")
async def test_a_key_is_shown_once_and_kept_as_a_hash(shared: Api) -> None:
    id, secret = await new_key(shared, "acme", "generate", name="an app")
    assert (await ask(shared, secret, "POST", "/generate", json={"prompt": "x"}))[0] == 200
    status, listed = await ask(shared, OWNER, "GET", "/admin/keys")
    found = next(key for key in listed["data"] if key["id"] == id)
    assert status == 200 and (found["project"], found["scopes"], found["name"]) == ("acme", ["generate"], "an app")
    assert secret not in json.dumps(listed)
    stored = b"".join(path.read_bytes() for path in shared.folder.root.glob("registry*"))
    assert secret.partition(f"{id}-")[2].encode() not in stored
    for wrong in (secret[:-1], f"csk-{id}-", f"csk-{id}", secret.replace(id, "0" * len(id)), "csk--"):
        assert (await ask(shared, wrong, "POST", "/generate", json={"prompt": "x"}))[0] == 401


@pytest.mark.asyncio(loop_scope="module")
async def test_each_route_needs_a_scope(shared: Api) -> None:
    keys = {scope: (await new_key(shared, "scoped", scope))[1] for scope in ("admin", "train", "generate")}
    needed: dict[tuple[str, str], set[str]] = {}
    for route in shared.app[ROUTES]:
        if route.public:
            continue
        allowed = {str(scope) for scope in scopes_of(route.method, route.path)} or set(keys)
        needed[route.method, route.path] = allowed
        for scope, key in keys.items():
            path = re.sub(r"{\w+}", "x", route.path)
            if route.media is not None or ("admin" in (scope, *allowed) and scope in allowed):
                continue  # what it does is not of interest here
            status, body = await ask(shared, key, route.method, path)
            refused = status == 403
            assert refused == (scope != "admin" and scope not in allowed), (route.method, path, scope, body)
    assert needed["GET", "/metrics"] == needed["POST", "/admin/keys"] == {"admin"}
    assert needed["POST", "/generate"] == needed["POST", "/v1/chat/completions"] == needed["POST", "/"] == {"generate"}
    assert needed["POST", "/finetune"] == needed["DELETE", "/v1/models/{id}"] == {"train"}
    assert needed["POST", "/v1/responses"] == needed["POST", "/v1/batches"] == {"generate"}
    assert needed["GET", "/adapters"] == needed["POST", "/v1/files"] == {"generate", "train"}
    assert scopes_of("GET", "/a/route/of/tomorrow") == {Scope.ADMIN}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_project_sees_and_uses_only_what_is_its_own(shared: Api, tmp_path: Path) -> None:
    _, one = await new_key(shared, "one", "train", "generate")
    _, two = await new_key(shared, "two", "train", "generate")
    write_peft(tmp_path / "peft", shared.base, rank=2, value=1.0)

    def upload(name: str) -> aiohttp.FormData:
        return form({"name": name}, *(tmp_path / "peft").iterdir())

    assert (await ask(shared, one, "POST", "/adapters", data=upload("secret")))[0] == 201
    job = {"adapter": "hidden", "data": [ROW], "training": {"steps": 1}}
    status, mine = await ask(shared, one, "POST", "/finetune", json=job, headers={"Idempotency-Key": "k"})
    assert status == 202, mine
    status, file = await ask(shared, one, "POST", "/v1/files", data=rows_file(purpose="batch"))
    assert status == 200, file

    # the owner and the administrator find them, the other project does not
    listings = {"/adapters": "secret", "/v1/models": "secret", "/finetune": mine["id"], "/v1/files": file["id"]}
    listings["/v1/fine_tuning/jobs"] = mine["id"].removeprefix("job-")
    batch = {"input_file_id": file["id"], "endpoint": "/v1/responses", "completion_window": "24h"}
    status, made = await ask(shared, one, "POST", "/v1/batches", json=batch)
    assert status == 200, made
    listings["/v1/batches"] = made["id"]
    status, answer = await ask(shared, one, "POST", "/v1/responses", json={"input": "x"})
    assert status == 200, answer
    listings[f"/v1/responses/{answer['id']}/input_items"] = "input_text"
    for path, name in listings.items():
        for key, sees in ((one, True), (OWNER, True), (two, False)):
            assert (name in json.dumps((await ask(shared, key, "GET", path))[1])) == sees, (path, key)
    body = {"prompt": "x", "adapter": "secret"}
    for method, path, sent in (
        ("GET", "/adapters/secret", None),
        ("GET", "/adapters/secret@1", None),
        ("GET", "/adapters/secret/download", None),
        ("POST", "/adapters/secret/prefetch", None),
        ("POST", "/adapters/secret/rollback", {"version": 1}),
        ("POST", "/adapters/secret/convert", {"bd_blocks": 2}),
        ("DELETE", "/adapters/secret", None),
        ("DELETE", "/v1/models/secret", None),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "secret"}),
        ("GET", "/v1/models/secret", None),
        ("POST", "/generate", body),
        ("POST", "/v1/completions", {"model": "secret", "prompt": "x"}),
        ("POST", "/generate", body | {"adapter": "hidden"}),
        ("POST", "/finetune", job | {"adapter": "new", "continue_from": "secret"}),
        ("POST", "/finetune", job | {"adapter": "new", "teacher": "secret"}),
        ("GET", f"/finetune/{mine['id']}", None),
        ("GET", f"/finetune/{mine['id']}/events", None),
        ("POST", f"/finetune/{mine['id']}/pause", None),
        ("POST", f"/finetune/{mine['id']}/resume", None),
        ("POST", f"/finetune/{mine['id']}/cancel", None),
        ("DELETE", f"/finetune/{mine['id']}", None),
        ("GET", f"/finetune?after={mine['id']}", None),
        ("GET", f"/v1/files/{file['id']}", None),
        ("GET", f"/v1/files/{file['id']}/content", None),
        ("DELETE", f"/v1/files/{file['id']}", None),
        ("POST", "/v1/batches", batch),
        ("GET", f"/v1/batches/{made['id']}", None),
        ("POST", f"/v1/batches/{made['id']}/cancel", None),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": answer["id"]}),
        ("GET", f"/v1/responses/{answer['id']}", None),
        ("DELETE", f"/v1/responses/{answer['id']}", None),
    ):
        status, found = await ask(shared, two, method, path, **({} if sent is None else {"json": sent}))
        assert status == 404, (method, path, found)
        told = json.dumps(found)
        assert "versions" not in told and "training" not in told and "did you mean" not in told, told
    # a name belongs to one project; an idempotency key does not
    status, found = await ask(shared, two, "POST", "/adapters", data=upload("secret"))
    assert (status, found["error"]["code"], found["error"]["field"]) == (409, "name_taken", "name")
    status, found = await ask(shared, two, "POST", "/finetune", json=job)
    assert (status, found["error"]["code"]) == (409, "name_taken") and mine["id"] not in json.dumps(found)
    other = job | {"adapter": "own"}
    status, found = await ask(shared, two, "POST", "/finetune", json=other, headers={"Idempotency-Key": "k"})
    assert status == 202 and found["id"] != mine["id"]
    # a near miss names nothing of another project
    status, found = await ask(shared, two, "POST", "/generate", json=body | {"adapter": "secre"})
    assert status == 404 and "secret" not in json.dumps(found)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_list_of_saved_states_has_those_of_the_project(shared: Api) -> None:
    keys = {project: (await new_key(shared, project, "train"))[1] for project in ("one", "two")}
    state = SessionState(shared.base.name, shared.base.fingerprint, LoraSettings(), 0, 0, "one")
    for name in ("hidden", "unfinished"):
        (folder := shared.folder.session_state("s.train.0", name)).mkdir(parents=True)
        if name == "hidden":
            write_state(folder / CHECKPOINT_STATE, state)
    for project, expected in (("one", ["weights/hidden"]), ("two", [])):
        status, found = await ask(shared, keys[project], "GET", "/api/v1/training_runs/s:train:0/checkpoints")
        assert status == 200, found
        assert [each["checkpoint_id"] for each in found["checkpoints"]] == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_projects_share_no_cached_prefix(shared: Api) -> None:
    _, one = await new_key(shared, "one", "generate")
    _, two = await new_key(shared, "two", "generate")
    for key, salt in ((one, ""), (one, "s"), (two, ""), (two, "s"), (two, "one\x1f"), (OWNER, "one\x1f")):
        body = {"prompt": "x", "cache_salt": salt}
        assert (await ask(shared, key, "POST", "/generate", json=body))[0] == 200
    salts = [message.cache_salt for message in shared.engine.heard(Generate)][-6:]
    assert len(set(salts)) == 6


@pytest.mark.asyncio(loop_scope="module")
async def test_samples_of_a_job_are_cached_for_its_project(shared: Api) -> None:
    _, key = await new_key(shared, "sampling", "train")
    training = {"steps": 1, "sample_prompts": ["the cat"]}
    shared.engine.go_jobs.clear()
    _, job = await ask(shared, key, "POST", "/finetune", json={"adapter": "s", "data": [ROW], "training": training})
    count = len(shared.engine.heard(Generate))
    shared.engine.link.send(JobSnapshot(id=job["id"], step=1, ref=AdapterRef("s", 1)))
    assert (await shared.engine.saw(Generate, count + 1))[-1].cache_salt == "sampling\x1f"
    shared.engine.go_jobs.set()
    assert (await ask(shared, key, "POST", f"/finetune/{job['id']}/cancel"))[0] in (200, 409)


@pytest.mark.asyncio(loop_scope="module")
async def test_quotas_are_told_and_enforced_in_each_dialect(shared: Api) -> None:
    _, key = await new_key(shared, "small", "generate", "train")
    await quota(shared, "small", requests_per_minute=2, tokens_per_minute=200)
    prompt = "the cat sat " * 16  # 81 tokens: a minute gives back 200, and a busy machine takes seconds
    async with shared.openai(key) as client:
        raw = await client.completions.with_raw_response.create(model="fake", prompt=prompt, max_tokens=3)
        assert raw.headers["x-ratelimit-limit-requests"] == "2" and raw.headers["x-ratelimit-limit-tokens"] == "200"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
        await client.completions.create(model="fake", prompt=prompt, max_tokens=3)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="fake", prompt="x", max_tokens=3)
    error = refused.value
    assert (error.type, error.code) == ("rate_limit_error", "quota_exceeded")
    assert 1 <= int(error.response.headers["retry-after"]) <= 30
    assert int(error.response.headers["x-ratelimit-remaining-tokens"]) < 200
    status, body = await ask(shared, key, "POST", "/generate", json={"prompt": "x"})
    assert (status, body["error"]["code"]) == (429, "quota_exceeded")
    status, body = await ask(shared, key, "POST", "/generate_stream", json={"inputs": "x"})
    assert (status, body["error_type"]) == (429, "overloaded")
    assert (await ask(shared, key, "GET", "/adapters"))[0] == 200  # costs nothing

    await quota(shared, "small", tokens_per_minute=4)  # in place of the limit of requests, and at once
    assert (await ask(shared, key, "POST", "/generate", json={"prompt": "the cat sat"}))[0] == 200  # and goes into debt
    status, body = await ask(shared, key, "POST", "/generate", json={"prompt": "x"})
    assert status == 429 and "4 tokens" in body["error"]["message"]
    await quota(shared, "small")
    assert (await ask(shared, key, "POST", "/generate", json={"prompt": "x"}))[0] == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_quotas_of_jobs_and_bytes(shared: Api) -> None:
    _, key = await new_key(shared, "tiny", "train")
    shared.engine.go_jobs.clear()
    await quota(shared, "tiny", jobs=1, bytes=2000)
    job = {"data": [ROW], "training": {"steps": 1}}
    status, made = await ask(shared, key, "POST", "/finetune", json=job | {"adapter": "first"})
    assert status == 202
    status, body = await ask(shared, key, "POST", "/finetune", json=job | {"adapter": "second"})
    assert (status, body["error"]["code"]) == (429, "quota_exceeded")
    assert await used(shared, "tiny") == {"jobs": 1, "bytes": 0}
    assert (await ask(shared, key, "POST", f"/finetune/{made['id']}/cancel"))[0] == 200
    shared.engine.go_jobs.set()
    status, file = await ask(shared, key, "POST", "/v1/files", data=rows_file(b"x" * 1200))
    assert status == 200
    status, body = await ask(shared, key, "POST", "/v1/files", data=rows_file(b"x" * 1200))
    assert (status, body["error"]["code"]) == (413, "storage_quota_exceeded")
    said = r"has 1200 bytes of files and adapters, and 1\d{3} more arrive; its quota is 2000"
    assert re.search(said, body["error"]["message"]), body
    assert await used(shared, "tiny") == {"jobs": 0, "bytes": 1200}
    assert (await ask(shared, key, "DELETE", f"/v1/files/{file['id']}"))[0] == 200
    assert (await ask(shared, key, "POST", "/v1/files", data=rows_file(b"x" * 1200)))[0] == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/adapters", {"name": "mine", "path": "mine"}),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "mine"}),
    ],
)
async def test_a_quota_of_bytes_holds_for_files_of_the_daemons_machine(
    tmp_path: Path, route: str, body: dict[str, str]
) -> None:
    root = tmp_path / "root"
    async with serve_api(tmp_path / "data", api_key=OWNER, data_root=root) as api:
        write_peft(root / "mine", api.base, rank=2, value=1.0)
        _, key = await new_key(api, "copies", "train")
        size = sum(path.stat().st_size for path in (root / "mine").iterdir())
        await quota(api, "copies", bytes=size - 1)
        assert (await ask(api, key, "POST", route, json=body))[0] == 413
        await quota(api, "copies", bytes=size)
        both = [ask(api, key, "POST", "/adapters", json={"name": name, "path": "mine"}) for name in ("one", "two")]
        assert sorted([status for status, _ in await asyncio.gather(*both)]) == [201, 413]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_quota_of_bytes_holds_for_what_a_gzip_file_becomes(shared: Api, tmp_path: Path) -> None:
    (tmp_path / "rows.gz").write_bytes(gzip.compress(ROWS_FILE * 1000))
    _, key = await new_key(shared, "bombs", "train")
    await quota(shared, "bombs", bytes=3000)
    sent = form({"adapter": "bomb"}, tmp_path / "rows.gz")
    status, body = await ask(shared, key, "POST", "/finetune", data=sent)
    assert (status, body["error"]["code"]) == (422, "unreadable_corpus")
    assert body["error"]["message"].startswith("expected at most 3000 bytes of unpacked rows")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", ["/adapters", "/v1/load_lora_adapter"])
async def test_a_quota_of_bytes_holds_for_what_an_archive_becomes(shared: Api, tmp_path: Path, route: str) -> None:
    write_peft(tmp_path / "peft", shared.base, rank=64)
    archive = Path(shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path / "peft"))
    name = "name" if route == "/adapters" else "lora_name"
    _, key = await new_key(shared, project := f"archives-{name}", "train")
    await quota(shared, project, bytes=3000)
    sent = form({name: f"of-{name}"}, archive)
    async with shared.http.post(route, data=sent, headers=bearer(key)) as response:
        assert (response.status, "storage_quota_exceeded" in await response.text()) == (413, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_quota_of_bytes_holds_while_bodies_arrive(shared: Api) -> None:
    """No body tells its size: each chunk counts, with those of the project's other bodies."""
    _, key = await new_key(shared, "streaming", "train")
    await quota(shared, "streaming", bytes=300_000)
    go_on = asyncio.Event()

    async def first() -> AsyncIterator[bytes]:
        yield b"x" * 200_000
        await go_on.wait()

    async def second() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10_000

    def sent(content: AsyncIterator[bytes]) -> Any:
        return ask(shared, key, "POST", "/v1/files", data=rows_file(content))

    async with asyncio.TaskGroup() as tasks:
        upload = tasks.create_task(sent(first()))
        async with asyncio.timeout(60):
            while not any(path.stat().st_size > 100_000 for path in shared.folder.staging.glob("*/file")):
                await shared.call("GET", "/health")
        status, body = await sent(second())
        assert (status, body["error"]["code"]) == (413, "storage_quota_exceeded"), body
        go_on.set()
    assert upload.result()[0] == 200
    assert (await ask(shared, key, "POST", "/v1/files", data=rows_file(b"x" * 90_000)))[0] == 200
    rows = json.dumps({"data": [ROW], "adapter": "x" * 20_000}).encode()

    async def row() -> AsyncIterator[bytes]:
        yield rows

    headers = {"Content-Type": "application/json"}
    status, body = await ask(shared, key, "POST", "/finetune", data=row(), headers=headers)
    assert (status, body["error"]["code"]) == (413, "storage_quota_exceeded")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_revocation_ends_what_is_in_progress(shared: Api) -> None:
    id, key = await new_key(shared, "gone", "train")
    job = {"adapter": "gone", "data": [ROW], "training": {"steps": 1}}
    shared.engine.go_jobs.clear()
    _, made = await ask(shared, key, "POST", "/finetune", json=job)
    async with shared.http.get(f"/finetune/{made['id']}/events", headers=bearer(key)) as events:
        assert events.status == 200
        status, revoked = await ask(shared, OWNER, "DELETE", f"/admin/keys/{id}")
        assert status == 200 and revoked["revoked_at"] is not None
        with pytest.raises(aiohttp.ClientError):
            async with asyncio.timeout(60):
                await events.read()
    status, body = await ask(shared, key, "GET", "/finetune")
    assert status == 401 and "revoked" in body["error"]["message"]
    assert (await ask(shared, OWNER, "DELETE", f"/admin/keys/{id}"))[1] == revoked  # again, with the same time
    assert (await ask(shared, OWNER, "DELETE", "/admin/keys/unknown"))[0] == 404


async def test_keys_need_no_other_key_on_loopback_until_there_is_one(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data") as api:
        await api.works()
        status, body = await api.call("POST", "/admin/keys", json={"scopes": ["generate"]})
        assert (status, body["error"]["field"]) == (400, "scopes")  # nobody could make another one
        _, made = await api.call("POST", "/admin/keys", json={"scopes": ["admin"]})
        assert (await api.call("GET", "/adapters"))[0] == 401
        async with api.http.get("/health") as response:
            assert response.status == 200
        with closing(sqlite3.connect(api.folder.database)) as db:
            assert db.execute("SELECT count(*) FROM api_keys").fetchone() == (1,)
        status, body = await ask(api, made["secret"], "DELETE", f"/admin/keys/{made['key']['id']}")
        assert (status, body["error"]["field"]) == (400, "id")  # nobody could make another one
        _, other = await ask(api, made["secret"], "POST", "/admin/keys", json={"scopes": ["admin"]})
        both = {each["key"]["id"]: each["secret"] for each in (made, other)}
        await asyncio.gather(  # each revokes the other's in the same moment: one key stays
            *(ask(api, both[mine], "DELETE", f"/admin/keys/{their}") for mine, their in (list(both), list(both)[::-1])),
            return_exceptions=True,  # the connection of the one whose key is revoked may be closed
        )
        left = [each for each in (made, other) if (await ask(api, each["secret"], "GET", "/adapters"))[0] == 200]
        assert len(left) == 1
        made = left[0]
    async with serve_api(tmp_path / "data") as api:  # a restart keeps them
        assert (await api.call("GET", "/adapters"))[0] == 401
        assert (await ask(api, made["secret"], "GET", "/adapters"))[0] == 200


def test_a_key_expires() -> None:
    now = 100.0
    ring = KeyRing("x" * 16, clock=lambda: now)
    record, secret = ring.make(CreateKey(scopes=[Scope.TRAIN], project="acme", expires_in=5))
    ring.load([record])
    assert ring.principal_of(f"Bearer {secret}").project == "acme"
    now = 105.0
    with pytest.raises(Unauthorized, match="expired"):
        ring.principal_of(f"Bearer {secret}")


def test_a_bucket_refills_and_pays_its_debts() -> None:
    now = 0.0
    quotas = Quotas(clock=lambda: now)
    quotas.set("acme", Quota(tokens_per_minute=60))
    quotas.charge("acme", 90)
    with pytest.raises(QuotaExceeded) as refused:
        quotas.admit("acme")
    assert refused.value.retry_after == 31
    assert quotas.headers("acme")["x-ratelimit-reset-tokens"] == "1m30s"
    now = 31.0
    quotas.admit("acme")
    now = 1e6
    assert quotas.headers("acme")["x-ratelimit-remaining-tokens"] == "60"
    shown = {0.0121: "13ms", 1.5: "1.5s", 119.7: "2m0s", 360: "6m0s"}
    assert [duration(seconds) for seconds in shown] == [*shown.values()]
