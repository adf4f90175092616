"""Chooses how answers are parsed, by the markers in the base's chat template."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from coserve.api.answers.harmony import HarmonyParser
from coserve.api.answers.json_calls import DeepSeekParser, HermesParser, Llama3Parser, MistralParser
from coserve.api.answers.tagged import GlmParser, QwenXmlParser
from coserve.api.answers.tool_parser import ToolParser
from coserve.api.answers.typed_arguments import Schemas
from coserve.core.grammar import CallStart


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return an id of nine characters, the only length that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class ToolFamily:
    """The tool calls of a family of models. `special`: their marker is a special token, which answers otherwise leave
    out; `markers`: texts that all chat templates of the family contain; `channels`: every answer has the family's form,
    reasoning included, also without tools; `start`: what a call begins with, where NAME stands for its function."""

    parser: Callable[[Schemas], ToolParser]
    markers: tuple[str, ...]
    new_id: Callable[[], str] = long_id
    special: bool = False
    channels: bool = False
    start: CallStart = ("<tool_call>",)

    def starts(self, functions: Iterable[str]) -> tuple[CallStart, ...]:
        """Return what calls of these functions begin with."""
        names = (msgspec.json.encode(function).decode() for function in functions)
        return tuple(dict.fromkeys(tuple(part.replace("NAME", name) for part in self.start) for name in names))


FAMILIES = {
    "qwen-xml": ToolFamily(QwenXmlParser, ("<tool_call>", "<function=")),
    "glm": ToolFamily(GlmParser, ("<tool_call>", "<arg_key>")),
    "hermes": ToolFamily(HermesParser, ("<tool_call>",)),
    "mistral": ToolFamily(MistralParser, ("[TOOL_CALLS]",), short_id, special=True, start=("[TOOL_CALLS]",)),
    "deepseek": ToolFamily(DeepSeekParser, ("<｜tool▁call▁begin｜>",), special=True, start=("<｜tool▁calls▁begin｜>",)),
    "gpt-oss": ToolFamily(
        HarmonyParser,
        ("<|channel|>", "<|message|>"),
        special=True,
        channels=True,
        start=("<|channel|>", "commentary to=functions"),
    ),
    "llama3": ToolFamily(
        Llama3Parser, ("<|start_header_id|>", '"parameters": '), start=('{"name": NAME, "parameters": {',)
    ),
}
"""In order of precedence: a chat template belongs to the first family whose markers it contains."""


def tool_family(template: str | None, setting: str) -> ToolFamily | None:
    """Return the family of a chat template, or the one that `--tool-parser` names; None: calls stay in the text."""
    if setting != "auto":
        return FAMILIES.get(setting)
    if template is None:
        return None
    found = (family for family in FAMILIES.values() if all(marker in template for marker in family.markers))
    return next(found, None)


def forced_family(family: ToolFamily | None) -> ToolFamily:
    """Return the family for answers that a grammar constrains to one call: a JSON object without a marker. `family`:
    that of the chat template, whose call ids are kept."""
    return ToolFamily(Llama3Parser, (), long_id if family is None else family.new_id)
