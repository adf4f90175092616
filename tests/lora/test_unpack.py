"""Archives of adapters: two files come out, under our names, and nothing else happens."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.errors import AdapterError, BodyTooLarge, CorruptAdapter, UnsafeAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS
from coserve.lora.files.archive import MEMBERS, unpack_adapter
from tests.support.examples import examples

BOTH = ((ADAPTER_CONFIG, b"{}"), (ADAPTER_WEIGHTS, b"tensors" * 1000))
MOST = 1 << 20
KINDS = ("tar", "tar.gz", "zip")


def make(kind: str, *members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in members:
                packed.writestr(name, content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz" if kind == "tar.gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def unpack(root: Path, archive: bytes, most: int = MOST) -> dict[str, bytes]:
    """Returns what lies in the folder then; nothing may lie beside it."""
    (root / "in").write_bytes(archive)
    (folder := root / "deep" / "folder").mkdir(parents=True)
    try:
        unpack_adapter(root / "in", folder, most)
    finally:
        beside = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} - {"in"}
        assert beside <= {f"deep/folder/{name}" for name in ADAPTER_FILES}
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "poet/", "a/b/c/", "../../", "/etc/", "x" * 300 + "/"])
def test_both_files_come_out_of_any_one_folder(tmp_path: Path, kind: str, prefix: str) -> None:
    members = [(f"{prefix}{name}", content) for name, content in BOTH]
    archive = make(kind, (f"{prefix}README.md", b"a card"), *members, ("../../evil", b"skipped"))
    assert unpack(tmp_path, archive) == dict(BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("members", "error"),
    [
        (BOTH[:1], CorruptAdapter),
        ((), CorruptAdapter),
        ((*BOTH, (f"other/{ADAPTER_CONFIG}", b"{}")), CorruptAdapter),
        (((f"a/{ADAPTER_CONFIG}", b"{}"), (f"b/{ADAPTER_WEIGHTS}", b"")), CorruptAdapter),
        ((BOTH[0], (ADAPTER_WEIGHTS, bytes(MOST + 1))), BodyTooLarge),
        (((f"{i}.txt", b"") for i in range(MEMBERS + 1)), CorruptAdapter),
    ],
    ids=["one", "none", "twice", "two folders", "large", "many"],
)
def test_other_archives_are_refused(
    tmp_path: Path, kind: str, members: tuple[tuple[str, bytes], ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        unpack(tmp_path, make(kind, *members))


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, "card.md"])
@pytest.mark.parametrize("type", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, name: str, type: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = type, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(UnsafeAdapter, match="regular"):
        unpack(tmp_path, buffer.getvalue())


def test_a_link_in_a_zip_file_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo(ADAPTER_CONFIG)
    info.external_attr = 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr(info, "/etc/passwd")
    with pytest.raises(UnsafeAdapter, match="regular"):
        unpack(tmp_path, buffer.getvalue())


def test_a_bomb_in_a_header_or_between_the_files_is_refused(tmp_path: Path) -> None:
    """Before it takes memory: these are a few KB."""
    pax = tarfile.TarInfo("x")
    pax.pax_headers = {"comment": "0" * (8 * MOST)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(pax)
    (tmp_path / "a").mkdir()
    with pytest.raises(CorruptAdapter, match="headers"):
        unpack(tmp_path / "a", buffer.getvalue())
    (tmp_path / "b").mkdir()
    with pytest.raises(BodyTooLarge):
        unpack(tmp_path / "b", make("tar.gz", ("filler", bytes(8 * MOST)), *BOTH))


@pytest.mark.parametrize(
    ("type", "headers"),
    [
        (tarfile.GNUTYPE_LONGNAME, {}),
        (tarfile.XHDTYPE, {}),
        (tarfile.GNUTYPE_SPARSE, {}),
        (tarfile.REGTYPE, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}),
    ],
)
def test_what_tarfile_would_read_as_a_whole_is_refused_whatever_may_be_unpacked(
    tmp_path: Path, type: bytes, headers: dict[str, str]
) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size, info.pax_headers = type, 3 << 20, headers
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(b"9\n" * (info.size // 2)))
    (tmp_path / "a.tar.gz").write_bytes(buffer.getvalue())
    with pytest.raises(CorruptAdapter, match="headers"):
        unpack_adapter(tmp_path / "a.tar.gz", tmp_path, 1 << 30)


@pytest.mark.parametrize("repeated", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_headers_before_headers_are_refused(tmp_path: Path, repeated: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type = repeated
    with pytest.raises(CorruptAdapter, match="damaged"):
        unpack(tmp_path, info.tobuf(tarfile.GNU_FORMAT) * 2000)


@pytest.mark.parametrize("name", ["card.md", ADAPTER_CONFIG])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_claims_to_be_longer_than_any_disk_is_refused(tmp_path: Path, name: str, packed: bool) -> None:
    """At once: the archive's end is read once, not as often as the size says."""
    info = tarfile.TarInfo(name)
    info.size = 1 << 80
    archive = info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    with pytest.raises(CorruptAdapter, match="damaged"):
        unpack(tmp_path, gzip.compress(archive) if packed else archive)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_of_many_folders_is_refused(tmp_path: Path, kind: str) -> None:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as packed:
            for i in range(MEMBERS + 1):
                packed.mkdir(f"{i}")
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz" if kind == "tar.gz" else "w") as tar:
            for i in range(MEMBERS + 1):
                folder = tarfile.TarInfo(f"{i}")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
    with pytest.raises(CorruptAdapter, match=f"at most {MEMBERS} files"):
        unpack(tmp_path, buffer.getvalue())


def test_a_zip_file_with_a_huge_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptAdapter, match="at most"):
        unpack(tmp_path, make("zip", *((f"{i}{'x' * 300}", b"") for i in range(4000))))


@pytest.mark.parametrize(("at", "value"), [(6, 64), (8, 32), (8, 64)], ids=["version", "patched", "encrypted"])
def test_kinds_of_zip_files_that_nobody_reads_are_refused(tmp_path: Path, at: int, value: int) -> None:
    archive = bytearray(make("zip", *BOTH))
    archive[archive.index(b"PK\1\2") + at] |= value  # in the directory
    with pytest.raises(CorruptAdapter, match="damaged, or is no tar or zip file"):
        unpack(tmp_path, bytes(archive))


def test_a_zip_file_whose_directory_lies_before_its_beginning_is_refused(tmp_path: Path) -> None:
    archive = bytearray(make("zip", *BOTH))
    archive[archive.index(b"PK\5\6") + 19] = 0x40  # the highest byte of the directory's offset
    with pytest.raises(CorruptAdapter, match="damaged, or is no tar or zip file"):
        unpack(tmp_path, bytes(archive))


def test_a_zip_file_with_a_nameless_file_is_refused(tmp_path: Path) -> None:
    archive = bytearray(make("zip", *BOTH))
    archive[archive.index(b"PK\1\2") + 46] = 0  # names end at a null byte
    with pytest.raises(CorruptAdapter, match="got one without"):
        unpack(tmp_path, bytes(archive))


@settings(max_examples=examples(60), deadline=None)
@given(kind=st.sampled_from(KINDS), at=st.integers(0, 1 << 16), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_archives_are_refused_or_whole(
    tmp_path_factory: pytest.TempPathFactory, kind: str, at: int, value: int, cut: bool
) -> None:
    archive = bytearray(make(kind, *BOTH))
    at %= len(archive)
    archive[at] = value
    try:
        found = unpack(tmp_path_factory.mktemp("x"), bytes(archive[:at] if cut else archive))
    except (AdapterError, BodyTooLarge):
        return
    assert set(found) == set(ADAPTER_FILES)
