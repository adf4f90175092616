"""Fetches PEFT files from a URL, for an import: the caller's own network and credentials are used, not the daemon's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import InvalidRequest
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
