"""The sites of an adapter, their ranks and scalings: PEFT's matching rules for names, without regular expressions.

No torch, no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec

from coserve.core.errors import CorruptAdapter, InvalidRequest
from coserve.core.limits import MAX_NAMES, MAX_RANK, below_one
from coserve.core.names import DECODER, is_prefix
from coserve.core.types import BaseSpec, LoraSettings
from coserve.core.validation import check_normal
from coserve.lora.files.bdlora import check_blocks
from coserve.lora.files.ends import check_tokens

MAX_ALPHA = 1e9
"""Largest alpha of any adapter, new or imported, so that what is trained can be published and imported again."""
NO_CARTRIDGES = (
    "expected layers with keys and values of one size, no recurrent states, and one GPU; of multi-head latent "
    "attention its heads count, and only with --mla-cache heads"
)
INITS = ("default", "gaussian", "orthogonal")

Value = TypeVar("Value")

MAX_TRIES = 1 << 20
"""Most pairs of pattern and site for a new adapter: matching all takes about half a second."""
_SAFE = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\\.)+\$?")
_MAX_PATTERN = 512


class UnsafePattern(ValueError):
    """A pattern that is more than a module's name: a regular expression from an untrusted file is never run."""


def pattern_matches(pattern: str, site: str) -> bool:
    r"""PEFT's `re.match(rf"(.*\.)?({pattern})$", site)` for patterns that are names, in linear time.

    A name may hold letters, digits, `_`, `-`, `.` (any character, as in a regular expression) and `\.` (a dot), and be
    anchored by `^` and `$`. Raises `UnsafePattern` for any other pattern.
    """
    anchored, name = _parsed(pattern)
    start = len(site) - len(name)
    if start < 0 or (start > 0 and (anchored or site[start - 1] != ".")):
        return False
    return all(want in ("\1", got) for want, got in zip(name, site[start:], strict=True))


@lru_cache(4 * MAX_NAMES)
def _parsed(pattern: str) -> tuple[bool, str]:
    """Return whether a pattern is anchored at the site's first character, and its characters (`\\1` stands for any).

    Raises `UnsafePattern`.
    """
    if not is_name(pattern):
        raise UnsafePattern(f"expected a module's name, got the pattern {pattern[:80]!r}")
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", "\0").replace(".", "\1").replace("\0", ".")
    return pattern.startswith("^"), name


def is_name(pattern: str) -> bool:
    """Whether `pattern_matches` can match it."""
    return len(pattern) <= _MAX_PATTERN and _SAFE.fullmatch(pattern) is not None


def exact(site: str) -> str:
    """Return the pattern that matches only this site."""
    return "^" + site.replace(".", "\\.") + "$"


def lookup(patterns: Mapping[str, Value], site: str, default: Value) -> Value:
    """The value of the first pattern that matches, as PEFT reads `rank_pattern` and `alpha_pattern`."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, site)), default)


def targets_match(targets: frozenset[str], site: str) -> bool:
    """Whether one of `targets` is the site's whole name or a suffix of it after a dot. The time does not depend on
    their number."""
    return any(end in targets for end in _ends(site))


def targeted_sites(targets: Iterable[str], sites: Iterable[str]) -> list[str]:
    """The sites that `targets` match, in order."""
    names = frozenset(targets)
    return [site for site in sites if targets_match(names, site)]


def shortest_targets(names: tuple[str, ...] | None, known: Collection[str], sites: Collection[str]) -> tuple[str, ...]:
    """Return the shortest targets that mean exactly these of the `known` sites: `names`, the last components of sites'
    names, or the sites."""
    last = tuple(dict.fromkeys(site.rsplit(".", 1)[-1] for site in sites))
    for some in (names, last):
        if some is not None and set(targeted_sites(some, known)) == set(sites):
            return some
    return tuple(sites)


def _ends(site: str) -> Iterator[str]:
    """Yield the site's name, and each suffix of it after a dot."""
    while site:
        yield site
        site = site.partition(".")[2]


def alpha_of(settings: LoraSettings) -> float:
    """The adapter's alpha at sites that no pattern matches."""
    return 2.0 * settings.r if settings.alpha is None else settings.alpha


def with_alpha(settings: LoraSettings) -> LoraSettings:
    """Return the settings with the default alpha filled in."""
    return msgspec.structs.replace(settings, alpha=alpha_of(settings))


def rank_and_scaling(settings: LoraSettings, site: str) -> tuple[int, float]:
    """Return the rank of a site's pair and its scaling: `alpha / r`, or `alpha / sqrt(r)` with rsLoRA. The rank of a
    KV prefix is its tokens."""
    if is_prefix(site):
        return settings.prefix, 1.0
    site = site.removesuffix(DECODER)
    rank = lookup(settings.rank_pattern, site, settings.r)
    alpha = lookup(settings.alpha_pattern, site, alpha_of(settings))
    return rank, alpha / (math.sqrt(rank) if settings.rslora else rank)


def linear_targets(settings: LoraSettings, base: BaseSpec) -> tuple[str, ...]:
    """Return the targets among linear modules. As in PEFT, `target_parameters` without `targets` means experts
    alone."""
    if settings.targets is not None:
        return settings.targets
    return base.default_targets if settings.target_parameters is None else ()


def target_sites(settings: LoraSettings, base: BaseSpec) -> list[str]:
    """Return the sites of an adapter in the base's order: first those of the layers, then embedding and head, then
    those of a decoder and of a KV prefix. Replaced rows are left out, and nothing is checked."""
    return _with_others([] if settings.cartridge else _lora_sites(settings, base), settings, base)


def _lora_sites(settings: LoraSettings, base: BaseSpec) -> list[str]:
    experts = targeted_sites(settings.target_parameters or (), base.experts)
    return targeted_sites(linear_targets(settings, base), {**base.sites, **base.ends}) + experts


def _with_others(sites: Sequence[str], settings: LoraSettings, base: BaseSpec) -> list[str]:
    decoder = [site + DECODER for site in sites] if settings.decoder else []
    return [*sites, *decoder, *(base.prefixes if settings.prefix else ())]


def resolve_targets(settings: LoraSettings, base: BaseSpec) -> list[str]:
    """Return the sites of a new adapter in the base's order, after checking its settings.

    Takes up to a second for thousands of names, so do not call it on an event loop.

    Raises:
        InvalidRequest: a target or pattern that names no site of this base, or a setting out of its range, or a
            cartridge for a base that takes none.
    """
    if settings.cartridge:
        if not base.prefixes:
            raise InvalidRequest(f"{base.name} takes no cartridges: {NO_CARTRIDGES}", field="document.recipe")
        return list(base.prefixes)
    _check_ranges(settings)
    targets = linear_targets(settings, base)
    if not targets and not settings.target_parameters:
        raise InvalidRequest("expected at least one target, got none", field="targets")
    _check_experts(settings, base)
    _check_ends(settings, base)
    ends = {end for site in (*base.sites, *base.ends) for end in _ends(site)}
    for target in targets:
        if target not in ends:
            available = ", ".join(base.default_targets)
            raise InvalidRequest(
                f"expected targets among {available} (or whole site names), got {target[:80]!r}", field="targets"
            )
    sites = _lora_sites(settings, base)
    for field, patterns in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        if len(patterns) * len(sites) > MAX_TRIES:
            most = MAX_TRIES // len(sites)
            raise InvalidRequest(
                f"expected at most {most} patterns for {len(sites)} sites, got {len(patterns)}", field=field
            )
        for pattern in patterns:
            try:
                used = any(pattern_matches(pattern, site) for site in sites)
            except UnsafePattern as error:
                raise InvalidRequest(str(error), field=field) from error
            if not used:
                raise InvalidRequest(f"{pattern[:80]!r} names none of the targeted sites", field=field)
    ranks = {site: rank_and_scaling(settings, site)[0] for site in sites}
    if settings.init == "orthogonal" and any(rank % 2 for rank in ranks.values()):
        raise InvalidRequest("orthogonal initialisation needs even ranks", field="init")
    check_blocks(settings, base, ranks)
    return _with_others(sites, settings, base)


def _check_ends(settings: LoraSettings, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for changes of the embedding and the head that cannot be trained."""
    if settings.modules_to_save:
        raise InvalidRequest(
            f"an adapter that replaces all of {' and '.join(settings.modules_to_save)} can be served, not trained",
            field="modules_to_save",
        )
    tokens, pairs = settings.trainable_token_indices or {}, targeted_sites(settings.targets or (), base.ends)
    for name, own in tokens.items():
        field = "trainable_token_indices"
        if name not in base.ends:
            names = ", ".join(base.ends) or "none, as on several GPUs"
            raise InvalidRequest(f"expected modules among {names}, got {name[:80]!r}", field=field)
        try:
            check_tokens(name, own, base)
        except CorruptAdapter as error:
            raise InvalidRequest(error.message, field=field) from None
        if name in pairs and base.ends[name].layer < 0:
            raise InvalidRequest(f"expected {name} among targets or trained tokens, as in PEFT, got both", field=field)
    if (tokens or pairs) and not targeted_sites(linear_targets(settings, base), base.sites):
        raise InvalidRequest("expected targets in the layers beside the embedding and the head", field="targets")
    for field, off in (("use_dora", False), ("bd_blocks", 1)):
        if (tokens or pairs) and getattr(settings, field) != off:
            raise InvalidRequest(f"expected {field} of {off} with embedding or head", field=field)


def _check_experts(settings: LoraSettings, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for `target_parameters` that name none of the base's, or cannot be combined."""
    if not settings.target_parameters:
        return
    if not base.experts:
        raise InvalidRequest(
            f"{base.name} has no experts' parameters that adapters can change here: expected a mixture of experts",
            field="target_parameters",
        )
    ends = {end for site in base.experts for end in _ends(site)}
    for target in settings.target_parameters:
        if target not in ends:
            available = ", ".join(dict.fromkeys(site.split(".", 3)[-1] for site in base.experts))
            raise InvalidRequest(
                f"expected parameters among {available} (or whole names), got {target[:80]!r}",
                field="target_parameters",
            )
    for field, off in (("dropout", 0.0), ("use_dora", False), ("bd_blocks", 1)):
        if getattr(settings, field) != off:
            raise InvalidRequest(f"expected {field} of {off} with target_parameters, as in PEFT", field=field)


def _check_ranges(settings: LoraSettings) -> None:
    ranks = {"r": settings.r} | {f"rank_pattern[{key[:80]!r}]": rank for key, rank in settings.rank_pattern.items()}
    for name, rank in ranks.items():
        if not 1 <= rank <= MAX_RANK:
            raise InvalidRequest(f"{name}: expected a rank from 1 to {MAX_RANK}, got {rank}", field=name.split("[")[0])
    alphas = {"alpha": alpha_of(settings)} | {
        f"alpha_pattern[{k[:80]!r}]": a for k, a in settings.alpha_pattern.items()
    }
    for name, alpha in alphas.items():
        if not 0 < alpha <= MAX_ALPHA:
            raise InvalidRequest(
                f"{name}: expected a number above 0 and at most {MAX_ALPHA:.0e}, got {alpha}", field=name.split("[")[0]
            )
        check_normal(alpha, field=name.split("[")[0])
    check_normal(settings.dropout, field="dropout")
    if not below_one(settings.dropout):
        raise InvalidRequest(f"expected a dropout from 0 to below 1 (in fp32), got {settings.dropout}", field="dropout")
    if settings.init not in INITS:
        raise InvalidRequest(f"expected one of {', '.join(INITS)}, got {settings.init[:80]!r}", field="init")
