"""Messages between the API process and a helper process."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from coserve.core.errors import CoserveError, error_from_code
from coserve.data.pretrained.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaskContext:
    """First argument of every task. Call `progress()` between rows: it tells the caller that the process is not
    stuck."""

    tokenizer: Tokenizer
    progress: Callable[[], None]
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that tasks keep for later calls of the same process."""


Task = Callable[..., Any]
"""A module-level function of coserve, `(context, *arguments) -> result`. It may raise `CoserveError`. Its arguments and
its result are sent as MessagePack, by its annotations."""


@cache
def arguments_of(task: Task) -> type[msgspec.Struct]:
    """Return a struct with the fields of the task's arguments, in their order, without the context."""
    _, *parameters = inspect.signature(task, eval_str=True).parameters.values()
    fields = [
        (each.name, each.annotation) if each.default is each.empty else (each.name, each.annotation, each.default)
        for each in parameters
    ]
    return msgspec.defstruct("Arguments", fields)


@cache
def result_of(task: Task) -> Any:  # noqa: ANN401 - any type
    """Return the type of the task's result."""
    return inspect.signature(task, eval_str=True).return_annotation


class Call(msgspec.Struct, frozen=True):
    """Run a task. As many bytes as `size` follow: its `arguments_of`, or after the first call, which has no task, the
    tokenizer's state."""

    task: str
    size: int
    heartbeat: float
    """Seconds between two heartbeats."""


class Failure(msgspec.Struct, frozen=True):
    """A serialised `CoserveError`."""

    code: str
    attributes: dict[str, str | int | float | None]


class Reply(msgspec.Struct, frozen=True):
    """The task's end, or only a heartbeat (`working`). The first heartbeat says that the task begins."""

    working: bool = False
    failure: Failure | None = None
    memory: int = 0
    """Peak resident memory of the process so far, in bytes."""
    result: bytes = b""
    """The task's result as MessagePack."""


def name_of(function: Callable[..., object]) -> str:
    """Return the name by which the helper process finds a module-level function or class of coserve."""
    name = f"{function.__module__}:{function.__qualname__}"
    assert "<" not in name and "." not in function.__qualname__, f"{name} is not at the level of its module"
    return name


def find(name: str) -> Any:  # noqa: ANN401 - a function or a class
    """Return the function or class with a name from `name_of`."""
    module, _, attribute = name.partition(":")
    assert module.split(".")[0] in ("coserve", "tests"), name
    return getattr(importlib.import_module(module), attribute)


def failure_of(error: CoserveError) -> Failure:
    return Failure(error.code, vars(error))


def error_of(failure: Failure) -> CoserveError:
    """Return the error as it was raised."""
    error = error_from_code(failure.code, str(failure.attributes["message"]))
    if error.code == failure.code:
        vars(error).update(failure.attributes)
    return error
