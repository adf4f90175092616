"""Adapters on all ranks: each rank reads its own shard of the files, and loads it into the same pages."""

from __future__ import annotations

from collections.abc import Mapping

from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.ranks.commands import DropAdapter, LoadIntoPages, ReadAdapter
from coserve.engine.ranks.followers import Followers
from coserve.lora.store.host_memory import Unread
from coserve.lora.store.store import Load
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


class FollowersCopies:
    """Implements `CopyMirror`: followers load and drop copies in step with rank 0."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """See `CopyMirror`."""
        self._followers.send(LoadIntoPages(ref, span.first, span.pages, dict(moved)))

    def dropped(self, ref: AdapterRef) -> None:
        """See `CopyMirror`."""
        self._followers.send(DropAdapter(ref))


def load_on_all(load: Load, followers: Followers) -> Load:
    """Wrap `load` so that it returns once every follower has its own host copy too. Raises any rank's error."""

    def everywhere(ref: AdapterRef, digests: AdapterDigests | None) -> Unread | LoraWeights:
        answers = followers.ask(ReadAdapter(adapter=ref, digests=digests))
        try:
            weights = load(ref, digests)
        finally:
            answers.settle()  # so that no copy is dropped while it is being read
        answers.wait()
        return weights

    return everywhere
