"""The routes of `/v1/files`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, PAGE, Route
from coserve.api.openai.errors import openai_route
from coserve.api.openai.files.handlers import FilesApi
from coserve.api.openai.files.schemas import DeletedFile, FileForm, FileList, FileObject


def file_routes(api: FilesApi) -> tuple[Route, ...]:
    return (
        openai_route(
            "POST",
            "/v1/files",
            api.upload_file,
            "Upload rows to fine-tune on, or a batch of requests",
            form=FileForm,
            response=FileObject,
            errors=(*BODY_ERRORS, BUSY, 507),
        ),
        openai_route(
            "GET",
            "/v1/files",
            api.list_files,
            "List uploaded files, newest first",
            response=FileList,
            query=(*PAGE, "order", "purpose"),
            errors=(404,),
        ),
        openai_route(
            "GET",
            "/v1/files/{id}",
            api.get_file,
            "Show a file",
            response=FileObject,
            errors=(404,),
        ),
        openai_route(
            "GET",
            "/v1/files/{id}/content",
            api.file_content,
            "Download a file",
            media="application/octet-stream",
            errors=(404,),
        ),
        openai_route(
            "DELETE",
            "/v1/files/{id}",
            api.delete_file,
            "Delete a file; jobs that were made from it have their own copy",
            response=DeletedFile,
            errors=(404, 507),
        ),
    )
