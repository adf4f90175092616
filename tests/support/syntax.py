"""Syntax trees, statement by statement: a walk through expressions too takes five times as long."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree. Garbage collections while it grows would take most of the time, and find nothing."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def below(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement within `node`, at any depth, with handlers of exceptions and cases of matches."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from below(child)


def names_of(statement: ast.AST) -> Iterator[str]:
    """The names and attributes that a statement defines or assigns, without those within expressions (`:=`, `for`)."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
            return
        case ast.Assign():
            targets = statement.targets
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            targets = [statement.target]
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in statement.items if item.optional_vars]
        case _:
            return
    for node in (node for target in targets for node in ast.walk(target)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
