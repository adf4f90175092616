"""A Jinja environment for untrusted templates: no access to Python, limited time, limited text.

Jinja's sandbox stops attribute escapes, not `'x' * 10**9` or nested loops. Here every way to make a large value from a
small template is measured before it happens (operators, calls, filters, literals, captured blocks), and a trace
function in the rendering thread ends what runs too long. Single native calls stay short because their inputs are small.
"""

# ruff: noqa: ANN401, SIM905  (a template's values have no type; the lists of names read better as text)

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 1.0
MAX_SOURCE = 1 << 18
MAX_TEXT = 1 << 21
"""Characters of one value, and of the whole result."""
MAX_MADE = 1 << 26
"""Characters that one rendering may make in all, intermediate values included."""
MAX_BITS = 1024
MAX_COUNT = 100

_STR = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
    "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper".split()
)
_CONTAINER = frozenset("get items keys values copy count index".split())
_FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float format groupby indent int items join last length list "
    "lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title trim unique "
    "upper wordcount".split()
)
_WIDE = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*")
"""A field width in a format string that would make a small value large."""


class LimitExceeded(TemplateError):
    """The template needs more time or text than allowed."""


class _Budget:
    """The time and text left for one rendering. Sizes are cached by identity: values are immutable in the sandbox."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.left = MAX_MADE
        self._sizes: dict[int, tuple[object, int]] = {}

    def size(self, value: object) -> int:
        """Characters of `value` printed, roughly. Raises `LimitExceeded` above `MAX_TEXT`, or where it has no limit."""
        if isinstance(value, str | bytes):
            size = len(value)
        elif isinstance(value, int):
            size = 1 + value.bit_length() // 3
        elif value is None or isinstance(value, float | Undefined):
            size = 8
        elif isinstance(value, list | tuple | dict | set | frozenset):
            size = self._container(value)
        else:
            size = 64  # a loop, a macro, a generator: opaque
        if size > MAX_TEXT:
            raise LimitExceeded(f"a value of more than {MAX_TEXT} characters")
        return size

    def _container(self, value: Any) -> int:
        known = self._sizes.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        children = value if not isinstance(value, dict) else [part for item in value.items() for part in item]
        size = 2 + sum(2 + self.size(child) for child in children)
        self._sizes[id(value)] = (value, size)
        return size

    def made(self, value: Any) -> Any:
        """Charge `value` as new, and return it."""
        self.charge(self.size(value))
        return value

    def charge(self, size: int) -> None:
        self.left -= size
        if size > MAX_TEXT or self.left < 0:
            raise LimitExceeded(f"more than {MAX_TEXT} characters of text")

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > self.deadline:
            raise LimitExceeded("it takes too long")
        return self.trace


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limits(seconds: float = SECONDS) -> Iterator[_Budget]:
    """Run the body (compiling or rendering, in this thread) within the limits."""
    budget = _Budget(seconds)
    token, before = _budget.set(budget), sys.gettrace()
    sys.settrace(budget.trace)
    try:
        yield budget
    finally:
        sys.settrace(before)
        _budget.reset(token)


def _check_call(name: str, value: object, arguments: tuple[Any, ...]) -> None:
    """Refuse a call of a filter or a string method that would make, or take, much more than it gets."""
    budget = _budget.get()
    if name == "replace" and len(arguments) >= 2:
        old, new = str(arguments[0]), str(arguments[1])
        budget.charge((1 + budget.size(value) // max(1, len(old))) * len(new))
    elif name == "join":
        budget.charge(budget.size(value) * (1 + sum(map(budget.size, arguments[:1]))))
    elif name == "format":
        _check_format(value, arguments)
    elif name in ("indent", "round") and any(isinstance(a, int) and abs(a) > MAX_COUNT for a in arguments):
        raise LimitExceeded(f"{name} by more than {MAX_COUNT}")
    elif name in ("strip", "lstrip", "rstrip", "trim") and sum(map(budget.size, arguments)) > MAX_COUNT:
        raise LimitExceeded(f"{name} of more than {MAX_COUNT} characters")
    elif name == "sum" and any(isinstance(a, list | tuple) for a in arguments):
        raise LimitExceeded("a sum of lists")


def _check_format(template: object, arguments: object) -> None:
    """Refuse `%` where the widths, or one long argument named often, make a small format large."""
    if isinstance(template, str):
        if _WIDE.search(template):
            raise LimitExceeded("a format with a large field width")
        budget = _budget.get()
        budget.charge(template.count("%") * budget.size(arguments))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, measured. Taking the context keeps Jinja from computing it while it compiles."""
    wanted = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def measured(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Iterator):
            value = _budget.get().made(list(value))  # a lazy sequence has no size yet
        _check_call(name, value, (*args, *kwargs.values()))
        if wanted is None:
            first: tuple[object, ...] = ()
        else:
            first = ({"context": context, "eval_context": context.eval_ctx}.get(wanted.name, context.environment),)
        return _budget.get().made(function(*first, value, *args, **kwargs))

    return measured


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if indent is not None and indent > 16:
        raise LimitExceeded("tojson with an indent above 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message)[:500])


def _strftime_now(format: str) -> str:
    if len(format) > 64 or re.search(r"\d{3,}", format):
        raise LimitExceeded("strftime_now with a large format")
    return datetime.now().strftime(format)


class _Namespace(Namespace):
    """Namespaces may hold each other; printing one prints nothing of what it holds."""

    def __repr__(self) -> str:
        return "<namespace>"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made: dict[Any, Any] = _budget.get().made(dict(*args, **kwargs))
    return made


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `compile_template`, render inside `limits()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Iterable[Any] = ()) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._print,
            extensions=[*extensions, loopcontrols],
        )
        self.filters = {name: _filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = _filter("tojson", _tojson)
        self.filters["coserve_made"] = _filter("coserve_made", lambda value: value)
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Every literal container and every `~` is measured where it is made: nothing grows by doubling unseen."""
        if len(source) > MAX_SOURCE:
            raise LimitExceeded(f"its source has more than {MAX_SOURCE} characters")
        tree: nodes.Template = self._measured(super()._parse(source, name, filename))
        return tree

    def _measured(self, node: Any) -> Any:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, self._measured(value))
            elif isinstance(value, list):
                value[:] = [self._measured(child) if isinstance(child, nodes.Node) else child for child in value]
        if isinstance(node, nodes.List | nodes.Dict | nodes.Concat) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return nodes.Filter(node, "coserve_made", [], [], None, None, lineno=node.lineno, environment=self)
        return node

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins a captured block."""
        parts = list(parts)
        _budget.get().charge(sum(map(len, parts)))
        return "".join(parts)

    @staticmethod
    def _print(value: object) -> object:
        return _budget.get().made(value)

    def wrap_str_format(self, value: object) -> None:
        """`str.format` is not offered: its field widths can be computed."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STR
        if isinstance(obj, dict | list | tuple):
            return attr in _CONTAINER
        return isinstance(obj, LoopContext | Namespace | Macro | Undefined) and super().is_safe_attribute(
            obj, attr, value
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "%":
            _check_format(left, right)
        elif operator in ("*", "**"):
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MAX_BITS:
                    raise LimitExceeded("a number that is too large")
            elif isinstance(left, int) or isinstance(right, int):
                times, what = (left, right) if isinstance(left, int) else (right, left)
                budget.charge(budget.size(what) * max(0, times))
        elif not isinstance(left, int | float):
            budget.charge(budget.size(left) + budget.size(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_budget.get().made(list(a)) if isinstance(a, Iterator) else a for a in args)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name, arguments = obj.__name__, (*args, *kwargs.values())
            value, arguments = (args[0], (owner,)) if name == "join" and args else (owner, arguments)
            _check_call(name, value, arguments)
        return _budget.get().made(super().call(context, obj, *args, **kwargs))

    def compile_template(self, source: str) -> Template:
        """Raises `jinja2.TemplateError`, `LimitExceeded` among them."""
        with limits():
            return self.from_string(source)


def render(template: Template, values: Mapping[str, object]) -> Iterator[str]:
    """The parts of the result, in order; run inside `limits()`."""
    budget = _budget.get()
    for part in template.root_render_func(template.new_context(dict(values))):
        budget.charge(len(part))
        yield part
