"""Adapters' pairs in a LoRA server that several engines use: an adapter that two of them have is in memory once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from weakref import WeakValueDictionary

from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.reading import PairsRuns, ReadPairs
from coserve.kernels.lora.types import LoraPair


class SharedPairs:
    """The adapters whose pairs are in some engine's slot, known by what is in their files: two engines' data folders
    may have different adapters of one name. Its methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adapters = WeakValueDictionary[Hashable, _Adapter]()

    def reader(self, read: ReadPairs, form: Hashable) -> ReadPairs:
        """Wrap an engine's `read`, so that it reads only what no engine has. `form`: what the pairs depend on besides
        the files."""

        def shared(ref: AdapterRef, digests: AdapterDigests | None) -> PairsRuns:
            if digests is None or not digests.config:  # the files are not known
                return read(ref, digests)
            with self._lock:
                found = self._adapters.get((form, digests))
                if found is None or found.error is not None:
                    found = self._adapters[form, digests] = _Adapter()
            return found.read(lambda: read(ref, digests))

        return shared


class _Adapter:
    """One adapter's pairs. Each run is read once, by whoever needs it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: PairsRuns | None = None
        self._runs = list[Mapping[str, LoraPair]]()
        self.error: Exception | None = None
        """Why the next run could not be read."""

    def read(self, read: Callable[[], PairsRuns]) -> PairsRuns:
        """Return the runs for one more slot. `read` is called if this is the first one."""
        with self._lock:
            if self._found is None:
                self._found = read()
            return replace(self._found, runs=self._each(self._found.runs), kept=self)

    def _each(self, source: Iterator[Mapping[str, LoraPair]]) -> Iterator[Mapping[str, LoraPair]]:
        for place in itertools.count():
            with self._lock:
                if place == len(self._runs) and not self._next(source):
                    return
                run = self._runs[place]
            yield run

    def _next(self, source: Iterator[Mapping[str, LoraPair]]) -> bool:
        """Read one more run; False: there is none."""
        if self.error is not None:
            raise self.error
        try:
            run = next(source, None)
        except Exception as error:
            self.error = error
            raise
        if run is None:
            return False
        self._runs.append(run)
        return True
