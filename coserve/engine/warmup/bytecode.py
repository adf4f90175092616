"""A cache for the bytecode of libraries, where Python keeps none."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from coserve.config import Config
from coserve.engine.warmup.key import cache_root


def cache_bytecode(config: Config, library: str = "torch") -> None:
    """Let this process and its children cache bytecode in the folder of all caches if `library` has none beside its
    sources and none can be written there.

    That is so in images whose installer compiles nothing, with `PYTHONDONTWRITEBYTECODE` or a read-only installation:
    each start would compile 3,700 modules, which takes half of the CPU time of its imports.
    """
    found = find_spec(library)
    if found is None or found.origin is None or sys.pycache_prefix is not None:
        return
    writable = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    if writable or Path(cache_from_source(found.origin)).exists():
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(cache_root(config) / "bytecode")
    sys.dont_write_bytecode = False
