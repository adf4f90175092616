"""Speeds up the imports of torch, transformers and our own modules at a process's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

UNUSED = ("scipy", "torchvision", "click", "rich")
"""Packages hidden from transformers while it is imported. Its image losses take half a second to import the first two,
and httpx, which fetches from the hub, has a command line that imports the others."""
NEVER_USED = ("sklearn", "kernels")
"""Hidden for good, because modules that transformers imports later look for them, too: scikit-learn takes two seconds.
Hugging Face's `kernels` would replace layers that coserve runs itself; where the folder `kernels` of this repository
can be imported, looking for it reads the files of every installed package."""


@contextmanager
def fast_imports() -> Iterator[None]:
    """Context for a process's imports. Garbage collection is off inside, and never visits the imported objects later.
    Packages that transformers would import but that are not used here count as not installed."""
    for name in NEVER_USED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None marks it as missing
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
        for name in hidden:  # a model's code may import it, or ask transformers for it
            sys.modules.pop(name, None)
            forget = getattr(getattr(checks, f"is_{name}_available", None), "cache_clear", lambda: None)
            forget()


class _LazyDistributions(dict[str, list[str]]):
    """A lazy `metadata.packages_distributions()`. The full one reads the file lists of all installed packages; here
    that happens only for a package whose distribution has another name."""

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
