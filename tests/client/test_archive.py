"""An adapter's download: whole or not at all, and nothing of the archive's own choosing."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from coserve.client import Response
from coserve.client.adapter_files import save_adapter
from coserve.core.errors import CorruptAdapter, Unreachable
from tests.support.sdk import streamed

FILES = {"a-1/adapter_config.json": b"{}", "a-1/adapter_model.safetensors": b"x" * 9999}


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def tar(files: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content) if kind == tarfile.REGTYPE else 0
            info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("exists", [False, True])
async def test_the_files_land_in_the_folder(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "parent" / "adapter"
    if exists:
        folder.mkdir(parents=True)
    body = tar(FILES)
    got = await save_adapter(Response(200, {}, streamed([body[:700], body[700:]])), folder)
    assert got == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"x" * 9999,
    }
    assert names(folder.parent) == ["adapter"]


@pytest.mark.parametrize(
    "body",
    [
        tar({**FILES, "a-1/evil.py": b"x"}),
        tar({**FILES, "other/adapter_config.json": b"x"}),
        tar({"a-1/adapter_config.json": b"{}"}),
        tar(FILES, kind=tarfile.SYMTYPE),
        tar(FILES, kind=tarfile.LNKTYPE),
        tar(FILES)[:1500],
        b"no tar at all" * 99,
        b"",
    ],
    ids=["stranger", "twice", "missing", "symlink", "hardlink", "truncated", "garbage", "empty"],
)
async def test_anything_else_is_refused_and_leaves_nothing(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(CorruptAdapter):
        await save_adapter(Response(200, {}, body), tmp_path / "adapter")
    assert names(tmp_path) == []


async def test_paths_in_the_archive_mean_nothing(tmp_path: Path) -> None:
    files = {f"../../{name}": content for name, content in FILES.items()}
    await save_adapter(Response(200, {}, tar(files)), tmp_path / "in" / "adapter")
    assert names(tmp_path, "**/*.json") == ["adapter_config.json"]
    assert names(tmp_path / "in" / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]


async def test_a_broken_connection_leaves_nothing(tmp_path: Path) -> None:
    async def body():
        yield tar(FILES)[:600]
        raise Unreachable("broke", sent=True)

    with pytest.raises(Unreachable):
        await save_adapter(Response(200, {}, body()), tmp_path / "adapter")
    assert names(tmp_path) == []


async def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    closed: list[bool] = []
    with pytest.raises(FileExistsError):
        await save_adapter(Response(200, {}, tar(FILES), close=lambda: closed.append(True)), tmp_path)
    assert closed and names(tmp_path) == ["mine"]


async def test_a_place_where_nothing_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file" / "adapter", Path("/proc/adapter")):
        with pytest.raises(OSError) as refused:
            await save_adapter(Response(200, {}, tar(FILES)), folder)
        assert refused.value.filename == str(folder)


@pytest.mark.parametrize("times", [1, 2])
async def test_whoever_leaves_at_any_moment_leaves_nothing_behind(tmp_path: Path, times: int) -> None:
    """The folder is whole or not there, whichever turn of the loop it is, and whether it is told once or twice."""
    body = tar(FILES)
    for turn in range(40):
        folder = tmp_path / f"adapter{turn}"
        task = asyncio.create_task(save_adapter(Response(200, {}, streamed([body[:700], body[700:]])), folder))
        for _ in range(turn):
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        assert names(tmp_path, ".download-*") == []
        assert not folder.exists() or names(folder) == ["adapter_config.json", "adapter_model.safetensors"]


async def test_whoever_leaves_twice_while_files_are_unpacked_leaves_nothing_behind(tmp_path: Path) -> None:
    body = tar({**FILES, "a-1/adapter_model.safetensors": b"x" * (8 << 20)})
    for delay in range(12):
        task = asyncio.create_task(save_adapter(Response(200, {}, streamed([body])), tmp_path / f"adapter{delay}"))
        await asyncio.sleep(delay / 1000)
        task.cancel()
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert names(tmp_path, ".download-*") == []
