"""The routes of vLLM by which an outside trainer publishes an adapter: `/v1/load_lora_adapter` (the tensors may come in
the body), `/v1/unload_lora_adapter`, `/server_info`, `/pause` and `/resume`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.body_quota import check_copy
from coserve.api.http.parsing import local_path
from coserve.api.http.route import Route
from coserve.api.http.uploads import UploadReader, is_upload
from coserve.api.openai import schemas
from coserve.api.openai.errors import openai_route
from coserve.api.service import Service
from coserve.config import Config
from coserve.core.errors import CoserveError, ForbiddenPath, InvalidRequest, NotFound
from coserve.core.limits import MAX_RANK
from coserve.core.names import ADAPTER_FILES


class LoraApi:
    def __init__(self, service: Service, config: Config, bodies: BodyReader, uploads: UploadReader) -> None:
        self._service, self._config, self._bodies, self._uploads = service, config, bodies, uploads

    @openai_route(
        "POST",
        "/v1/load_lora_adapter",
        "Load an adapter, as vLLM does, or one whose tensors are in the body",
        body=schemas.LoadLoraRequest,
        upload=("file",),
        media="text/plain",
        errors=(404, 409, 422, 507),
    )
    async def load_lora_adapter(self, request: web.Request) -> web.StreamResponse:
        if not is_upload(request):
            body = await self._bodies.read(request, schemas.LoadLoraRequest, dialect=True)
            if body.lora_path is None:
                raise InvalidRequest("expected a lora_path, or files in a multipart body", field="lora_path")
            folder = self._folder(body.lora_path)
            return await self._load(request, body, folder)
        upload = self._uploads.read(request, schemas.LoadLoraRequest, self._service.folder.staging, ADAPTER_FILES)
        async with self._service.stopping.read(upload) as (settings, folder):
            if settings.lora_path is not None:
                raise InvalidRequest("expected either a lora_path or files, got both", field="lora_path")
            return await self._load(request, settings, folder)

    async def _load(self, request: web.Request, settings: schemas.LoadLoraRequest, source: Path) -> web.Response:
        await check_copy(request, source)
        with _own_field():
            await self._service.adapters.load(source, settings.lora_name, in_place=settings.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{settings.lora_name}' added successfully.")

    @openai_route(
        "POST", "/v1/unload_lora_adapter", "Unload an adapter, as vLLM does", media="text/plain", errors=(404, 409, 507)
    )
    async def unload_lora_adapter(self, body: schemas.UnloadLoraRequest) -> web.Response:
        with _own_field():
            await self._service.adapters.unload(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @Route("GET", "/server_info", "What trainers read of vLLM's settings")
    async def server_info(self) -> schemas.ServerInfo:
        engine, config = self._service.engine, self._config
        spec = engine.spec
        served = schemas.ServedConfig(
            schemas.ServedModel(spec.name, f"torch.{spec.dtype}", engine.max_model_len),
            schemas.ServedLora(MAX_RANK, config.max_running),
            schemas.ServedParallel(config.tp),
        )
        return schemas.ServerInfo(served)

    @Route(
        "POST",
        "/pause",
        "Let requests run on while a trainer loads an adapter, which needs no pause",
        media="text/plain",
        query=("mode",),
    )
    async def pause(self, request: web.Request) -> web.StreamResponse:
        """Pauses nothing: a request finishes on the version that it began with, so publishing needs no pause. Raises
        `InvalidRequest` for the modes that end requests or wait for them."""
        if (mode := request.query.get("mode", "abort")) != "keep":
            raise InvalidRequest(f"expected mode=keep, got {mode[:80]!r}: requests are never ended here", field="mode")
        return web.Response(text="requests run on: each finishes on the version of its adapter that it began with")

    @Route("POST", "/resume", "End what `/pause` did: nothing", media="text/plain")
    async def resume(self) -> web.Response:
        return web.Response(text="nothing was paused")

    def _folder(self, text: str) -> Path:
        """Return a folder under `data_root`. Raises `ForbiddenPath`, and `NotFound` where there is none."""
        try:
            path = local_path(text, self._config.data_root)
        except ForbiddenPath as error:
            raise ForbiddenPath(error.message, field="lora_path") from None
        except InvalidRequest as error:
            raise NotFound(error.message, field="lora_path") from None
        if not path.is_dir():
            raise NotFound("expected a folder with PEFT files", field="lora_path")
        return path


@contextmanager
def _own_field() -> Iterator[None]:
    """Set the field of errors about the adapter to `lora_name`."""
    try:
        yield
    except CoserveError as error:
        error.field = "lora_name" if error.field in ("adapter", "name") else error.field
        raise
