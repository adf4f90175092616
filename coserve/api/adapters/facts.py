"""Facts that the registry has of a version besides its record: labels, pin and aliases."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.types import AdapterRef
from coserve.state.registry.records import Labels
from coserve.state.registry.registry import Registry


@dataclass(frozen=True)
class Facts:
    labels: Labels
    pinned: bool
    aliases: tuple[str, ...]


class FactsReader:
    """Facts of many versions in one snapshot of the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._pins = registry, registry.pins()
        self._aliases = dict[AdapterRef, list[str]]()
        for alias in registry.aliases():
            for ref in {alias.target, alias.canary or alias.target}:
                self._aliases.setdefault(ref, []).append(alias.name)

    def of(self, ref: AdapterRef) -> Facts:
        aliases = tuple(self._aliases.get(ref, ()))
        return Facts(self._registry.labels(ref.id), ref in self._pins, aliases)
