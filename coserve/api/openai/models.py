"""`/v1/models`: the base, the current version of each adapter of this base, and the aliases. Fine-tuned models have
their own names (`openai.names`)."""

from __future__ import annotations

import sys

from coserve.api.openai.errors import openai_route
from coserve.api.openai.names import PREFIX, model_name
from coserve.api.openai.requests import adapter_of
from coserve.api.openai.schemas import DeletedModel, Model, ModelList
from coserve.api.service import Service
from coserve.core.errors import AdapterNotFound, InvalidRequest
from coserve.core.names import split_ref
from coserve.core.schemas.adapters import Adapter
from coserve.core.types import AdapterRef, BaseSpec


def _base(spec: BaseSpec, created: float) -> Model:
    return Model(id=spec.name, created=int(created), max_model_len=spec.context, root=spec.name, parent=None)


def _adapter(id: str, adapter: Adapter, spec: BaseSpec) -> Model:
    created = int(adapter.created_at)
    return Model(id=id, created=created, max_model_len=spec.context, root=adapter.ref, parent=spec.name)


def _name(adapter: Adapter, spec: BaseSpec) -> str:
    """Return the name shown in lists: a fine-tuned model's own, else the adapter's."""
    name = model_name(AdapterRef(adapter.id, adapter.version), spec.name)
    return name if name.startswith(PREFIX) else adapter.id


class ModelsApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    @openai_route("GET", "/v1/models", "List the base and the adapters")
    async def list_models(self) -> ModelList:
        """Return the base, the current version of each adapter, and the target of each alias. Raises
        `EngineUnavailable` before the first engine."""
        adapters, spec = self._service.adapters, self._service.engine.spec
        every = (await adapters.list(None, sys.maxsize)).data
        own = [_adapter(_name(one, spec), one, spec) for one in every if one.base_fingerprint == spec.fingerprint]
        models = [_base(spec, self._service.started_at), *own]
        for alias in (await self._service.aliases.list_aliases()).data:
            found = await adapters.get(*split_ref(alias.target))
            if found.base_fingerprint == spec.fingerprint:
                models.append(_adapter(alias.name, found, spec))
        return ModelList(data=models)

    @openai_route("GET", "/v1/models/{id}", "Show the base or an adapter", slashes=True)
    async def get_model(self, id: str) -> Model:
        return await find_model(self._service, id)

    @openai_route(
        "DELETE",
        "/v1/models/{id}",
        "Delete an adapter: one version (`name@version`, or a fine-tuned model) or all (`name`)",
        slashes=True,
        errors=(409, 507),
    )
    async def delete_model(self, id: str) -> DeletedModel:
        """Raises `AdapterNotFound`, `AdapterBusy`, `InvalidRequest` for the base."""
        name = adapter_of(id, self._service.engine.spec.name)
        if name is None:
            raise InvalidRequest("expected an adapter, got the base: it cannot be deleted", field="model")
        await self._service.adapters.delete(*split_ref(name))
        return DeletedModel(id=id)


async def find_model(service: Service, id: str) -> Model:
    """Return one model. Raises `AdapterNotFound`, `EngineUnavailable`."""
    spec = service.engine.spec
    name = adapter_of(id, spec.name)
    if name is None:
        return _base(spec, service.started_at)
    try:
        adapter = await service.adapters.get(*split_ref(name))
    except AdapterNotFound as error:
        if "@" in name:
            raise
        try:
            alias = await service.aliases.get_alias(name)
        except AdapterNotFound:
            raise error from None
        adapter = await service.adapters.get(*split_ref(alias.target))
    if adapter.base_fingerprint != spec.fingerprint:
        raise AdapterNotFound(f"adapter {adapter.ref} belongs to another base", field="model")
    return _adapter(id, adapter, spec)
