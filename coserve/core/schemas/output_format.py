"""Fields of a request that constrain its text, as OpenAI and vLLM name them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from coserve.core.types import Wire

MAX_GRAMMAR = 1 << 16
"""Maximum characters of a schema, regular expression or grammar."""
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]
JsonSchema = dict[str, Any]
ChoiceTexts = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(min_length=1, max_length=1024)]


class JsonSchemaFormat(Wire, frozen=True):
    """OpenAI's `response_format.json_schema`."""

    schema: JsonSchema = {}
    name: Annotated[str, Meta(max_length=256)] = ""
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    strict: bool | None = None
    """The whole schema is always enforced, with either value."""


class ResponseFormat(Wire, frozen=True):
    """OpenAI's `response_format`. `json_object`: any JSON object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    """Given with type `json_schema` only."""


class StructuredOutputs(Wire, frozen=True):
    """vLLM's `structured_outputs`: at most one of these."""

    json: JsonSchema | GrammarText | None = None
    """A JSON schema, as an object or as text."""
    regex: GrammarText | None = None
    choice: ChoiceTexts | None = None
    grammar: GrammarText | None = None
    """In Lark's or GBNF's syntax."""
    json_object: bool | None = None
