"""Builds the fields of `coserve finetune`'s request from its options and from `--set FIELD=VALUE`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from coserve.api.http.field_docs import field_docs
from coserve.cli.common import field_option
from coserve.core.hints import fields_of
from coserve.core.schemas.jobs import FinetuneRequest, OnConflict
from coserve.core.training.other_names import take_other_names
from coserve.core.training.settings import TrainingRequest, TrainOn
from coserve.core.types import LoraRequest
from coserve.core.validation import explain

ARGUMENTS = {
    "adapter": "give it as the argument ADAPTER",
    "data": "give the rows as the argument FILE",
    "path": "give the rows as the argument FILE",
    "validation": "give their file with --validation-file",
}
"""Fields of the request that `--set` refuses, with what to do instead."""
OPTIONS: dict[str, tuple[str, Any]] = {
    "rank": ("lora.r", int),
    "alpha": ("lora.alpha", float),
    "bd_blocks": ("lora.bd_blocks", int),
    "continue_from": ("continue_from", str),
    "on_conflict": ("on_conflict", OnConflict),
    "epochs": ("training.epochs", float),
    "steps": ("training.steps", int),
    "learning_rate": ("training.learning_rate", float),
    "batch_tokens": ("training.batch_tokens", int),
    "batch_rows": ("training.batch_rows", int),
    "validation_split": ("training.validation_split", float),
    "train_on": ("training.train_on", TrainOn),
    "lora_plus_ratio": ("training.lora_plus_ratio", float),
    "neftune_alpha": ("training.neftune_alpha", float),
    "sample_steps": ("training.sample_steps", int),
    "sample_max_tokens": ("training.sample_max_tokens", int),
}
"""Options that are made from fields of the request, and their types."""
FIELDS = {name: field for name, (field, _) in OPTIONS.items()} | {
    "columns": "columns",
    "targets": "lora.targets",
    "dpo_beta": "training.loss",
    "optimizer": "training.optimizer",
    "sample_prompt": "training.sample_prompts",
    "test": "test.data",
}
"""The field of each option."""
SetFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="any field of POST /finetune, such as training.schedule=cosine, lora.dropout=0.05 or "
        "document.chunk_tokens=512; may be given several times",
    ),
]
ColumnNames = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="FIELD=COLUMN",
        help="columns of the file that are called otherwise than the fields of a row, such as "
        "prompt=question,completion=answer",
        show_default="the fields' own names",
    ),
]
Detach = Annotated[bool, typer.Option(help="print the job and do not wait for it")]
FLAGS = {field: f"--{name.replace('_', '-')}" for name, field in FIELDS.items()}

_Path = tuple[str, ...]
"""Path of a nested field: names from the outermost object to the field."""


def field_options() -> Iterator[inspect.Parameter]:
    """Yield the options of `OPTIONS`, with the texts of their fields."""
    texts, defaults = dict[str, str](), dict[str, object]()
    for prefix, struct in (("", FinetuneRequest), ("lora.", LoraRequest), ("training.", TrainingRequest)):
        texts |= {prefix + name: text for name, text in field_docs(struct).items()}
        defaults |= {prefix + field.name: field.default for field in msgspec.structs.fields(struct)}
    for name, (field, kind) in OPTIONS.items():
        shown = "" if defaults[field] is None else f" Default: {defaults[field]}."
        yield field_option(name, kind, None, texts[field] + shown)


def request_settings(options: Mapping[str, object], assignments: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a `FinetuneRequest` in JSON's form.

    `options`: values of `FIELDS`, None: not given. `assignments`: texts `FIELD=VALUE`, whose value is
    JSON or a text. Raises `typer.BadParameter` for fields that the request does not have or that have two values.
    """
    given: dict[_Path, tuple[Any, str]] = {}
    for name, value in options.items():
        if value is not None:
            _add(given, _path(FIELDS[name]), value, FLAGS[FIELDS[name]])
    for text in assignments:
        field, equals, shown = text.partition("=")
        path = _path(field)
        if not (equals and all(path)):
            raise typer.BadParameter(f"--set: expected FIELD=VALUE, got {text!r}")
        if path[0] in ARGUMENTS:
            raise typer.BadParameter(f"--set {path[0]}: {ARGUMENTS[path[0]]}")
        _add(given, path, _value(path, shown), "--set")
    settings = _nested({path: value for path, (value, _) in given.items()})
    if any(origin == "--set" for _, origin in given.values()):
        _check(settings)
    return settings


def column_names(texts: Sequence[str]) -> dict[str, str]:
    """Return columns by field from values of `--columns`, each `FIELD=COLUMN,...`. Raises `typer.BadParameter`."""
    names = {}
    for text in ",".join(texts).split(",") if texts else ():
        field, equals, column = text.partition("=")
        if not (equals and field.strip() and column.strip()):
            raise typer.BadParameter(f"--columns: expected FIELD=COLUMN,..., got {text!r}")
        names[field.strip()] = column.strip()
    return names


def _path(field: str) -> _Path:
    return tuple(field.split("."))


def _add(given: dict[_Path, tuple[Any, str]], path: _Path, value: object, origin: str) -> None:
    """Add the value, or each field of an object. Raises `typer.BadParameter` if the field already has another value."""
    for leaf, own in _leaves(path, value):
        for other, (found, first) in given.items():
            shared = min(len(leaf), len(other))
            if leaf[:shared] == other[:shared] and (leaf != other or own != found):
                field = ".".join(leaf[:shared])
                raise typer.BadParameter(f"expected one value of {field}, got two: {first} and {origin}")
        given[leaf] = own, origin


def _leaves(path: _Path, value: object) -> Iterator[tuple[_Path, object]]:
    """Yield path and value of an object's fields, those of nested objects included."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*path, name), inner)
    else:
        yield path, value


def _nested(values: Mapping[_Path, Any]) -> dict[str, Any]:
    """Nest the fields again: the inverse of `_leaves`."""
    root: dict[str, Any] = {}
    for (*parents, name), value in values.items():
        inside = root
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[name] = value
    return root


def _value(path: _Path, text: str) -> object:
    """Parse `text` as JSON. Return it unchanged if it is not JSON, or if the field accepts only texts."""
    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return text if _fits({path: text}) and not _fits({path: value}) else value


def _fits(values: Mapping[_Path, object]) -> bool:
    try:
        _converted(_nested(values))
    except msgspec.ValidationError:
        return False
    return True


def _check(settings: dict[str, Any]) -> None:
    """Raise `typer.BadParameter` with the error that the API would give."""
    try:
        _converted(settings)
    except msgspec.ValidationError as error:
        wrong = explain(error, settings, FinetuneRequest)
        raise typer.BadParameter(wrong.message if wrong.field is None else f"{wrong.field}: {wrong.message}") from error


def _converted(settings: Mapping[str, object]) -> FinetuneRequest:
    body: dict[str, object] = {"adapter": "adapter", **settings}
    take_other_names(body, fields_of(FinetuneRequest))
    return msgspec.convert(body, FinetuneRequest)
