"""The grammar that a request's fields ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.grammar import CallStart, Grammar
from coserve.core.schemas.generation import GenerateRequest, GenerationFields
from coserve.core.schemas.output_format import MAX_GRAMMAR, JsonSchema, ResponseFormat, StructuredOutputs
from coserve.data.grammar import check_grammar

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def is_constrained(request: GenerationFields) -> bool:
    """Return whether a field of the request constrains its text."""
    free = (None, ResponseFormat(), StructuredOutputs())
    return any(getattr(request, name) not in free for name in _FIELDS)


def has_format(request: GenerationFields) -> bool:
    """Return whether `response_format` constrains the text."""
    return request.response_format not in (None, ResponseFormat())


async def output_grammar(request: GenerateRequest, calls: Sequence[CallStart] = ()) -> Grammar | None:
    """Return the checked grammar of the text; None: any text. `calls`: what a text in a `response_format` may begin
    with instead. Raises `InvalidRequest`, which names the field."""
    given = [name for name in _FIELDS if getattr(request, name) is not None]
    found = await asyncio.to_thread(_checked, request, given) if given else None
    return msgspec.structs.replace(found, calls=tuple(calls)) if found is not None and calls else found


def _checked(request: GenerateRequest, given: list[str]) -> Grammar | None:
    found = [(field, grammar) for name in given for field, grammar in _grammars(request, name)]
    if len(found) > 1:
        got = " and ".join(field for field, _ in found)
        raise InvalidRequest(f"expected at most one field that constrains the text, got {got}", field=found[1][0])
    for field, grammar in found:
        try:
            if len(grammar.text) > MAX_GRAMMAR:
                raise InvalidRequest(f"expected at most {MAX_GRAMMAR} characters, got {len(grammar.text)}")
            check_grammar(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, field=field) from error
    return found[0][1] if found else None


def _grammars(request: GenerateRequest, name: str) -> list[tuple[str, Grammar]]:
    """Return the grammars of the field `name`, each with the path of the field that has it."""
    value = getattr(request, name)
    match value:
        case ResponseFormat(type="text", json_schema=None):
            return []
        case ResponseFormat(type="json_object", json_schema=None):
            return [(name, ANY_OBJECT)]
        case ResponseFormat(type="json_schema", json_schema=described) if described is not None:
            return [(f"{name}.json_schema.schema", _json(described.schema))]
        case ResponseFormat():
            raise InvalidRequest("expected json_schema with type json_schema, and only with it", field=name)
        case StructuredOutputs():
            return _structured(name, value)
    outputs = StructuredOutputs(**{name.removeprefix("guided_"): value})
    return [(name, grammar) for _, grammar in _structured(name, outputs)]


def _structured(name: str, outputs: StructuredOutputs) -> list[tuple[str, Grammar]]:
    found: list[tuple[str, Grammar]] = []
    if outputs.json is not None:
        found.append((f"{name}.json", _json(outputs.json)))
    if outputs.regex is not None:
        found.append((f"{name}.regex", Grammar("regex", outputs.regex)))
    if outputs.choice is not None:
        found.append((f"{name}.choice", Grammar("choice", msgspec.json.encode(outputs.choice).decode())))
    if outputs.grammar is not None:
        found.append((f"{name}.grammar", Grammar("grammar", outputs.grammar)))
    if outputs.json_object:
        found.append((f"{name}.json_object", ANY_OBJECT))
    return found


def _json(schema: JsonSchema | str) -> Grammar:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar("json_schema", text)
