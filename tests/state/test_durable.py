from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coserve.core.errors import StorageError, StorageFailed, StorageFull
from coserve.state.durable import disk_errors, make_folder, read_errors, remove_dir, replace_dir, sweep, write_file
from coserve.state.failpoints import FILE_STEPS, VARIABLE, armed

V1, V2 = b"old" * 1000, b"new!" * 1500
CHILD = """
import sys
from pathlib import Path
from coserve.state.durable import remove_dir, replace_dir, write_file
what, root = sys.argv[1], Path(sys.argv[2])
if what == "file":
    write_file(root / "file", b"new!" * 1500, point="corpus")
elif what == "dir":
    with replace_dir(root / "dir", point="adapter") as temp:
        (temp / "sub").mkdir()
        (temp / "a").write_bytes(b"new!" * 1500)
        (temp / "sub" / "b").write_bytes(b"new!")
elif what == "remove":
    remove_dir(root / "dir")
"""
POINT = {"file": "corpus", "dir": "adapter"}


def digest(root: Path) -> str:
    """Of every name and content under `root`."""
    state = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        content = path.read_bytes() if path.is_file() else b"folder"
        state.update(f"{path.relative_to(root)}:{hashlib.sha256(content).hexdigest()}\n".encode())
    return state.hexdigest()


def lay_old(root: Path) -> None:
    root.mkdir()
    write_file(root / "file", V1, point="corpus")
    with replace_dir(root / "dir", point="adapter") as temp:
        (temp / "a").write_bytes(V1)
        (temp / "gone").write_bytes(V1)


def lay_new(root: Path, what: str) -> None:
    """In this process, what the child does."""
    match what:
        case "file":
            write_file(root / "file", V2, point="corpus")
        case "dir":
            with replace_dir(root / "dir", point="adapter") as temp:
                (temp / "sub").mkdir()
                (temp / "a").write_bytes(V2)
                (temp / "sub" / "b").write_bytes(b"new!")
        case _:
            remove_dir(root / "dir")


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the old state, and of the new one of each kind of change."""
    root = tmp_path_factory.mktemp("digests")
    lay_old(root / "old")
    found = {"old": digest(root / "old")}
    for what in ("file", "dir", "remove"):
        lay_old(root / what)
        lay_new(root / what, what)
        found[what] = digest(root / what)
    assert len(set(found.values())) == 4
    return found


def kill_points() -> Iterator[tuple[str, str]]:
    for what, point in POINT.items():
        for step in FILE_STEPS:
            yield what, f"{point}.{step}"
    yield "remove", "remove.before_rename"
    yield "remove", "remove.after_rename"


@pytest.mark.parametrize(("what", "name"), list(kill_points()))
def test_kill_leaves_old_or_new(what: str, name: str, tmp_path: Path, digests: dict[str, str]) -> None:
    root = tmp_path / "root"
    lay_old(root)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, what, str(root)], env={VARIABLE: f"{name}=kill"}, timeout=240, check=False
    )
    assert child.returncode == -9
    sweep(root)
    renamed = name.rpartition(".")[2] in ("after_rename", "after_dir_fsync")
    assert digest(root) == digests[what if renamed else "old"]


def test_kill_between_the_two_renames_puts_the_old_one_back(tmp_path: Path, digests: dict[str, str]) -> None:
    root = tmp_path / "root"
    lay_old(root)
    (root / "dir").rename(root / ".old-dir")  # what a crash leaves between them
    (root / ".tmp-dir-0123").mkdir()
    assert sweep(root) == [".old-dir", ".tmp-dir-0123"]
    assert digest(root) == digests["old"]


@pytest.mark.parametrize(("action", "error"), [("ENOSPC", StorageFull), ("EIO", StorageFailed)])
@pytest.mark.parametrize("what", ["file", "dir"])
def test_an_error_at_each_step_in_turn(
    what: str, action: str, error: type[Exception], tmp_path: Path, digests: dict[str, str]
) -> None:
    for n in range(1, 100):
        root = tmp_path / str(n)
        lay_old(root)
        with armed(f"*={action}@{n}") as state:
            try:
                lay_new(root, what)
            except error:
                pass
            else:
                break
        landed = what == "file" and n >= 5  # a file that was renamed stays; a folder goes back
        assert digest(root) == digests[what if landed else "old"], n
    assert state.hits.total() == len(FILE_STEPS)
    assert digest(root) == digests[what]


def test_an_error_in_the_block_leaves_the_old_one(tmp_path: Path, digests: dict[str, str]) -> None:
    root = tmp_path / "root"
    lay_old(root)
    with pytest.raises(StorageFull), replace_dir(root / "dir", point="adapter") as temp:
        (temp / "a").write_bytes(V2)
        raise OSError(errno.EDQUOT, "quota")
    with pytest.raises(KeyError), replace_dir(root / "dir", point="adapter"):
        raise KeyError
    assert digest(root) == digests["old"]


def test_a_full_disk_under_safetensors() -> None:
    """Its errors carry the number in their text only."""
    with pytest.raises(Exception) as caught:
        save_file({"a": np.zeros(4)}, "/nonexistent-folder/a.safetensors")
    assert "os error" in str(caught.value)
    kind = type(caught.value)
    for number, error in ((errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed)):
        with pytest.raises(error), disk_errors():
            raise kind(f"I/O error: said so (os error {number})")


@pytest.mark.parametrize("action", ["EACCES", "EPERM", "ETIMEDOUT", "ENOENT", "ENOTEMPTY"])
@pytest.mark.parametrize("what", ["file", "dir", "remove"])
def test_whatever_refuses_a_change_of_own_files_is_a_storage_error(
    what: str, action: str, tmp_path: Path, digests: dict[str, str]
) -> None:
    root = tmp_path / "root"
    lay_old(root)
    point = "remove" if what == "remove" else POINT[what]
    with armed(f"{point}.before_rename={action}"), pytest.raises(StorageFailed, match="the machine refused"):
        lay_new(root, what)
    assert digest(root) == digests["old"]


def test_a_file_in_place_of_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed):
        make_folder(tmp_path / "file" / "sub")


@pytest.mark.parametrize("action", ["EACCES", "ENOSPC"])
def test_a_file_of_the_daemons_own_that_cannot_be_read_now_is_not_missing(action: str, tmp_path: Path) -> None:
    number = getattr(errno, action)
    with pytest.raises(StorageError), read_errors():
        raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), read_errors():
        (tmp_path / "nothing").read_bytes()


def test_removing_what_is_not_there(tmp_path: Path) -> None:
    remove_dir(tmp_path / "nothing")


@pytest.mark.parametrize("action", ["ENOTEMPTY", "EACCES", "EIO"])
def test_what_is_removed_is_gone_though_its_files_stay_for_a_while(
    action: str, tmp_path: Path, digests: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    lay_old(root)
    with armed(f"remove.after_rename={action}"):
        remove_dir(root / "dir")
    assert not (root / "dir").exists() and "stay for now" in caplog.text
    (left,) = root.glob(".trash-*")
    assert sweep(root) == [left.name]
    assert digest(root) == digests["remove"]


def test_leftovers_that_cannot_be_removed_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "a network file system keeps an open file under another name")

    root = tmp_path / "root"
    lay_old(root)
    (root / ".trash-dir-0123").mkdir()
    (root / ".tmp-file-0123").write_bytes(V2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        assert sweep(root) == [".tmp-file-0123"]
    assert "stay for now" in caplog.text
    assert sweep(root) == [".trash-dir-0123"]
