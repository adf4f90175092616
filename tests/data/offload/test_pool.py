"""Helper processes: results, errors, death, cancellation."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest

from coserve.api.http import bodies
from coserve.core.errors import HelperLost, InternalError, InvalidRequest, MalformedRow
from coserve.core.logs import LogSettings
from coserve.data.offload.pool import MAX_MEMORY, HelperPool, HelperProcess
from coserve.state import failpoints
from tests.support import tasks
from tests.support.api_server import serve_api, tokenizer
from tests.support.tokenizers import sentencepiece_like


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool(tokenizer().state, 1)
    yield pool
    await pool.close()


async def helper_pid(pool: HelperPool) -> int:
    return await pool.run(tasks.pid)


async def until(found: Callable[[], bool]) -> None:
    """Until `found()`; four minutes at most."""
    async with asyncio.timeout(240):
        while not found():  # noqa: ASYNC110  # files and processes send no events
            await asyncio.sleep(0.002)


def lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> None:
    """Until the process has ended and this one has heard of it."""
    await until(lambda: not lives(pid))
    await asyncio.sleep(0.01)


async def test_results_errors_and_large_bodies(pool: HelperPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSERVE_API_KEY", "0123456789abcdef")
    assert await pool.run(tasks.key) == "none"
    first = await helper_pid(pool)
    body = bytes(range(256)) * 20_000
    assert await pool.run(tasks.echo, body) == body
    with pytest.raises(InvalidRequest, match="expected more") as refused:
        await pool.run(tasks.refuse)
    assert refused.value.field == "a.b"
    with pytest.raises(MalformedRow, match=r"^line 7: expected text$") as row:
        await pool.run(tasks.refuse_row)
    assert row.value.line == 7
    with pytest.raises(InternalError, match=r"^internal error$"):
        await pool.run(tasks.fail)
    text = "the cat sat"
    assert await pool.run(tasks.tokens, text) == tokenizer().encode(text)
    assert await helper_pid(pool) == first  # errors don't cost a process


@pytest.mark.slow
async def test_a_parent_with_much_memory_costs_no_process(pool: HelperPool) -> None:
    """Linux counts the parent's resident memory into the peak of a process that it starts."""
    held = b"x" * (MAX_MEMORY + (64 << 20))
    first = await helper_pid(pool)
    assert await helper_pid(pool) == first
    del held


async def test_a_call_that_is_cancelled_takes_its_process_with_it(pool: HelperPool, tmp_path: Path) -> None:
    first = await helper_pid(pool)
    call = asyncio.create_task(pool.run(tasks.sleep, str(began := tmp_path / "began")))
    await until(began.exists)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert not lives(first)
    assert await helper_pid(pool) != first


async def test_a_process_that_is_killed_is_replaced(pool: HelperPool, tmp_path: Path) -> None:
    first = await helper_pid(pool)
    call = asyncio.create_task(pool.run(tasks.sleep, str(began := tmp_path / "began")))
    await until(began.exists)  # one that had not begun would be run by another process
    os.kill(first, signal.SIGKILL)
    with pytest.raises(HelperLost):
        await call
    second = await helper_pid(pool)
    os.kill(second, signal.SIGKILL)  # while it has nothing to do
    await gone(second)
    assert await helper_pid(pool) not in (first, second)


async def test_those_that_were_killed_while_they_had_nothing_to_do_cost_no_call() -> None:
    """Their end is not known yet: the call goes to them."""
    pool = HelperPool(tokenizer().state, 2)
    pids = await asyncio.gather(helper_pid(pool), helper_pid(pool))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    call = asyncio.create_task(pool.run(tasks.echo, body := bytes(8 << 20)))
    await asyncio.sleep(0.05)  # it is being written
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert await call == body
    assert await helper_pid(pool) not in pids
    await pool.close()


async def test_a_task_that_killed_its_process_is_not_run_again(pool: HelperPool, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    await helper_pid(pool)
    with pytest.raises(HelperLost):
        await pool.run(tasks.die, str(runs))
    assert runs.read_text() == "ran\n"


async def test_a_stuck_process_is_killed_and_one_that_works_is_not(pool: HelperPool, tmp_path: Path) -> None:
    first = await helper_pid(pool)
    pool.silence = 4.0
    assert await pool.run(tasks.work) == "done"
    assert await helper_pid(pool) == first
    pool.silence = 0.1
    with pytest.raises(InvalidRequest, match="within 0 s"):
        await pool.run(tasks.sleep, str(tmp_path / "began"))
    assert not lives(first)


async def test_a_process_that_stops_within_its_answer_is_stuck_too(pool: HelperPool) -> None:
    first = await helper_pid(pool)
    pool.silence = 0.1
    with pytest.raises(InvalidRequest):
        await pool.run(tasks.half_an_answer)
    assert not lives(first)


async def test_a_process_that_does_not_read_what_is_sent_is_stuck_too(pool: HelperPool) -> None:
    os.kill(first := await helper_pid(pool), signal.SIGSTOP)
    pool.silence = 0.1
    with pytest.raises(InvalidRequest):
        await pool.run(tasks.echo, bytes(8 << 20))
    assert not lives(first)


async def test_a_process_that_dies_while_it_starts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone before it has read its set-up."""
    pool = HelperPool(lambda: bytes(64 << 20), 1)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(HelperLost):
        await pool.run(tasks.echo, b"")
    await pool.close()


async def test_a_process_that_has_grown_is_replaced() -> None:
    pool = HelperPool(tokenizer().state, 1, max_memory=1)
    first = await helper_pid(pool)
    assert await helper_pid(pool) != first
    await pool.close()


async def test_other_tokenizers_cross_too() -> None:
    from coserve.data.pretrained.tokenizer import Tokenizer

    mine = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    there = Tokenizer.from_state(mine.state())
    for text in ("hello there", "x" * 5000, "the <eos> lo"):
        assert there.encode(text) == mine.encode(text)
    assert (there.eos_token_ids, there.bos_token_id) == (mine.eos_token_ids, mine.bos_token_id)


ROWS = [{"text": f"row {number}: the cat sat on the mat"} for number in range(20_000)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "written"),
    [({"path": "rows.jsonl"}, "*.lengths"), ({"data": ROWS}, "*.lengths"), ({"data": ROWS}, "rows-*")],
    ids=["a file", "rows", "rows while they are decoded"],
)
async def test_a_client_that_leaves_ends_the_work_on_its_corpus(
    tmp_path: Path, body: dict[str, object], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's rows are read in a process that ends with its client, and nothing of them stays on the disk."""
    monkeypatch.setenv(failpoints.VARIABLE, "corpus.temp_write=delay:600s")  # of the process that tokenises
    root = tmp_path / "root"
    root.mkdir()
    (root / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS[:2000]))
    async with serve_api(tmp_path / "data", data_root=root) as api:
        before = children()
        call = asyncio.create_task(api.call("POST", "/finetune", json={"adapter": "poet", **body}))
        await until(lambda: any(api.folder.staging.rglob(written)))
        started = children() - before
        assert started
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        if written != "rows-*":  # the process that decodes waits for more rows, and no other may have started yet
            await until(lambda: not all(map(lives, started)))
        await api.works()
        assert api.folder.job_ids() == []
        await until(lambda: not any(api.folder.staging.iterdir()))


async def test_rows_that_the_disk_does_not_take_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "decode_corpus", tasks.full_disk)
    async with serve_api(tmp_path / "data") as api:
        await api.error(507, "storage_full", "POST", "/finetune", json={"adapter": "poet", "data": ROWS[:3000]})
        assert list(api.folder.staging.iterdir()) == []


@pytest.mark.slow
async def test_a_large_corpus_becomes_the_same_job_as_in_this_process(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} of the corpus, the cat sat on the mat"} for number in range(3000)]
    async with serve_api(tmp_path / "data") as api:
        api.engine.go_jobs.clear()
        inline = await api.answered(202, "POST", "/finetune", json={"adapter": "inline", "data": rows})
        form = aiohttp.FormData()
        form.add_field("settings", '{"adapter": "file"}')
        form.add_field("file", b"".join(msgspec.json.encode(row) + b"\n" for row in rows), filename="rows.jsonl")
        upload = await api.answered(202, "POST", "/finetune", data=form)
        assert (inline["rows"], inline["tokens"]) == (upload["rows"], upload["tokens"])
        first, second = (api.folder.corpus(job["id"]).read_bytes() for job in (inline, upload))
        assert first == second
        assert list(api.folder.staging.iterdir()) == []
        bad = [*rows, {"txt": "x"}]
        status, body = await api.call("POST", "/finetune", json={"adapter": "bad", "data": bad})
        assert (status, body["error"]["code"], body["error"]["line"]) == (422, "malformed_row", 3001)


def children() -> set[int]:
    """Helper processes of this one."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


async def test_a_call_that_is_cancelled_while_its_process_starts_leaves_none() -> None:
    before = children()
    for turns in range(16):
        starting = asyncio.create_task(HelperProcess.begin(b"", LogSettings()))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await (await starting).end()
        await until(lambda: children() == before)
