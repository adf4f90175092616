"""Compiles Triton kernels into Triton's cache on disk, in processes that need no GPU.

Much of a compilation is Python, so threads would contend for the GIL.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

OnCompiled = Callable[[str, float], None]
"""Called with the name of a kernel that was compiled and the seconds that it took."""


def ignore_compiled(_name: str, _seconds: float) -> None:
    """Ignore the kernel; the default `OnCompiled`."""


def compile_kernel(module: str, name: str, specialization: str, target: GPUTarget) -> tuple[str, float] | None:
    """Compile the kernel `name` of `module` for `target`. Return its name and the seconds it took, or None if it was
    cached.

    `specialization`: JSON, as passed to Triton's `jit_cache_hook`. Not reentrant: one call at a time per process.
    """
    given, began, hits = json.loads(specialization), time.monotonic(), list[bool]()
    constants = {
        tuple(at): _decode(value) for at, value in zip(given["constant_keys"], given["constant_vals"], strict=True)
    }
    attributes = {tuple(at): value for at, value in zip(given["attrs_keys"], given["attrs_vals"], strict=True)}
    signature = {key: _tuples(value) for key, value in given["signature"].items()}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in given["options"].items()}
    source = ASTSource(getattr(import_module(module), name), signature, constants, attributes)
    listener = knobs.compilation.listener

    def heard(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = heard
    try:
        triton.compile(source, target=target, options=options)
    finally:
        knobs.compilation.listener = listener
    return None if all(hits) else (name, time.monotonic() - began)


def _decode(value: object) -> object:
    """Decode a constant of `triton.runtime.jit.serialize_specialization_data`, as `JITFunction.preload` does."""
    if isinstance(value, Mapping):
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


def _tuples(value: object) -> object:
    """Convert lists back to tuples, which JSON does not have."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


@contextmanager
def compiled_by(processes: Executor, on_compiled: OnCompiled = ignore_compiled) -> Iterator[None]:
    """Compile kernels in `processes`: inside, a kernel's `warmup` has one of them compile the specialization, once.

    All compilations have ended on exit. A kernel that is launched inside anyway is compiled in this process. An error
    of a compilation is raised on exit, even if the body raised; nothing more is compiled after it.
    """
    target, asked, before = driver.active.get_current_target(), set[str](), knobs.runtime.jit_cache_hook
    running, failed = set[Future[tuple[str, float] | None]](), list[BaseException]()

    def collect() -> None:
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(future)
                if (error := future.exception()) is not None:
                    failed.append(error)
                elif (found := future.result()) is not None:
                    on_compiled(*found)

    def ask(*, fn: Any, compile: Mapping[str, Any], is_manual_warmup: bool, **_: object) -> bool:  # noqa: ANN401 - Triton's own names and types
        given = compile["specialization_data"]
        if is_manual_warmup and given not in asked and not failed:
            asked.add(given)
            try:
                running.add(processes.submit(compile_kernel, fn.module, fn.name, given, target))
            except BrokenExecutor as error:
                failed.append(error)
        return is_manual_warmup  # True tells Triton not to compile it here

    knobs.runtime.jit_cache_hook = ask
    try:
        yield
        collect()
    finally:
        knobs.runtime.jit_cache_hook = before
        for future in running:
            future.cancel()
    if failed:
        raise failed[0]
