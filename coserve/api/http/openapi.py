"""Generates `/openapi.json`, OpenAPI 3.1, from the routes and the structs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from coserve import __version__
from coserve.api.http.field_docs import describe_fields
from coserve.api.http.route import BUSY, UNAVAILABLE, Route, Schema
from coserve.core.limits import PAGE_LIMIT, PAGE_SIZE
from coserve.core.names import ADAPTER_SOURCES
from coserve.core.schemas.service import STREAM_END

_REF = "#/components/schemas/{name}"
_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "string", "description": "Entries after this one."},
    "search": {"type": "string", "description": "part of the name, in any case"},
    "base": {"type": "string", "description": "name of the base"},
    "source": {"enum": list(ADAPTER_SOURCES), "description": "how the version was made"},
    "resident": {"type": "boolean", "description": "whether the version is in memory"},
    "tag": {"type": "string", "description": "a tag of the name"},
    "limit": {"type": "integer", "minimum": 1, "maximum": PAGE_LIMIT, "default": PAGE_SIZE},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "mode": {"enum": ["keep"], "description": "what happens to requests"},
    "metadata": {
        "const": "null",
        "description": "Only jobs without; `metadata[KEY]=VALUE`: only jobs with this value.",
    },
    "purpose": {"type": "string", "description": "Only files with this purpose."},
}
_HEADERS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {
        "description": "Makes the request safe to repeat: requests with one key make one job.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    },
    "Last-Event-ID": {
        "description": "As `after`: the last event that was seen.",
        "schema": {"type": "integer", "minimum": 0},
    },
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


def describe_api(routes: Sequence[Route]) -> dict[str, Any]:
    used = {struct for route in routes for schema in _schemas_of(route) for struct in _structs_of(schema)}
    types = sorted(used, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    describe_fields(components, types)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "coserve",
            "version": __version__,
            "summary": "Fine-tune and serve many LoRA adapters from one copy of a base model",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }
    plain: dict[str, Any] = _portable(document)
    return plain


def _portable(node: Any) -> Any:  # noqa: ANN401 - any JSON
    """Replace `\\A` and `\\Z` in patterns, which JSON Schema's regular expressions do not have."""
    if isinstance(node, dict):
        return {
            key: value.replace("\\A", "^").replace("\\Z", "$")
            if key == "pattern" and isinstance(value, str)
            else _portable(value)
            for key, value in node.items()
        }
    return [_portable(entry) for entry in node] if isinstance(node, list | tuple) else node


def _schemas_of(route: Route) -> list[Schema]:
    given = (route.body, route.form, route.response, route.events, route.error_bodies)
    return [schema for schema in given if schema is not None]


def _structs_of(schema: Schema) -> tuple[type[msgspec.Struct], ...]:
    return schema if isinstance(schema, tuple) else (schema,)


def _schema(schema: Schema) -> dict[str, Any]:
    found = [{"$ref": _REF.format(name=struct.__name__)} for struct in _structs_of(schema)]
    return {"schema": found[0] if len(found) == 1 else {"anyOf": found}}


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {str(route.status): {"description": "Success", "content": _content(route)}}
        | {str(status): _error(route, status) for status in route.statuses},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": _QUERY[name]} for name in route.query]
    parameters += [{"name": name, "in": "header", **_HEADERS[name]} for name in route.headers]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _body(route.body, route.upload)}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": _form(route.form)}
    if route.public:
        operation["security"] = []
    if route.tag:
        operation["tags"] = [route.tag]
    return operation


def _content(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content["application/json"] = _schema(route.response)
        if route.listed:
            content["application/json"] = {"schema": {"type": "array", "items": _schema(route.response)["schema"]}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(route, route.events)}
    if route.media is not None:
        content[route.media] = {"schema": {"type": "string"}}
    if not content:
        content["application/json"] = {"schema": {"type": "object"}}
    return content


def _event(route: Route, data: Schema) -> dict[str, Any]:
    """One server-sent event: its data is JSON, an error if it is one after the first event."""
    bodies = (*_structs_of(data), *route.error_bodies)
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(bodies)["schema"]}
    either = {"anyOf": [text, {"const": STREAM_END}]} if route.stream_end else text
    properties = {"data": either, "event": {"type": "string"}, "id": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _body(struct: Schema, upload: tuple[str, ...]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": _schema(struct)}
    if upload:
        file = {"type": "string", "contentMediaType": "application/octet-stream"}
        parts = {"settings": _schema(struct)["schema"], **{name: {"type": "array", "items": file} for name in upload}}
        schema = {"type": "object", "properties": parts, "required": ["settings", "file"]}
        content["multipart/form-data"] = {
            "schema": schema,
            "encoding": {"settings": {"contentType": "application/json"}},
        }
    return content


def _form(struct: type[msgspec.Struct]) -> dict[str, Any]:
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    of_file = {"type": "object", "properties": {"file": file}, "required": ["file"]}
    return {"multipart/form-data": {"schema": {"allOf": [_schema(struct)["schema"], of_file]}}}


def _error(route: Route, status: int) -> dict[str, Any]:
    bodies = route.error_bodies
    if status == UNAVAILABLE and route.starting is not None:
        bodies = (*_structs_of(route.starting), *bodies)
    response: dict[str, Any] = {"description": "Error", "content": {"application/json": _schema(bodies)}}
    return response | {"headers": _RETRY_AFTER} if status in (BUSY, UNAVAILABLE) else response
