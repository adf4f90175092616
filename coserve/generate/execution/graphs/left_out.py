"""Graphs that could not be captured."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from coserve.core.errors import EngineFault
from coserve.model.faults import contained, out_of_memory

log = logging.getLogger(__name__)


class LeftOut:
    """Keys of graphs whose capture failed: it is not tried again, and their steps run without a graph."""

    def __init__(self, device: torch.device, *, tolerated: bool = True) -> None:
        """`tolerated`: False with tensor parallelism, where all ranks must have the same graphs."""
        self._device, self._tolerated = device, tolerated
        self._keys: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @contextmanager
    def capturing(self, key: Hashable) -> Iterator[None]:
        """Context of a capture. If it raises, the graph is left out and the error is swallowed, provided that this is
        tolerated and the device still works."""
        try:
            with contained(self._device):
                yield
        except EngineFault:
            raise
        except Exception as error:
            if not self._tolerated:
                raise
            self._keys.add(key)
            # The end of a capture that failed may raise an error of its own.
            short = out_of_memory(error) or (error.__context__ is not None and out_of_memory(error.__context__))
            why = "there is no memory for it" if short else "its capture failed"
            text = "the CUDA graph of %s is left out, as %s: such steps run without it"
            log.warning(text, key, why, exc_info=None if short else error)
