"""A sandboxed Jinja environment for templates of unknown origin, and limits for the process that renders them.

Jinja's sandbox gives a template no access to Python, but does not limit time or memory. So templates are rendered in
helper processes, inside `limits`: too much memory raises `MemoryError` there; too much processor time ends that
process, not the API.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coserve.core.processes import limited

SECONDS = 5
"""Seconds of processor time for compiling and rendering."""
MEMORY = 512 << 20
"""Bytes of memory beyond what the process already has."""
MAX_SOURCE = 1 << 18
MAX_TEXT = 1 << 24
"""Most characters of the rendered text."""
TOO_LONG = f"the base's chat template exceeds its limits: {SECONDS} s of processor time"
_MEMORY = Path("/proc/self/statm")


class LimitExceeded(TemplateError):
    """The template needs more text or memory than allowed."""


@contextmanager
def limits() -> Iterator[None]:
    """Bound memory and processor time of the block, in a helper process. Raises `LimitExceeded` for memory; for time,
    the kernel ends the process with SIGXCPU."""
    seconds = math.ceil(time.process_time()) + SECONDS
    try:
        with limited(resource.RLIMIT_CPU, seconds), limited(resource.RLIMIT_DATA, _data_bytes() + MEMORY):
            yield
    except MemoryError:
        raise LimitExceeded(f"{MEMORY >> 20} MiB of memory") from None


def _data_bytes() -> int:
    """Return the bytes that count for `RLIMIT_DATA`; 0 on systems other than Linux, which ignore that limit."""
    return int(_MEMORY.read_text().split()[5]) * resource.getpagesize() if _MEMORY.exists() else 0


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment with the settings of transformers."""

    def __init__(self, extensions: Iterable[type[Extension]] = ()) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # no constant is computed at compile time
            extensions=[*extensions, loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> tuple[Template, frozenset[str]]:
        """Compile a template; return it and the variables that it reads. Raises `jinja2.TemplateError`, e.g.
        `LimitExceeded`."""
        if len(source) > MAX_SOURCE:
            raise LimitExceeded(f"a source of {MAX_SOURCE} characters")
        template = self.from_string(source)
        return template, frozenset(find_undeclared_variables(self.parse(source)) - self.globals.keys())


def render(template: Template, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the rendered text in chunks, in order. Raises `LimitExceeded` if it is too long."""
    left = MAX_TEXT
    for part in template.root_render_func(template.new_context(dict(values))):
        left -= len(part)
        if left < 0:
            raise LimitExceeded(f"{MAX_TEXT} characters of text")
        yield part
