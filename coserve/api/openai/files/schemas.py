"""Bodies of `/v1/files`."""

from __future__ import annotations

from typing import Literal

import msgspec

from coserve.api.openai.lists import ListPage
from coserve.core.types import Wire


class FileObject(Wire, frozen=True, kw_only=True):
    """An uploaded file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: None = None


class FileList(ListPage[FileObject], frozen=True, kw_only=True):
    """Files, newest first unless `order` is `asc`. The next page is `?after=<id of the last one>`."""


class DeletedFile(Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileForm(msgspec.Struct, frozen=True):
    """Fields of the form that uploads a file, without the part `file`."""

    purpose: Literal["fine-tune", "batch"]
