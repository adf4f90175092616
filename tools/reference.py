"""Write the pages of docs/reference from the code: routes, SDK, command line, settings, metrics.

python -m tools.reference
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

from prometheus_client.core import Metric
from typer.main import get_command

from coserve import client
from coserve.api.access.access import Access
from coserve.api.adapters.aliases import AliasApi
from coserve.api.anthropic.handlers import AnthropicApi
from coserve.api.http.bodies import BodyReader
from coserve.api.http.openapi import describe_api
from coserve.api.http.route import ALWAYS, routes_of
from coserve.api.metrics.prometheus import Metrics
from coserve.api.metrics.vllm_names import vllm_names
from coserve.api.native.handlers import NativeApi
from coserve.api.openai.batches.handlers import BatchesApi
from coserve.api.openai.files.handlers import FilesApi
from coserve.api.openai.finetuning.handlers import FineTuningApi
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.lora import LoraApi
from coserve.api.openai.responses.handlers import ResponsesApi
from coserve.api.sessions.handlers import SessionsApi
from coserve.api.tgi.handlers import TgiApi
from coserve.api.tinker.handlers import TinkerApi
from coserve.api.tokenizer.handlers import TokenizerApi
from coserve.cli.app import app, run
from coserve.cli.settings_options import default_text, option_line
from coserve.config import Config, sections
from coserve.core import errors

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by `python -m tools.reference` from the code: change it there. -->"
WIDTH = "100"
"""Columns of the commands' help."""
METHODS = ("AsyncClient", "AsyncJobHandle", "AsyncTrainingSession")
"""Classes of the SDK whose methods are listed: those without asyncio have the same."""

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

Json = dict[str, Any]


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    made = {"http.md": http(), "sdk.md": sdk(), "cli.md": cli(), "settings.md": settings(), "metrics.md": metrics()}
    made["troubleshooting.md"] = troubleshooting()
    return {name: "\n".join(lines).rstrip("\n") + "\n" for name, lines in made.items()}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table and an empty line."""
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


# ---- routes


def http() -> Iterator[str]:
    apis: dict[str, tuple[type, ...]] = {
        "coserve": (NativeApi, AliasApi),
        "Keys, quotas and the log": (Access,),
        "OpenAI": (OpenAIApi, LoraApi, ResponsesApi, BatchesApi, FilesApi, FineTuningApi),
        "Anthropic": (AnthropicApi,),
        "Training sessions": (SessionsApi,),
        "Tinker": (TinkerApi,),
        "LoRAX, TGI and huggingface_hub": (TgiApi,),
        "Tokenizer": (TokenizerApi,),
    }
    new = object.__new__  # no handler is called
    groups = {title: routes_of(map(new, kinds), new(BodyReader)) for title, kinds in apis.items()}
    document = describe_api([route for routes in groups.values() for route in routes])
    always = ", ".join(map(str, ALWAYS))
    yield from ("# HTTP API", "", MADE, "", "`GET /openapi.json` of a running daemon is the same for machines.", "")
    yield from (
        f"Every route may answer with one of {always}; [troubleshooting.md](troubleshooting.md) has the errors' codes.",
        "",
    )
    for title, routes in groups.items():
        yield from (f"## {title}", "")
        for route in routes:
            yield from _operation(route.method, route.path, document["paths"][route.path][route.method.lower()])
    yield from ("## Types", "")
    for name, schema in document["components"]["schemas"].items():
        yield from (f"### {name}", "")
        if schema.get("description"):
            yield from (" ".join(schema["description"].split()), "")
        if "enum" in schema:
            yield from (_kind(schema), "")
        elif schema.get("properties"):
            required = schema.get("required", ())
            rows = (
                (f"`{field}`", _kind(of), "required" if field in required else _default(of), of.get("description", ""))
                for field, of in schema["properties"].items()
            )
            yield from table(("Field", "Type", "Default", ""), rows)


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield from (f"### {method} {path}", "", f"{operation['summary']}.", "")
    for each in operation.get("parameters", ()):
        if each["in"] != "path":
            text = each.get("description") or each["schema"].get("description", "")
            yield f"- {each['in'].capitalize()} `{each['name']}`: {_kind(each['schema'])}. {text}".rstrip()
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        form = content["schema"].get("properties", {})
        files = " and ".join(f"`{name}`" for name in form if name != "settings")
        kind = f"a part `settings`: {_kind(form['settings'])}, parts {files}" if form else _kind(content["schema"])
        yield f"- Body, `{media}`: {kind}"
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            for media, content in response.get("content", {}).items():
                yield f"- {status}, `{media}`: {_kind(content['schema'])}"
    failed = [status for status in operation["responses"] if status[0] in "45" and int(status) not in ALWAYS]
    if failed:
        yield f"- Errors: {', '.join(failed)}"
    if operation.get("security") == []:
        yield "- Needs no key"
    yield ""


def _kind(schema: Json) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "allOf" in schema:
        return f"the fields of {_kind(schema['allOf'][0])}, a part `file`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    match schema.get("type"):
        case "array":
            return f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
        case "object":
            values = schema.get("additionalProperties")
            return f"object of {_kind(values)}" if isinstance(values, dict) and values else "object"
        case "integer" | "number" as kind:
            bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
            return f"{kind} {', '.join(bounds)}".rstrip()
        case None:
            return "any"
        case kind:
            return str(kind)


def _default(schema: Json) -> str:
    default = schema.get("default")
    shown = str(default).lower() if isinstance(default, bool) else default
    return "" if default in (None, [], {}, "") else f"`{shown}`"


# ---- SDK


def sdk() -> Iterator[str]:
    yield from ("# SDK", "", MADE, "", *_text(client.__doc__), "")
    yield "`Client`, `JobHandle` and `TrainingSession` have the methods of `AsyncClient`, `AsyncJobHandle` and"
    yield "`AsyncTrainingSession`, without `await`. Options of `generate` and `stream` are the fields of"
    yield from ("[GenerateRequest](http.md#generaterequest).", "")
    for name in client.__all__:
        found = getattr(client, name)
        yield from (f"## {name}", "", *_text(found.__doc__), "")
        if name in METHODS or dataclasses.is_dataclass(found):
            yield from ("```python", *_signature(name, found), "```", "")
        for method, function in vars(found).items() if name in METHODS else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield from ("```python", *_signature(method, function), "```", "", *_text(function.__doc__), "")
    yield from (
        "## Errors",
        "",
        "Subclasses of `CoserveError`; [troubleshooting.md](troubleshooting.md) lists them.",
        "",
    )


def _text(docstring: str | None) -> list[str]:
    return inspect.cleandoc(docstring or "").splitlines()


def _signature(name: str, called: Callable[..., object]) -> list[str]:
    """A definition, or a call of a class, without `self`; in several lines if it is long."""
    signature = inspect.signature(called)
    given = [each for key, each in signature.parameters.items() if key != "self"]
    returned = signature.return_annotation if inspect.isfunction(called) else signature.empty
    text = str(inspect.Signature(given, return_annotation=returned))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"<\w+ ([\w.]+)[^>]*>", r"\1", text))
    defined = "async def " if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called) else "def "
    defined = defined if inspect.isfunction(called) else ""
    return textwrap.wrap(f"{defined}{name}{text}", int(WIDTH), subsequent_indent="    ", break_long_words=False)


def troubleshooting() -> Iterator[str]:
    yield from ("# Troubleshooting by error code", "", MADE, "")
    yield 'An error\'s body is `{"error": {"code": ..., "message": ..., "field": ..., "line": ...}}`, in other APIs\' own form on their'  # noqa: E501
    yield "routes; the SDK raises the class. The message says what was expected and what was found. `coserve doctor` examines the"  # noqa: E501
    yield from ("machine, `/health` and the daemon's log tell the rest ([operate.md](../guide/operate.md)).", "")
    groups = [kind for kind in errors.CoserveError.__subclasses__() if kind.__subclasses__()]
    alone = [kind for kind in errors.CoserveError.__subclasses__() if not kind.__subclasses__()]
    for title, kinds in [*((_meaning(group)[0], _below(group)) for group in groups), ("Others.", alone)]:
        rows = ((f"`{kind.code}`", _status(kind), f"`{kind.__name__}`", *_meaning(kind)) for kind in kinds)
        heads = ("Code", "Status", "Class", "What it means", "What to do")
        yield from (f"## {title.removesuffix('.')}", "", *table(heads, rows))


def _below(group: type[errors.CoserveError]) -> Iterator[type[errors.CoserveError]]:
    for kind in group.__subclasses__():
        yield from (kind, *_below(kind))


def _meaning(kind: type[errors.CoserveError]) -> tuple[str, str]:
    """The first sentence of an error's docstring, and the others: what to do."""
    meaning, dot, todo = " ".join(_text(kind.__doc__)).partition(". ")
    return meaning + dot.strip(), todo


def _status(kind: type[errors.CoserveError]) -> str:
    """Where an error is seen: an HTTP status, a job's record, or a start that fails."""
    if issubclass(kind, errors.StartupError):
        return "exit 2"
    return "job" if issubclass(kind, errors.JobError | errors.TrackingFailed) else str(kind.status)


# ---- command line and settings


def cli() -> Iterator[str]:
    yield from ("# Command line", "", MADE, "", "`serve` and `warm` take the [settings](settings.md).", "")
    top: Any = get_command(app)
    for name in top.commands:
        if name in ("serve", "warm"):
            continue
        group = getattr(top.get_command(None, name), "commands", None)
        for command in [name] if group is None else [f"{name} {each}" for each in group]:
            yield from (f"## coserve {command}", "", "```text", *_help(command), "```", "")


def _help(command: str) -> list[str]:
    shown = io.StringIO()
    with patch.dict(os.environ, COLUMNS=WIDTH), redirect_stdout(shown):
        run([*command.split(), "--help"])
    return [line.rstrip() for line in shown.getvalue().strip("\n").splitlines()]


def settings() -> Iterator[str]:
    yield from ("# Settings of `coserve serve` and `coserve warm`", "", MADE, "")
    yield from ("On the command line, as `COSERVE_<NAME>` in the environment, or in the TOML file of `--config`.", "")
    hints, fields = get_type_hints(Config), {field.name: field for field in dataclasses.fields(Config)}
    for title, names in sections().items():
        rows = (
            (f"`{option_line(fields[name], hints[name])}`", default_text(fields[name]), fields[name].metadata["help"])
            for name in names
        )
        yield from (f"## {title}", "", *table(("Option", "Default", ""), rows))


# ---- metrics


def metrics() -> Iterator[str]:
    yield from ("# Metrics", "", MADE, "")
    yield "`GET /metrics` answers in Prometheus' text format. Counters continue when the engine restarts. Times are seconds,"  # noqa: E501
    yield "sizes bytes. No label has the name of an adapter, a job or a user, but for `vllm:lora_requests_info`. Causes of stalls: [operate.md](../guide/operate.md#stalls)."  # noqa: E501
    yield ""
    registry = Metrics(lambda: "").registry
    found = sorted(registry.collect(), key=lambda metric: metric.name)
    rows = ((own, each.type, each.documentation, ", ".join(vllm)) for each in found for own, *vllm in [_names(each)])
    yield from table(("Metric", "Type", "Meaning", "vLLM's name"), rows)


def _names(metric: Metric) -> Iterator[str]:
    """Ours, then vLLM's."""
    for name in (metric.name, *(f"vllm:{theirs}" for theirs in vllm_names(metric.name))):
        yield f"`{name}_total`" if metric.type == "counter" else f"`{name}`"


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
