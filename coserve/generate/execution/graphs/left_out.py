"""Graphs for whose capture there was no memory."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from coserve.model.faults import out_of_memory

log = logging.getLogger(__name__)


class LeftOut:
    """Keys of graphs that are not captured again: the steps that they would hold run without them."""

    def __init__(self, *, tolerated: bool = True) -> None:
        """`tolerated`: False where other ranks run the same graphs, so that all have one or none."""
        self._tolerated = tolerated
        self._keys: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @contextmanager
    def capturing(self, key: Hashable) -> Iterator[None]:
        """Where memory runs out inside, the graph is left out and nothing is raised, if that is tolerated."""
        try:
            yield
        except Exception as error:
            # The end of a capture that failed may raise an error of its own.
            if not self._tolerated or not (
                out_of_memory(error) or (error.__context__ is not None and out_of_memory(error.__context__))
            ):
                raise
            self._keys.add(key)
            log.warning("no memory to capture the CUDA graph of %s: such steps run without it", key)
