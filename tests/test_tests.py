"""Tests use what is public: they neither read nor set private names of the package, and patch none of its constants.
What they share is in `tests/support`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import below, names_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = re.compile(r"_(?!_)\w+|__\w+(?<!__)")
CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*")
PATCHING = {"setattr", "setitem", "delattr", "object"}
"""Functions of `MonkeyPatch`, `mock.patch` and the interpreter that replace the attribute of a name."""


@cache
def private_names() -> frozenset[str]:
    """Every private name that the package defines: functions, classes, variables, fields, attributes."""
    statements = (node for path in (ROOT / "coserve").rglob("*.py") for node in below(tree_of(path)))
    return frozenset(name for node in statements for name in names_of(node) if PRIVATE.fullmatch(name))


def imported(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports, and the top packages that they are of."""
    found = dict[str, str]()
    for node in below(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: (node.module or "").split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Import):
            tops = [(alias.asname, alias.name.split(".")[0]) for alias in node.names]
            found |= {name or top: top for name, top in tops}
    return found


@cache
def module_names(name: str) -> set[str]:
    """What a module of the repository binds at its top, and the modules below it; empty if there is no such file."""
    path = ROOT / name.replace(".", "/")
    below = {one.stem for one in path.iterdir()} if path.is_dir() else set[str]()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text() if file.exists() else "")
    bound = {getattr(node, "name", None) or getattr(node, "id", "") for node in ast.walk(tree)}
    return below | bound | {*imported(tree)}


def root(node: ast.expr) -> str:
    """`a` of `a.b.c`, empty if it is no name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def patched(call: ast.Call, own: set[str]) -> Iterator[str]:
    """The private names and constants of the package that a call replaces."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else root(call.func)
    texts = [one.value for one in call.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if function not in {*PATCHING, "patch"} or not texts:
        return
    name = texts[0].rsplit(".", 1)[-1]
    ours = texts[0].startswith("coserve.") or root(call.args[0]) in own
    if name in private_names() or (ours and CONSTANT.fullmatch(name)):
        yield name


parsed = cache(tree_of)


def offences(tree: ast.Module) -> list[str]:
    """Line and name of each use of something private, or of a constant that is replaced."""
    origins, found = imported(tree), list[tuple[int, str]]()
    own = {name for name, top in origins.items() if top == "coserve"}
    others = {name for name, top in origins.items() if top not in ("coserve", "tests")}
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(bases=bases) if any(root(base) in own for base in bases):
                fields = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
                found += [(one.lineno, one.attr) for one in fields if one.attr in private_names()]
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                found += [(one.lineno, one.name) for one in methods if one.name in private_names()]
            case ast.Attribute(value=value, attr=name) if name in private_names():
                itself = isinstance(value, ast.Name) and value.id in ("self", "cls")
                found += [] if itself or root(value) in others else [(node.lineno, name)]
            case ast.ImportFrom(module=module, names=names) if (module or "").split(".")[0] == "coserve":
                found += [(node.lineno, alias.name) for alias in names if PRIVATE.fullmatch(alias.name)]
            case ast.Call():
                found += [(node.lineno, name) for name in patched(node, own)]
    return sorted({f"{line}: {name}" for line, name in found})


FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_tests_use_what_is_public() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in offences(parsed(path))]
    assert not wrong


def test_what_tests_share_is_in_support() -> None:
    shared = re.compile(r"^ *(?:from|import) tests\.(?!support\b).*", re.MULTILINE)
    wrong = {str(path.relative_to(ROOT)): found for path in FILES if (found := shared.findall(path.read_text()))}
    assert not wrong


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("engine.run()", True),
        ("self._jobs = 1", True),
        ("trainer._jobs", False),
        ("trainer._jobs = {}", False),
        ("point._replace(x=1)", True),
        ("from coserve.model.lora import _forward", False),
        ("import coserve.engine.engine as engine; patch.setattr(engine, 'STATS_INTERVAL', 1)", False),
        ("patch.setattr('coserve.engine.engine.STATS_INTERVAL', 1)", False),
        ("patch.setattr('coserve.engine.engine.Engine', 1)", True),
        ("import coserve.engine.engine as engine; patch.setattr(engine, 'now', 1)", True),
        ("patch.setattr(trainer, '_jobs', {})", False),
        ("import sys; patch.setattr(sys, 'PLATFORM', 1)", True),
        ("import torch; torch._jobs()", True),
        ("from coserve.engine.engine import Engine\nclass Own(Engine):\n    def own(self): return self._jobs", False),
        ("from coserve.engine.engine import Engine\nclass Own(Engine):\n    def own(self): return self._of_mine", True),
        ("class Own:\n    def own(self): return self._jobs", True),
    ],
)
def test_what_is_found(line: str, allowed: bool) -> None:
    assert (offences(ast.parse(line)) == []) == allowed


def test_names_that_are_imported_where_they_are_used_exist() -> None:
    """Also in tests that need a GPU, whose functions run nowhere else."""
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in FILES
        for node in below(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("coserve", "tests")
        for alias in node.names
        if alias.name not in module_names(node.module or "")
    ]
    assert not missing, missing
