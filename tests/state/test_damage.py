"""Files of the data folder that were damaged from outside."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path

import msgspec
import pytest

from coserve.api.jobs.evaluation import JobTest
from coserve.core.access.principal import Principal, act_as
from coserve.core.errors import CheckpointUnreadable, ConfigError, NotFound, StorageError
from coserve.data.documents.pending import read_chunks
from coserve.lora.files.packed_header import MAGIC, read_header
from coserve.memory.profile import load_layer_costs
from coserve.state.backup import restore
from coserve.state.files import FileStore
from coserve.state.folder import DataFolder
from coserve.state.item_log import ItemLog
from coserve.state.session_states import read_state


class Item(msgspec.Struct):
    text: str


@pytest.mark.parametrize("damage", [b"\xff", b'"', b"\n"])
def test_items_are_kept_up_to_the_damage(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    log = ItemLog(tmp_path / "items.jsonl", Item)
    log.append(Item("one"), Item("two"), Item("three"))
    log_bytes = (tmp_path / "items.jsonl").read_bytes()
    (tmp_path / "items.jsonl").write_bytes(log_bytes.replace(b"tw", b"t" + damage))
    assert log.read() == [Item("one")]
    log.append(Item("more"))
    assert log.read() == [Item("one"), Item("more")]
    assert "items.jsonl was damaged" in caplog.text


@pytest.mark.parametrize("what", ["text", "id", "folder", "content"])
def test_a_damaged_file_is_not_listed(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    kept, damaged = (add_file(tmp_path, name) for name in ("a", "b"))
    record = tmp_path / "files" / damaged / "record.json"
    if what == "content":
        record.with_name("content").write_bytes(b"rows of")
    elif what == "folder":
        record.unlink()
        record.mkdir()
    else:
        old, new = (b'"b"', b'"\xff"') if what == "text" else (damaged.encode(), kept.encode())
        record.write_bytes(record.read_bytes().replace(old, new))
    store = FileStore(tmp_path / "files")
    store.load()
    assert [each.id for each in store.all()] == [kept]
    assert f"{damaged} is not listed" in caplog.text


def test_a_list_may_be_read_while_a_thread_adds_a_file(tmp_path: Path) -> None:
    first = add_file(tmp_path, "a")
    store = FileStore(tmp_path / "files")
    store.load()

    class AddsOne(Principal):
        """Stands for a thread that runs meanwhile."""

        def sees(self, project: str) -> bool:
            (tmp_path / "b").write_bytes(b"")
            store.add(tmp_path / "b", "b", "batch")
            return True

    def listed() -> list[str]:
        act_as(AddsOne("default", frozenset()))
        return [each.id for each in store.all()]

    assert copy_context().run(listed) == [first]


def test_a_file_that_cannot_be_read_now_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id = add_file(tmp_path, "a")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StorageError, match=f"{id} cannot be read now"):
        FileStore(tmp_path / "files").load()


def add_file(root: Path, name: str) -> str:
    (root / name).write_bytes(b"rows of text")
    return FileStore(root / "files").add(root / name, name, "batch").id


def read_session(path: Path) -> object:
    with pytest.raises(NotFound):
        read_state(DataFolder(path.parents[3]), "run", "name")
    return None


def read_refused(read: Callable[[Path], object], error: type[Exception]) -> Callable[[Path], object]:
    def refused(path: Path) -> object:
        with pytest.raises(error):
            read(path)
        return None

    return refused


PACKED = MAGIC + (15).to_bytes(8, "little") + b"\x81\xabfingerprint\xa1\xff"


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("sessions/run/name/state.json", b'{"base": "\xff"}', read_session),
        ("jobs/a/test.json", b'{"settings": {"path": "\xff"}}', read_refused(JobTest.load, CheckpointUnreadable)),
        ("document.msgpack", b"\x81\xa5texts\x91\xa1\xff", read_refused(read_chunks, CheckpointUnreadable)),
        ("layers.json", b'{"\xff": 1}', load_layer_costs),
        ("backup.json", b'{"\xff": 1}', read_refused(lambda path: restore(path.parent, path), ConfigError)),
        ("packed", PACKED, lambda path: read_header(io.BytesIO(path.read_bytes()))),
    ],
)
def test_what_is_no_utf_8_is_damaged(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert read(path) is None
