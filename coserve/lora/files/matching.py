"""Applies an `adapter_config.json` to each site: whether it is targeted, its rank and its alpha, by PEFT's rules.

The values have been checked by `gate`. If a pattern cannot be matched in bounded time, ranks and targets
are read from the tensors instead; alpha has no other source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

from coserve.core.errors import CorruptAdapter, InvalidRequest, UnsupportedAdapter
from coserve.core.names import ADAPTER_CONFIG
from coserve.core.types import BaseSpec
from coserve.lora.files.patterns import FirstMatch, Pattern, Steps, UnsupportedPattern, whole
from coserve.lora.files.targets import is_name, shortest_targets, targets_match

Value = TypeVar("Value", int, float)

ALL_LINEAR = "all-linear"
_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


class PatternTable(Generic[Value]):
    """A config's `rank_pattern` or `alpha_pattern`."""

    def __init__(self, values: Mapping[str, Value], default: Value) -> None:
        self._values: Mapping[str, Value] = values
        self._default: Value = default
        self._first = FirstMatch(values, Steps())
        self.named = all(is_name(pattern) for pattern in values)
        """Whether every pattern is a plain name, which a job's settings may hold unchanged."""

    def of(self, site: str) -> Value:
        """Return the value of the first pattern that matches, or the default. Raises `UnsupportedPattern`."""
        pattern = self._first.find(site)
        return self._default if pattern is None else self._values[pattern]


class Matching:
    """The patterns of one config."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._rank = PatternTable(
            cast("dict[str, int]", config.get("rank_pattern") or {}), cast("int", config.get("r", 8))
        )
        self._alpha = PatternTable(
            cast("dict[str, float]", config.get("alpha_pattern") or {}), cast("float", config.get("lora_alpha", 8))
        )
        self._targets = _chooser(config.get("target_modules"), otherwise=True)
        self._excluded = _chooser(config.get("exclude_modules") or (), otherwise=False)
        self._in_layers = _layer_chooser(config)
        self.named = self._rank.named and self._alpha.named
        """Whether all patterns of ranks and alphas are plain names."""

    def rank(self, site: str) -> int | None:
        """Return a site's rank by the config; None if only the tensors can tell."""
        try:
            return self._rank.of(site)
        except UnsupportedPattern:
            self.named = False
            return None

    def alpha(self, site: str) -> float:
        """Return a site's alpha. Raises `UnsupportedAdapter` if its patterns cannot be matched."""
        try:
            return float(self._alpha.of(site))
        except UnsupportedPattern as error:
            raise UnsupportedAdapter(f"{ADAPTER_CONFIG}: alpha_pattern: {error}", field="alpha_pattern") from error

    def targeted(self, site: str) -> bool:
        """Whether PEFT would adapt the site; True if only the tensors can tell."""
        return self._targets(site) and self._in_layers(site) and not self._excluded(site)


class Known:
    """The results that `Matching` found when the adapter was registered. No pattern is matched again."""

    def __init__(self, config: Mapping[str, object], sites: Iterable[str], alphas: Sequence[float]) -> None:
        """`alphas`: as `AdapterDigests.alphas`. Raises `CorruptAdapter` if they are not those of these sites."""
        names = sorted(sites)
        if alphas and len(alphas) != len(names):
            raise CorruptAdapter(f"expected {len(alphas)} adapted modules, as when it was registered, got {len(names)}")
        default = float(cast("float", config.get("lora_alpha", 8)))
        self._alphas = dict(zip(names, alphas, strict=True)) if alphas else dict.fromkeys(names, default)
        tables = (cast("dict[str, object]", config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
        self.named = all(is_name(pattern) for table in tables for pattern in table)

    def rank(self, site: str) -> int | None:
        """Return None: ranks are read from the tensors."""
        return None

    def alpha(self, site: str) -> float:
        return self._alphas[site]

    def targeted(self, site: str) -> bool:
        """Return True: sites that are not targeted were not registered."""
        return True


def matching_targets(pattern: str, base: BaseSpec, *, field: str) -> tuple[str, ...]:
    """Return targets that mean the sites whose whole names a regular expression matches, as PEFT reads a text in
    `target_modules`. Raises `InvalidRequest`."""
    known, expression = {**base.sites, **base.ends}, whole(pattern, Steps())
    try:
        sites = [site for site in known if expression.match(site)]
    except UnsupportedPattern as error:
        raise InvalidRequest(str(error), field=field) from None
    if not sites:
        got = f"{pattern[:80]!r}; the ends of names are given as a list"
        raise InvalidRequest(
            f"expected a regular expression of whole names like {next(iter(known))}, got {got}", field=field
        )
    return shortest_targets(None, known, sites)


def _chooser(modules: object, *, otherwise: bool) -> Callable[[str], bool]:
    """Return a function that tells whether a site is named by names or a regular expression.

    `otherwise`: its result if the expression cannot be matched.
    """
    if modules is None or (isinstance(modules, str) and modules.lower() == ALL_LINEAR and otherwise):
        return lambda site: True
    if not isinstance(modules, str):
        names = frozenset(cast("list[str]", modules))
        return lambda site: targets_match(names, site)
    pattern = whole(modules, Steps())

    def matches(site: str) -> bool:
        try:
            return pattern.match(site) is not None
        except UnsupportedPattern:
            return otherwise

    return matches


def _layer_chooser(config: Mapping[str, object]) -> Callable[[str], bool]:
    """Return a function that tells whether a site lies in `layers_to_transform`. Sites targeted by their whole name
    always do."""
    layers, targets = config.get("layers_to_transform"), config.get("target_modules")
    chosen = frozenset([layers] if isinstance(layers, int) else cast("list[int]", layers or []))
    if not chosen or not isinstance(targets, list):
        return lambda site: True
    whole_names = frozenset(cast("list[str]", targets))
    lists = config.get("layers_pattern") or []
    names = [lists] if isinstance(lists, str) else cast("list[str]", lists)
    steps = Steps()
    patterns = [Pattern(name, steps, form=r"(?:^|.*?\.){}\.(?P<idx>\d+)\.") for name in names]

    def inside(site: str) -> bool:
        if site in whole_names:
            return True
        try:
            found = _first_match(patterns, site) if patterns else _LAYER.match(site)
        except UnsupportedPattern:
            return True
        layer = None if found is None else found.group("idx")
        return layer is not None and int(layer) in chosen

    return inside


def _first_match(patterns: list[Pattern], site: str) -> re.Match[str] | None:
    return next((found for pattern in patterns if (found := pattern.match(site))), None)
