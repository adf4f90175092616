"""Makes the imports of torch, transformers and our own modules take less time at a process's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

UNUSED = ("scipy", "torchvision", "click", "rich")
"""Installed or not, transformers gets none of these while it is imported: its losses of image models take half a second
to import the first two, and httpx, which fetches from the hub, has a command line of its own with the others."""


@contextmanager
def fast_imports() -> Iterator[None]:
    """Around the imports of a process: no automatic collection, none visits later what they made, which stays; and
    packages that transformers would import, and we do not use, count as not installed."""
    # Two seconds, and not only at the first import of transformers: modules that it imports later look for it, too.
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]  # Python's way to say that there is none
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    everything, metadata.packages_distributions = metadata.packages_distributions, _LazyDistributions
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        metadata.packages_distributions = everything
        checks = sys.modules.get("transformers.utils.import_utils")
        for name in hidden:  # the code of a model may import it, or ask transformers for it
            sys.modules.pop(name, None)
            forget = getattr(getattr(checks, f"is_{name}_available", None), "cache_clear", lambda: None)
            forget()


class _LazyDistributions(dict[str, list[str]]):
    """`metadata.packages_distributions()`, which reads the list of files of everything that is installed, when a
    package is looked up whose distribution has another name."""

    _everything = staticmethod(metadata.packages_distributions)

    def get(self, package: str, default: object = None) -> object:  # type: ignore[override]
        try:
            return self[package]
        except KeyError:
            return default

    def __missing__(self, package: str) -> list[str]:
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            self.update(self._everything())
        else:
            return [package]
        if package in self:
            return self[package]
        raise KeyError(package)
