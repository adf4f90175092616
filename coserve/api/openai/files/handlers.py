"""`/v1/files`: rows to fine-tune on, kept until they are deleted."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from coserve.api.http.responses import CHUNK
from coserve.api.http.route import PAGE
from coserve.api.http.uploads import UploadReader, is_upload
from coserve.api.openai.errors import openai_route
from coserve.api.openai.finetuning import results
from coserve.api.openai.finetuning.results import is_result, read_result
from coserve.api.openai.lists import ListPage, behind, in_order, list_query
from coserve.api.service import Service
from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import InvalidRequest, NotFound, UnknownField
from coserve.core.types import Wire
from coserve.state.durable import read_errors
from coserve.state.files import FileRecord

PURPOSES = ("fine-tune", "batch")
MAX_LISTED = 10_000
"""Most files of a page, and the default `limit`, as at OpenAI: clients that delete all files read one page."""


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


class FilesApi:
    def __init__(self, service: Service, uploads: UploadReader) -> None:
        self._service, self._files, self._uploads = service, service.files, uploads
        self._sizes = dict[str, int]()

    @openai_route(
        "POST", "/v1/files", "Upload rows to fine-tune on, or a batch of requests", form=FileForm, errors=(507,)
    )
    async def upload_file(self, request: web.Request) -> FileObject:
        if not is_upload(request):
            raise InvalidRequest("expected multipart/form-data with a file and its purpose", field="file")
        async with (
            self._service.stopping.interrupts(),
            self._uploads.form(request, self._service.folder.staging) as form,
        ):
            for name in form.fields:
                if name.startswith("expires_after"):
                    raise InvalidRequest("files are kept until they are deleted", field=name)
                if name != "purpose":
                    raise UnknownField(f"unknown field {name!r}: expected a file and its purpose", field=name)
            purpose = form.fields.get("purpose")
            if purpose not in PURPOSES:
                got = "none" if purpose is None else repr(purpose[:80])
                raise InvalidRequest(f"expected one of {', '.join(PURPOSES)}, got {got}", field="purpose")
            record = await uncancelled_thread(self._files.add, form.path, form.filename, purpose)
        return file_object(record)

    @openai_route(
        "GET",
        "/v1/files",
        "List files, uploaded ones and results of jobs, newest first",
        query=(*PAGE, "order", "purpose"),
        errors=(404,),
    )
    async def list_files(self, request: web.Request) -> FileList:
        after, limit = list_query(request.query, ("order", "purpose"), MAX_LISTED, MAX_LISTED)
        purpose, records = request.query.get("purpose"), self._files.all()
        if purpose in (None, results.PURPOSE):
            made = await results.result_records(self._service.jobs.views)
            records = sorted([*records, *made], key=lambda record: record.created_at)
        records = in_order(records, request.query)
        found = [record for record in behind(records, after) if purpose in (None, record.purpose)]
        data = [file_object(await self._sized(record)) for record in found[:limit]]
        return FileList.of(data, has_more=len(found) > limit)

    async def _sized(self, record: FileRecord) -> FileRecord:
        """Return the record with its size; that of a result is counted once, as it does not change."""
        if not is_result(record.id):
            return record
        if record.id not in self._sizes:
            self._sizes[record.id] = (await read_result(self._service.jobs.views, record.id))[0].bytes
        return msgspec.structs.replace(record, bytes=self._sizes[record.id])

    @openai_route("GET", "/v1/files/{id}", "Show a file")
    async def get_file(self, id: str) -> FileObject:
        if is_result(id):
            return file_object((await read_result(self._service.jobs.views, id))[0])
        return file_object(self._files.get(id))

    @openai_route("GET", "/v1/files/{id}/content", "Download a file", media="application/octet-stream")
    async def file_content(self, request: web.Request, id: str) -> web.StreamResponse:
        if is_result(id):
            return web.Response(body=(await read_result(self._service.jobs.views, id))[1], content_type="text/csv")
        record = self._files.get(id)
        try:
            with read_errors():
                file = await asyncio.to_thread(self._files.content(record.id).open, "rb")
        except FileNotFoundError:  # it is being deleted
            raise NotFound(f"no file {record.id!r}", field="id") from None
        with file:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = record.bytes
            await response.prepare(request)
            while chunk := await uncancelled_thread(file.read, CHUNK):
                await response.write(chunk)
            await response.write_eof()
        return response

    @openai_route(
        "DELETE", "/v1/files/{id}", "Delete a file; jobs that were made from it have their own copy", errors=(507,)
    )
    async def delete_file(self, id: str) -> DeletedFile:
        if is_result(id):
            raise InvalidRequest("results are deleted with their job, by DELETE /finetune/{id}", field="id")
        id = self._files.get(id).id
        await asyncio.shield(asyncio.to_thread(self._files.remove, id))
        return DeletedFile(id=id)


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_at),
        filename=record.filename,
        purpose=record.purpose,
    )
