"""PEFT files on the caller's side: those of a URL are fetched for an import, with the caller's own network and
credentials, and the tar file of a download is unpacked without trusting its content."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

from coserve.client.transport import Response
from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import CorruptAdapter, InvalidRequest
from coserve.core.names import ADAPTER_FILES, ARCHIVES


@asynccontextmanager
async def local_files(source: Path | str) -> AsyncIterator[Path]:
    """Yield a local folder or archive as it is; copy a URL's files into a folder that is deleted when the block ends.

    A URL is that of a folder or an archive, in a file system that fsspec knows: `s3://bucket/adapter`,
    `https://host/adapter.tar.gz`, `hf://OWNER/NAME`. Raises `InvalidRequest` if it cannot be read.
    """
    if isinstance(source, Path) or "://" not in source:
        yield Path(source)
        return
    folder = Path(tempfile.mkdtemp(prefix="coserve-import-"))
    try:
        yield await uncancelled_thread(_fetch, source, folder)
    finally:
        await uncancelled_thread(shutil.rmtree, folder, ignore_errors=True)


def _fetch(url: str, folder: Path) -> Path:
    """Copy the URL's files into `folder`; return it, or the archive in it."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise InvalidRequest("URLs are read by fsspec: pip install fsspec", field="folder") from None
    name = url.partition("?")[0].rstrip("/").rpartition("/")[2]  # a signed URL has a query
    archive = name.lower().endswith(ARCHIVES)
    try:
        files, root = url_to_fs(url)
        for file in (name,) if archive else ADAPTER_FILES:
            files.get_file(root if archive else f"{root.rstrip('/')}/{file}", str(folder / file))
    except Exception as error:  # any kind: each file system of fsspec has errors of its own
        why = f"{type(error).__name__}: {error}"[:300]
        raise InvalidRequest(f"expected PEFT files at {url!r}; reading them: {why}", field="folder") from error
    return folder / name if archive else folder


async def save_adapter(response: Response, folder: Path) -> Path:
    """Unpack an adapter into `folder`, which must be missing or empty, and return it. PEFT can load it as it is.

    The folder appears complete or not at all. Raises `FileExistsError`, and `CorruptAdapter` if the archive is not what
    the daemon sends.
    """
    try:
        temporary = _make_temporary(folder)  # on this thread: a cancelled await would not know the folder to delete
        try:
            with (temporary / "archive.tar").open("wb") as archive:
                async for chunk in response:
                    await uncancelled_thread(archive.write, chunk)
            await uncancelled_thread(_unpack, temporary / "archive.tar", temporary / "adapter")
            await uncancelled_thread((temporary / "adapter").rename, folder)
        finally:
            await uncancelled_thread(shutil.rmtree, temporary)
    finally:
        response.close()
    return folder


def _make_temporary(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"expected nothing there, or an empty folder: {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".download-", dir=folder.parent))
    except OSError as error:  # the path in the error may be a temporary one
        raise OSError(error.errno, error.strerror, str(folder)) from error


def _unpack(archive: Path, folder: Path) -> None:
    """Write the two files, whatever their folder in the archive is called. Any other member is an error."""
    names: list[str] = []
    folder.mkdir()
    try:
        with tarfile.open(archive, mode="r:") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or name not in ADAPTER_FILES or name in names:
                    raise CorruptAdapter(f"expected the files of one adapter, got {member.name[-80:]!r}")
                names.append(name)
                with (folder / name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    except tarfile.TarError as error:
        raise CorruptAdapter(f"the archive is broken: {error}") from None
    if len(names) != len(ADAPTER_FILES):
        raise CorruptAdapter(f"expected {' and '.join(ADAPTER_FILES)}, got {' and '.join(names) or 'nothing'}")
