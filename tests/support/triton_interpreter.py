"""Triton's interpreter, which runs kernels without a GPU, made faster: most of its time goes into looking for its own
builtins, and into checks that it does not make."""

from __future__ import annotations

import inspect
import math
import os
from functools import cache
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter

POINTER = np.dtype(np.uint64)


@cache
def _builtins(package: Any) -> tuple[tuple[str, Any], ...]:
    """As they are before they are first replaced."""
    return tuple((name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


def _call(self: Any, *given: Any, **named: Any) -> Any:
    """Of a function by a kernel: replaces the builtins of Triton's own library if they are not yet."""
    if core.is_builtin(self.fn.__globals__.get("core", language).arange):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*given, **named)


@cache
def _block(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple(shape), core.validate_block_shape(shape)


@cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel = _block(tuple(core._unwrap_shape(shape)))
    self.name = f"<{self.shape}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shape(tuple(kind.shape.values) if kind.is_block() else ())


def make_faster() -> None:
    """At each call of a kernel, and of each function that it calls, the interpreter goes through all members of
    Triton's language to replace those that are builtins. From now on it goes through the builtins that it found the
    first time, and once a kernel.

    It also computes each sum and product of integers again in 64 bits, to assert that none overflows, and drops the
    assertion, since debugging is off; it makes a table of all types to look up one, and each tensor's shape anew.

    Nothing is replaced where kernels are compiled.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter._patch_builtin = _patch_builtin
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    numpy_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: POINTER if kind.scalar.is_ptr() else numpy_dtype(kind.scalar)
    core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
