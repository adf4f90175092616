"""Reads a PEFT adapter folder and checks it against the base, tensor by tensor. No torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from coserve.core.errors import BaseMismatch, CorruptAdapter, ShapeMismatch, UnsupportedAdapter
from coserve.core.limits import MAX_IMPORTED_RANK
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WHOLE_COPY, end_of
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.bdlora import CONV1D_FAMILIES, blocks_at, packed_shapes, peft_blocks, undivided
from coserve.lora.files.cartridge import EMBEDDINGS, cartridge_config, read_alone, read_cartridge
from coserve.lora.files.ends import ends_config, take_rows, trained_tokens
from coserve.lora.files.experts import ExpertTensors, expert_tensors, take_experts
from coserve.lora.files.finite import refuse_non_finite
from coserve.lora.files.gate import BOTH, read_configs
from coserve.lora.files.linear_tensors import MAGNITUDE, LinearTensors, sort_tensors
from coserve.lora.files.matching import Known, Matching
from coserve.lora.files.targets import alpha_of, exact, linear_targets, shortest_targets
from coserve.lora.files.tensorfile import MAX_CONFIG, TensorEntry, TensorFile
from coserve.lora.files.wrapped import text_targets

log = logging.getLogger(__name__)

FINGERPRINT = "coserve.base_fingerprint"
"""Key of the safetensors metadata that names the base of an adapter trained here."""
QUANTIZATION = "coserve.base_quantization"
"""Key that says how that base was quantised, if it was."""


@dataclass(frozen=True)
class SiteShape:
    """Shape of an adapter's pair at one site. `a_blocks`, `b_blocks`: diagonal blocks of A and B (BD-LoRA); 1:
    dense."""

    rank: int
    scaling: float
    a_blocks: int = 1
    b_blocks: int = 1
    experts: int = 1
    """Experts of a parameter, each with such a pair."""


@dataclass(frozen=True)
class AdapterInfo:
    """Facts about an adapter's files, checked against the base."""

    settings: LoraSettings
    rank: int
    """Largest rank of any site."""
    alpha: float
    alphas: tuple[float, ...]
    """Alpha of each site, as `AdapterDigests.alphas`."""
    targets: tuple[str, ...]
    sites: dict[str, SiteShape]
    bytes: int
    sha256: str
    """SHA-256 of the weights' file, hex."""


@dataclass(frozen=True)
class AdapterTensors:
    """Names of the tensors that hold each site's matrices, for a loader."""

    settings: LoraSettings
    sites: dict[str, SiteShape]
    alphas: dict[str, float]
    a: dict[str, TensorEntry]
    b: dict[str, TensorEntry]
    magnitudes: dict[str, TensorEntry]
    """Magnitudes by site, for a DoRA adapter; else empty."""
    experts: dict[str, ExpertTensors]
    """Tensors of experts' parameters, which are not in `a` and `b`."""
    rows: dict[str, TensorEntry]
    """Replaced rows, by the name of the embedding or head followed by `TOKEN_ROWS` or `WHOLE_COPY`."""


def inspect_adapter(folder: Path, base: BaseSpec, progress: Callable[[], None] = lambda: None) -> AdapterInfo:
    """Check an adapter folder against a base without loading its weights. `progress` is called every few MiB read.

    Raises:
        UnsafeAdapter: files that could run code, links or devices; none of them is opened.
        UnsupportedAdapter: settings or tensors that coserve does not implement, by name.
        CorruptAdapter: files that are damaged or contradict each other, or weights that are not finite in the base's
            dtype.
        BaseMismatch, ShapeMismatch: an adapter of another base.
    """
    configs = read_configs(folder)
    with TensorFile(folder, ADAPTER_WEIGHTS) as file:
        if configs.lora is None:
            return _inspect_cartridge(configs.cartridge or {}, file, base, progress)
        layout = read_layout(configs.lora, file, base, cartridge=configs.cartridge)
        trained_on = file.metadata.get(QUANTIZATION, "none")
        if FINGERPRINT in file.metadata and trained_on != base.quantization:
            own = base.quantization
            log.info("an adapter trained on the base quantised as %s is to be served on it as %s", trained_on, own)
        refuse_non_finite(file, file.entries, base.dtype, progress)
        return AdapterInfo(
            settings=layout.settings,
            rank=max(site.rank for site in layout.sites.values()),
            alpha=alpha_of(layout.settings),
            alphas=_alphas_in_order(layout),
            targets=(*linear_targets(layout.settings, base), *(layout.settings.target_parameters or ())),
            sites=layout.sites,
            bytes=file.bytes,
            sha256=file.sha256(progress),
        )


def _inspect_cartridge(
    config: dict[str, object], file: TensorFile, base: BaseSpec, progress: Callable[[], None]
) -> AdapterInfo:
    check_base(file, base)
    settings, entry = read_alone(config, file, base)
    refuse_non_finite(file, {EMBEDDINGS: entry}, base.dtype, progress)
    sites = {name: SiteShape(settings.r, 1.0) for name in base.prefixes}
    sha256 = file.sha256(progress)
    return AdapterInfo(settings, settings.r, alpha_of(settings), (), (), sites, file.bytes, sha256)


def _alphas_in_order(layout: AdapterTensors) -> tuple[float, ...]:
    """Return the sites' alphas in order of the sites' names; empty if all equal the config's `lora_alpha`."""
    default = alpha_of(layout.settings)
    if all(alpha == default for alpha in layout.alphas.values()):
        return ()
    return tuple(layout.alphas[site] for site in sorted(layout.alphas))


def read_layout(
    config: dict[str, object],
    file: TensorFile,
    base: BaseSpec,
    alphas: tuple[float, ...] | None = None,
    cartridge: dict[str, object] | None = None,
) -> AdapterTensors:
    """Read the settings and sites of an open weights' file. Every tensor must be one of a site's two matrices, or its
    DoRA magnitude, of the right shape. A multimodal base takes files of its language model, and the other way round
    (`wrapped`).

    `alphas`: those found when these files were registered (`AdapterDigests.alphas`). The config's patterns are matched
    only if they are None. `cartridge`: config of the cartridge beside LoRA, whose tensor is not in the result.
    """
    trained_on = check_base(file, base)
    settings = _settings(config)
    if settings.bd_blocks > 1 and base.family in CONV1D_FAMILIES:
        raise UnsupportedAdapter(
            f"BD-LoRA is not implemented for the Conv1D modules of {base.family}", field="use_bdlora"
        )
    entries, prefix = dict(file.entries), 0
    if cartridge is not None:
        prefix, _ = read_cartridge(cartridge, file, base)
        del entries[EMBEDDINGS]
        _check_plain(settings, "expected plain LoRA beside a cartridge", field="peft_type")
    experts = expert_tensors(take_experts(entries, base), base, config, ours=trained_on is not None)
    rows = take_rows(entries, base, config)
    if experts:
        _check_plain(settings, "DoRA and block-diagonal matrices are not implemented for experts")
    linear = sort_tensors(entries, base)
    if not linear.a and not experts:
        raise CorruptAdapter("the weights' file holds no tensors of LoRA")
    if end := next((site for site in linear.a if site in base.ends), None):
        _check_plain(settings, f"{end}: expected plain LoRA of embedding and head")
    _check_magnitudes(linear, settings, base)
    _check_blocks(config, sorted(linear.names.values()))
    matching = Matching(config) if alphas is None else Known(config, [*linear.a, *experts], alphas)
    names = linear.names if alphas is None else {}  # `Known` has the base's names
    sites, own_alphas = _linear_sites(linear, names, matching, settings, config, base)
    for site, own in experts.items():
        own_alphas[site] = matching.alpha(site) if alphas is not None else _expert_alpha(own, matching, settings)
        scaling = own_alphas[site] / (math.sqrt(own.rank) if settings.rslora else own.rank)
        sites[site] = SiteShape(own.rank, scaling, experts=base.experts[site].experts)
    same = all(site == name for site, name in linear.names.items())
    same = same and all(own.fused and own.parts[0].named == site for site, own in experts.items())
    settings = _resolved(settings, config, base, sites, own_alphas, named=matching.named and same)
    saved = tuple(end_of(name) for name in rows if name.endswith(WHOLE_COPY) and end_of(name) not in linear.a)
    tokens = trained_tokens(config, rows, base)
    settings = msgspec.structs.replace(
        settings, trainable_token_indices=tokens, modules_to_save=saved or None, prefix_tokens=prefix
    )
    return AdapterTensors(settings, sites, own_alphas, linear.a, linear.b, linear.magnitudes, experts, rows)


def _check_plain(settings: LoraSettings, message: str, *, field: str = "use_dora") -> None:
    """Raise `UnsupportedAdapter` for DoRA and for block-diagonal matrices."""
    if settings.use_dora or settings.bd_blocks > 1:
        raise UnsupportedAdapter(message, field=field)


def _linear_sites(
    linear: LinearTensors,
    names: Mapping[str, str],
    matching: Matching | Known,
    settings: LoraSettings,
    config: dict[str, object],
    base: BaseSpec,
) -> tuple[dict[str, SiteShape], dict[str, float]]:
    """Return the shapes and the alphas of linear sites, in the base's order. `names`: those by which `matching` knows
    them, if they are other ones."""
    sites, alphas = dict[str, SiteShape](), dict[str, float]()
    tied = base.tied and config.get("ensure_weight_tying") is True
    for site in [*base.sites, *base.ends]:
        if site not in linear.a:
            continue
        name = names.get(site, site)
        if not matching.targeted(name) and not (tied and site in base.ends):  # PEFT would drop its tensors
            raise CorruptAdapter(f"{site}: the file has tensors for it, but {ADAPTER_CONFIG} does not target it")
        shape = linear.a[site].shape
        rank = matching.rank(name) or (shape[0] if len(shape) == 2 and shape[0] else settings.r)
        alphas[site] = matching.alpha(name)
        sites[site] = _shape(site, rank, alphas[site], settings, base, shape, linear.b[site].shape)
    return sites, alphas


def check_base(file: TensorFile, base: BaseSpec) -> str | None:
    """Return the fingerprint of the base that the adapter was trained on here; None: it was trained elsewhere. Raises
    `BaseMismatch`."""
    trained_on = file.metadata.get(FINGERPRINT)
    if trained_on is not None and trained_on != base.fingerprint:
        raise BaseMismatch(f"the adapter was trained on another base than {base.name}")
    return trained_on


def _expert_alpha(own: ExpertTensors, matching: Matching | Known, settings: LoraSettings) -> float:
    """Return the alpha of a parameter's pairs, by the config's rule for each part."""
    scalings = set()
    for part in own.parts:
        if not own.fused and not matching.targeted(part.named):
            raise CorruptAdapter(f"{part.named}: the file has tensors for it, but {ADAPTER_CONFIG} does not target it")
        if (rank := matching.rank(part.named)) not in (None, part.rank):
            raise ShapeMismatch(f"{part.named}: expected rank {rank}, got {part.rank}")
        scalings.add(matching.alpha(part.named) / (math.sqrt(part.rank) if settings.rslora else part.rank))
    if len(scalings) > 1:
        raise UnsupportedAdapter(f"{own.parts[0].named}: expected one scaling for gate and up", field="alpha_pattern")
    return scalings.pop() * (math.sqrt(own.rank) if settings.rslora else own.rank)


def _check_magnitudes(linear: LinearTensors, settings: LoraSettings, base: BaseSpec) -> None:
    """Raise an `AdapterError` unless a DoRA adapter has a magnitude at each site, and another one none."""
    if settings.use_dora and settings.bd_blocks > 1:
        raise UnsupportedAdapter("DoRA with block-diagonal matrices is not implemented", field="use_dora")
    for site in sorted(linear.magnitudes.keys() ^ (set(linear.a) if settings.use_dora else set())):
        raise CorruptAdapter(
            f"{site}: expected {'a' if settings.use_dora else 'no'} {MAGNITUDE} with use_dora = "
            f"{str(settings.use_dora).lower()}",
            field="use_dora",
        )
    for site, entry in linear.magnitudes.items():
        if entry.shape != (want := (base.sites[site].out_features,)):
            raise ShapeMismatch(f"{site}.{MAGNITUDE}: expected shape {list(want)}, got {list(entry.shape)[:8]}")


def config_file(settings: LoraSettings, base: BaseSpec, sites: Collection[str], *, field: str | None = None) -> str:
    """Return the text of `adapter_config.json` for an adapter with these sites.

    Raises `UnsupportedAdapter` if the text is too large to be read again.
    """
    text = json.dumps(adapter_config(settings, base, sites), indent=2) + "\n"
    if len(text) > MAX_CONFIG:
        raise UnsupportedAdapter(
            f"its {ADAPTER_CONFIG} would take {len(text)} bytes: expected at most {MAX_CONFIG}, so fewer or shorter "
            "targets and patterns",
            field=field,
        )
    return text


def adapter_config(settings: LoraSettings, base: BaseSpec, sites: Collection[str]) -> dict[str, object]:
    """Return the content of `adapter_config.json` for an adapter with these sites."""
    if settings.cartridge:
        return cartridge_config(settings.r, base)
    adaptable = {**base.sites, **base.ends}
    linear, experts = ([site for site in sites if site in known] for known in (adaptable, base.experts))
    targets = shortest_targets(linear_targets(settings, base), adaptable, linear)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.hub_name,  # PEFT and transformers look up any other name on the hub
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": _plain(alpha_of(settings)),
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": text_targets(targets, adaptable.keys()),
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": {key: _plain(alpha) for key, alpha in settings.alpha_pattern.items()},
        "fan_in_fan_out": base.family in CONV1D_FAMILIES,
        "bias": "none",
        "init_lora_weights": True,
    }
    blocks = peft_blocks(settings, [site for site in base.sites if site in sites])
    parameters = list(shortest_targets(settings.target_parameters, base.experts, experts)) or None
    variants: dict[str, object] = {"use_bdlora": blocks, "use_dora": settings.use_dora or None}
    variants |= {"target_parameters": parameters, **ends_config(settings)}
    config |= {key: value for key, value in variants.items() if value is not None}
    if not settings.prefix:
        return config
    return {"peft_type": BOTH, "lora": config, "cartridge": cartridge_config(settings.prefix, base)}


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _settings(config: dict[str, object]) -> LoraSettings:
    """Convert the config to settings; missing keys get PEFT's defaults. `gate` has checked the types.

    Targets are taken only from a list of names, and patterns are left out: `_resolved` expresses both by sites.
    """
    targets = config.get("target_modules")
    blocks = cast("dict[str, object]", config.get("use_bdlora") or {})
    count = cast("int", blocks.get("nblocks", 1))
    in_a, in_b = (
        _bd_targets(blocks, key) if count > 1 else None for key in ("target_modules_bd_a", "target_modules_bd_b")
    )
    return LoraSettings(
        r=config.get("r", 8),  # type: ignore[arg-type]
        alpha=float(config.get("lora_alpha", 8)),  # type: ignore[arg-type]
        rslora=config.get("use_rslora", False) is True,
        use_dora=config.get("use_dora", False) is True,
        dropout=float(config.get("lora_dropout", 0.0)),  # type: ignore[arg-type]
        targets=tuple(targets) if isinstance(targets, list) else None,
        bd_blocks=count,
        targets_bd_a=in_a,
        targets_bd_b=in_b,
    )


def _bd_targets(blocks: dict[str, object], key: str) -> tuple[str, ...]:
    return tuple(cast("list[str]", blocks.get(key) or []))


def _resolved(
    settings: LoraSettings,
    config: dict[str, object],
    base: BaseSpec,
    sites: dict[str, SiteShape],
    alphas: dict[str, float],
    *,
    named: bool,
) -> LoraSettings:
    """Return settings whose names and patterns mean exactly these sites, ranks and alphas.

    `named`: the config's patterns are plain names, and stay. Otherwise each site that differs gets a pattern of its
    own.
    """
    if named:
        ranks: dict[str, int] = config.get("rank_pattern") or {}  # type: ignore[assignment]
        alpha_names: dict[str, float] = config.get("alpha_pattern") or {}  # type: ignore[assignment]
        alpha_names = {name: float(alpha) for name, alpha in alpha_names.items()}
    else:
        ranks = {exact(site): shape.rank for site, shape in sites.items() if shape.rank != settings.r}
        alpha_names = {exact(site): alpha for site, alpha in alphas.items() if alpha != settings.alpha}
    adaptable = {**base.sites, **base.ends}
    linear, experts = ([site for site in sites if site in known] for known in (adaptable, base.experts))
    parameters = cast("list[str] | None", config.get("target_parameters")) or ()
    return msgspec.structs.replace(
        settings,
        targets=shortest_targets(settings.targets, adaptable, linear) if linear or not experts else None,
        target_parameters=shortest_targets(tuple(parameters), base.experts, experts) if experts else None,
        rank_pattern=ranks,
        alpha_pattern=alpha_names,
    )


def _shape(
    site: str,
    rank: int,
    alpha: float,
    settings: LoraSettings,
    base: BaseSpec,
    a: tuple[int, ...],
    b: tuple[int, ...],
) -> SiteShape:
    """Return a site's rank, scaling and blocks. Raises `UnsupportedAdapter` for a rank that is too large, and
    `ShapeMismatch` unless both matrices have the implied shapes."""
    if rank > MAX_IMPORTED_RANK:
        raise UnsupportedAdapter(f"{site}: expected a rank of at most {MAX_IMPORTED_RANK}, got {rank}", field="r")
    scaling = alpha / (math.sqrt(rank) if settings.rslora else rank)
    spec, blocks = base.site(site), blocks_at(settings, site)
    wrong = undivided(spec, rank, blocks)
    if wrong is not None:
        raise ShapeMismatch(f"{site}: {wrong} does not divide into {max(blocks)} blocks")
    for kind, got, want in zip(("lora_A", "lora_B"), (a, b), packed_shapes(spec, rank, blocks), strict=True):
        if got != want:
            raise ShapeMismatch(f"{site}.{kind}: expected shape {list(want)}, got {list(got)[:8]}")
    return SiteShape(rank, scaling, *blocks)


def _check_blocks(config: dict[str, object], sites: Collection[str]) -> None:
    """Raise `CorruptAdapter` for lists in `use_bdlora` that PEFT would refuse."""
    blocks = config.get("use_bdlora")
    if not isinstance(blocks, dict):
        return
    in_a, in_b = (_bd_targets(blocks, key) for key in ("target_modules_bd_a", "target_modules_bd_b"))
    if set(in_a) & set(in_b):
        raise CorruptAdapter("use_bdlora: target_modules_bd_a and target_modules_bd_b overlap", field="use_bdlora")
    for site in sites:
        both = [any(part in site for part in parts) for parts in (in_a, in_b)]
        if all(both):
            raise CorruptAdapter(f"{site}: use_bdlora names it for both A and B", field="use_bdlora")
        if not any(both) and blocks.get("match_strict", True):
            raise CorruptAdapter(f"{site}: use_bdlora names it for neither A nor B", field="use_bdlora")
