"""Compiles Triton kernels into Triton's cache on disk, in processes that need no GPU.

Much of a compilation is Python, so threads of one process would take turns.
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
    """Counts nothing."""


def compile_kernel(module: str, name: str, specialization: str, target: GPUTarget) -> tuple[str, float] | None:
    """Compile the kernel `name` of `module` for `target`. Returns its name and the seconds that it took; None: it was
    in the cache.

    `specialization`: JSON, as Triton's `jit_cache_hook` gets it. One call at a time in a process."""
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
    """A constant of `triton.runtime.jit.serialize_specialization_data`, as `JITFunction.preload` reads it."""
    if isinstance(value, Mapping):
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


def _tuples(value: object) -> object:
    """JSON has lists in place of tuples."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


@contextmanager
def compiled_by(processes: Executor, on_compiled: OnCompiled = ignore_compiled) -> Iterator[None]:
    """Inside, a kernel's `warmup` has one of these processes compile what its arguments need, once; all is compiled at
    the end. A kernel that is launched all the same is compiled here.

    What a compilation raised is raised at the end, whatever became of it inside; nothing more is compiled then.
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
        return is_manual_warmup  # True: Triton does not compile it

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
