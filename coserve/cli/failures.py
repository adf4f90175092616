"""Error messages of the command line: one line, with advice where possible, and no traceback.

`COSERVE_DEBUG=1` shows the traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import typer

from coserve.core.errors import CoserveError, EngineUnavailable, InvalidRequest, StartupError, Unauthorized, Unreachable
from coserve.core.hints import VERY_NEAR, fields_of, hint, option_hint

DEBUG = "COSERVE_DEBUG"
USAGE, FAILED, INTERRUPTED = 2, 1, 130
"""Exit statuses: wrong arguments or settings, a command failed, Ctrl-C."""
UsageError: Any = typer.BadParameter.__base__
"""click's error for wrong arguments, from wherever this version of typer keeps it."""

_EXPECTED = {
    "int_parsing": "a whole number, got {given!r}",
    "float_parsing": "a number, got {given!r}",
    "greater_than_equal": "at least {ge}, got {given}",
    "less_than_equal": "at most {le}, got {given}",
}
"""Maps types of pydantic's errors to our texts for them."""


@contextlib.contextmanager
def usage_errors(kind: type[CoserveError] = InvalidRequest) -> Iterator[None]:
    """End the command with status 2 for errors of this kind in the block, as for wrong arguments."""
    try:
        yield
    except kind as error:
        raise typer.BadParameter(str(error)) from error


def run_safely(command: Callable[[], object]) -> int:
    """Run `command` and return the exit status, which it may return. Every error becomes one line on standard error."""
    _print_any_text()
    try:
        status = command()
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except SystemExit as leaving:
        return _status(leaving)
    except (KeyboardInterrupt, typer.Abort):  # at a question, Ctrl-C and Ctrl-D raise `Abort`
        _say("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        return _output_closed()
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the last stop: nothing may end in a traceback
        if _is_interrupt(error):
            _say("stopped")
            return INTERRUPTED
        return _failed(_first(error) if isinstance(error, BaseExceptionGroup) else error)


def explain(error: BaseException) -> str:
    """Return one line for an error; for an unexpected one it names the type."""
    match error:
        case UsageError():
            message = _usage(error).removesuffix(".")
            command = "coserve" if error.ctx is None else error.ctx.command_path
            return f"{message[:1].lower()}{message[1:]} (see {command} --help)"
        case Unauthorized():
            return f"{error}; give the daemon's key with --key or COSERVE_API_KEY"
        case Unreachable(sent=False):
            return f"{error} (coserve serve; --url or COSERVE_URL)"
        case EngineUnavailable() | StartupError():
            return str(error)
        case CoserveError():
            return f"{error.code}: {error}"
        case OSError(strerror=str(reason)) if error.filename is not None:
            return f"{os.fsdecode(error.filename)}: {reason}"
        case OSError() if str(error):
            return str(error)
        case UnicodeEncodeError():
            return "an argument is not valid UTF-8 text"
        case UnicodeDecodeError():
            return "expected UTF-8 text, got other bytes"
        case _:
            detail = f": {error}" if str(error) else ""
            return f"unexpected {type(error).__name__}{detail}; {DEBUG}=1 shows where"


def _usage(error: Any) -> str:  # noqa: ANN401 - click's error, wherever typer keeps it
    """Return what is wrong with the arguments: the expected and the given value, or the option that was meant."""
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        options = (
            []
            if error.ctx is None
            else [text for each in error.ctx.command.params for text in each.opts if text[:2] == "--"]
        )
        command = "" if error.ctx is None else str(error.ctx.info_name)
        given = error.option_name
        clear = option_hint(given, options, VERY_NEAR) or _field_hint(given, command, options)
        return f"{error.message}{clear or option_hint(given, options)}"
    message = str(error.format_message())
    if not hasattr(error.__cause__, "errors"):
        return message
    found = error.__cause__.errors()[0]  # pydantic's, with which typer parses values
    expected = _EXPECTED.get(found["type"])
    ours = error.message.replace("Value error, ", "")
    if expected is not None:
        ours = f"expected {expected.format(given=found['input'], **found.get('ctx', {}))}"
    return message.replace(error.message, ours)


def _field_hint(option: str, command: str, options: Collection[str]) -> str:
    """Return a hint to the request's field of that name, if the command's request has one, or to the field's option."""
    if command not in ("finetune", "generate"):
        return ""
    from coserve.cli.finetuning.settings import ARGUMENTS
    from coserve.core.schemas.generation import GenerateRequest
    from coserve.core.schemas.jobs import FinetuneRequest

    name, request = option.lstrip("-").replace("-", "_"), FinetuneRequest if command == "finetune" else GenerateRequest
    found = hint(name, "", fields_of(request))
    field = name if name in ARGUMENTS else found.split()[-1].strip("'?") if found else ""
    if (own := f"--{field.replace('_', '-')}") in options:
        return f"; did you mean {own!r}?"
    if command == "finetune" and field in ARGUMENTS:
        return f"; {ARGUMENTS[field]}"
    if command == "generate":
        return f"{found.removesuffix('?')} of POST /generate{'?' if found.endswith('?') else ''}" if found else ""
    return found.replace(field, f"--set {field}=VALUE") if found else ""


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether the error was raised because Ctrl-C interrupted other code."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if isinstance(error, BaseExceptionGroup) and any(map(_is_interrupt, error.exceptions)):
            return True
        error = error.__cause__ or error.__context__
    return error is not None


def _failed(error: BaseException) -> int:
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    _say(explain(error))
    return USAGE if isinstance(error, StartupError | UsageError) else FAILED


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed too
        print(f"coserve: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _status(leaving: SystemExit) -> int:
    """Flush standard output, and return the exit status of a command that raised `SystemExit`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _output_closed()
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def _output_closed() -> int:
    """Handle a standard output whose reader has left (`| head -1`): discard further output, including the flush at
    exit."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return FAILED


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _print_any_text() -> None:
    """Print a question mark for a character that the terminal cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
