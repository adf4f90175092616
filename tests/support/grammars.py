"""Grammars of each kind, requests with them, and whether a text follows one."""

from __future__ import annotations

import json
import re

import msgspec

from coserve.core.grammar import Grammar
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.generator import Generator
from coserve.generate.grammars import Grammars
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from tests.support.generation import request
from tests.support.lengths import OneMoreToken
from tests.support.shelf import Shelf

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANY = Grammar("regex", r"(.|\n)*")
GRAMMARS = [
    Grammar("json_schema", json.dumps(OBJECT)),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3}'),
    Grammar("regex", r"[a-c]{2,5}-\d+"),
    Grammar("choice", '["yes", "no \\"sir\\"", "maybe"]'),
    Grammar("grammar", 'root ::= ("ab" | "cd") [0-9]'),
]


def follows(text: str, grammar: Grammar) -> bool:
    match grammar.kind:
        case "regex":
            return re.fullmatch(grammar.text, text) is not None
        case "choice":
            return text in json.loads(grammar.text)
        case "grammar":
            return re.fullmatch(r"(ab|cd)[0-9]", text) is not None
    value = json.loads(text)
    if isinstance(value, list):
        return 1 <= len(value) <= 3 and set(value) <= {"red", "blue"}
    return value.keys() == {"name", "age"} and len(value["name"]) <= 8 and 0 <= int(value["age"]) <= 99


def generator(base: Base, kv: KvCache, executor: StepExecutor, grammars: Grammars, running: int = 8) -> Generator:
    store, lengths = Shelf().store(), OneMoreToken()
    return Generator(base, store, kv, executor, max_running=running, step_tokens=16, lengths=lengths, grammars=grammars)


def requests(ids: list[int]) -> list[Generate]:
    """With each grammar: at temperature 1, with penalties and log-probabilities; and one without a grammar."""
    kinds = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=3),
        SamplingParams(max_tokens=60, temperature=1.0, frequency_penalty=0.3, logprobs=1, seed=4),
    ]
    found = [
        msgspec.structs.replace(request(f"{number}-{kind}", tuple(ids), params), grammar=grammar)
        for number, grammar in enumerate(GRAMMARS)
        for kind, params in enumerate(kinds)
    ]
    return [*found, request("free", tuple(ids), SamplingParams(max_tokens=12, temperature=0.0))]
