"""Copies of recurrent states around a forward: from the snapshots that its sequences begin from, and into new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coserve.generate.execution.interface import SequenceInput
from coserve.memory.kv import KvCache


@contextmanager
def snapshots(kv: KvCache, sequences: Sequence[SequenceInput]) -> Iterator[None]:
    """Restore the states of these sequences before the forward inside, and save them after it, where they ask for
    it."""
    if kv.snapshots is None:
        yield
        return
    for own in sequences:
        if own.restored:
            kv.snapshots.restore(own.run.slot, own.restored)
    yield
    for own in sequences:
        if own.saved:
            kv.snapshots.save(own.run.slot, own.saved)
