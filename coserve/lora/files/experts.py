"""The pairs of experts' fused parameters in an adapter's file, in each of the forms that are in use. No torch.

E experts, R ranks of each, D inputs, O outputs of a parameter.

- PEFT's `target_parameters`: one pair a parameter. A (E R, D) is expert-major, B (O, R E) expert-minor. Before PEFT
  0.19 the two sides of a parameter (E, O, D) were taken for each other, so A is (E R, O) and B (D, R E). Two parameters
  of one module are nested: the one declared first is under `base_layer`.
- One pair an expert: `experts.3.gate_proj.lora_A.weight` (R, D), as vLLM reads it; older versions of transformers had
  such modules. Gate and up, which are one parameter here, become one pair of the sum of their ranks.
- One tensor for all experts: `experts.w1.lora_A.weight` (E or 1, R, D), where 1 is shared by all experts (SGLang's and
  Megatron's shared outer matrices).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from coserve.core.errors import BaseMismatch, CorruptAdapter, ShapeMismatch, UnsupportedAdapter
from coserve.core.names import PEFT_PREFIX
from coserve.core.types import BaseSpec, SiteSpec
from coserve.lora.files.targets import targets_match
from coserve.lora.files.tensorfile import TensorEntry
from coserve.lora.files.wrapped import site_of

ALL = -1
"""Key of a tensor that holds the matrices of all experts."""
_NAME = re.compile(
    r"(?P<module>.+\.experts)(?P<nested>(?:\.base_layer)*)(?:\.(?P<expert>\d{1,5}))?"
    r"(?:\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3))?\.lora_(?P<kind>[AB])\.weight"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_HALVES = {"gate_proj": 0, "up_proj": 1}
_NEW = (0, 19)
"""First version of PEFT that does not swap the two sides of a parameter."""

Matrices = dict[int, TensorEntry]
"""Entries by expert, or one under `ALL`."""


@dataclass(frozen=True)
class ExpertPart:
    """One LoRA pair for each expert, covering all outputs of a fused parameter or one half of them (gate or up)."""

    named: str
    """The name that patterns of a config are matched with."""
    rank: int
    a: Matrices
    b: Matrices
    half: int | None = None
    """0: gate, 1: up; None: all outputs."""


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of a file for one parameter of experts."""

    parts: tuple[ExpertPart, ...]
    fused: bool
    """Whether it has the form of PEFT's `target_parameters`."""
    swapped: bool = False
    """Whether it was written by a PEFT before 0.19."""

    @property
    def rank(self) -> int:
        """LoRA rank of each expert's pair."""
        return sum(part.rank for part in self.parts)


def peft_module(site: str, sites: Collection[str], base: BaseSpec) -> str:
    """Return the name of the PEFT module that holds a parameter's pair: those declared before others are nested."""
    module = site.rpartition(".")[0]
    own = [other for other in base.experts if other in sites and other.rpartition(".")[0] == module]
    return module + ".base_layer" * (len(own) - 1 - own.index(site))


_Found = dict[tuple[str, str, int, int], dict[str, TensorEntry]]
"""Entries of A and B by module, part, depth of nesting, and expert."""


def take_experts(entries: dict[str, TensorEntry], base: BaseSpec) -> dict[str, _Found]:
    """Remove the tensors of experts' parameters from `entries`; return them by the base's module. Names of the base's
    own linear modules stay."""
    modules = {site.rpartition(".")[0] for site in base.experts}
    found: dict[str, _Found] = {}
    for name in [*entries]:
        match = _NAME.fullmatch(name.removeprefix(PEFT_PREFIX)) if name.startswith(PEFT_PREFIX) else None
        if match is None or site_of(name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0], base.sites) is not None:
            continue
        named = match["module"]
        module = site_of(named, modules) or site_of(named.replace(".block_sparse_moe.", ".mlp."), modules)
        if module is None:
            if not base.experts:
                raise UnsupportedAdapter(
                    f"tensor {name[:120]!r}: adapters of experts need a base with fused experts' parameters, "
                    f"{base.name} has none"
                )
            raise BaseMismatch(f"tensor {name[:120]!r}: {base.name} has no such experts")
        part = match["part"] or ""
        expert = ALL if match["expert"] is None else int(match["expert"])
        key = (named, part, match["nested"].count("base_layer"), expert)
        if found.setdefault(module, {}).setdefault(key, {}).setdefault(match["kind"], entries[name]) != entries[name]:
            raise CorruptAdapter(f"the file has two matrices lora_{match['kind']} of {module}.{part}")
        del entries[name]
    for module, own in found.items():
        for (_, part, _, _), pair in own.items():
            if len(pair) != 2:
                raise CorruptAdapter(f"{module}.{part}: expected both lora_A and lora_B, got only one of them")
    return found


def expert_tensors(
    found: Mapping[str, _Found], base: BaseSpec, config: Mapping[str, object], *, ours: bool
) -> dict[str, ExpertTensors]:
    """Sort the tensors of `take_experts` by the base's parameters, in their order.

    `ours`: coserve wrote the file, so its sides are not swapped. Raises `UnsupportedAdapter` where the shapes do not
    tell, `ShapeMismatch` and `CorruptAdapter`.
    """
    fused, tensors = dict[str, ExpertPart](), dict[str, ExpertTensors]()
    for module, own in found.items():
        sites = [site for site in base.experts if site.rpartition(".")[0] == module]
        whole = {key: pair for key, pair in own.items() if not key[1]}
        if not whole:
            tensors |= _named_parts(module, own, base)
        elif len(whole) < len(own):
            raise CorruptAdapter(f"{module}: expected tensors of one form")
        else:
            fused |= _nested(whole, sites, config, base)
    for site, swapped in _orientations(fused, base, config, ours=ours).items():
        tensors[site] = ExpertTensors((fused[site],), fused=True, swapped=swapped)
    return {site: tensors[site] for site in base.experts if site in tensors}


def _nested(whole: _Found, sites: list[str], config: Mapping[str, object], base: BaseSpec) -> dict[str, ExpertPart]:
    """Return PEFT's pairs of one module by parameter."""
    names = config.get("target_parameters")
    targets = frozenset(names if isinstance(names, list) else ())
    sites = [site for site in sites if targets_match(targets, site)]
    depths = sorted(whole, key=lambda key: -key[2])
    if len(depths) != len(sites) or [key[2] for key in depths] != [*reversed(range(len(sites)))]:
        raise CorruptAdapter(
            f"{depths[0][0]}: the file has tensors for {len(depths)} parameters, expected those of target_parameters",
            field="target_parameters",
        )
    found = {}
    for site, key in zip(sites, depths, strict=True):
        a, b = whole[key]["A"], whole[key]["B"]
        experts = base.experts[site].experts
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] or a.shape[0] % experts or b.shape[1] != a.shape[0]:
            raise ShapeMismatch(
                f"{site}: expected lora_A of {experts} times the rank rows and lora_B of as many columns, got "
                f"{list(a.shape)[:8]} and {list(b.shape)[:8]}"
            )
        named = f"{key[0]}.{site.rpartition('.')[2]}"
        found[site] = ExpertPart(named, a.shape[0] // experts, {ALL: a}, {ALL: b})
    return found


def _orientations(
    fused: Mapping[str, ExpertPart], base: BaseSpec, config: Mapping[str, object], *, ours: bool
) -> dict[str, bool]:
    """Return for each parameter whether its sides are swapped: all are, or none, as one version of PEFT wrote them."""
    fitting: dict[str, set[bool]] = {}
    for site, part in fused.items():
        spec, sides = base.experts[site], (part.a[ALL].shape[1], part.b[ALL].shape[0])
        straight = (spec.in_features, spec.out_features)
        ways = {False: straight} if spec.transposed else {False: straight, True: (straight[1], straight[0])}
        fitting[site] = {way for way, expected in ways.items() if sides == expected}
        if not fitting[site]:
            raise ShapeMismatch(f"{site}: expected sides {straight}, got {sides}")
    free = {site: ways for site, ways in fitting.items() if not base.experts[site].transposed}
    if not free:
        return dict.fromkeys(fitting, False)
    common = set.intersection(*free.values())
    if not common:
        raise CorruptAdapter(f"{min(free)}: some parameters have their sides swapped, as before PEFT 0.19, others not")
    if len(common) == 2:
        # The change came while PEFT's development version was still called 0.18.
        version = re.match(r"(?!0\.18\..*dev)(\d+)\.(\d+)", str(config.get("peft_version") or ""))
        if ours:
            common = {False}
        elif version is not None:
            common = {(int(version[1]), int(version[2])) < _NEW}
        else:
            raise UnsupportedAdapter(
                f"{min(free)}: PEFT before 0.19 and since then read its matrices differently, and its shape tells not "
                f"which wrote it, as both sides are {base.experts[min(free)].in_features}: add the writer's version "
                'to adapter_config.json, such as "peft_version": "0.18.0"',
                field="peft_version",
            )
    (swapped,) = common
    return {site: swapped and site in free for site in fitting}


def _named_parts(module: str, own: _Found, base: BaseSpec) -> dict[str, ExpertTensors]:
    """Return the pairs of one module that are named by part: for each expert, or one tensor for all of them."""
    by_part: dict[str, dict[int, dict[str, TensorEntry]]] = {}
    names: dict[str, str] = {}
    for (named, part, nested, expert), pair in own.items():
        if nested:
            raise CorruptAdapter(f"{module}.{part}: expected no base_layer in the names of single experts")
        leaf = _PARTS.get(part, part)
        if expert in by_part.setdefault(leaf, {}):
            raise CorruptAdapter(f"the file has two matrices of {module}.{expert}.{leaf}")
        by_part[leaf][expert] = pair
        names.setdefault(leaf, f"{named}.{part}" if expert == ALL else f"{named}.{expert}.{part}")
    found: dict[str, list[ExpertPart]] = {}
    for part in sorted(by_part, key=lambda part: _HALVES.get(part, 2)):
        site, half = f"{module}.{part}", None
        if site not in base.experts:
            site, half = f"{module}.gate_up_proj", _HALVES.get(part)
        if site not in base.experts or (half is not None and not base.experts[site].halves):
            raise BaseMismatch(f"{module}.{part}: {base.name} has no such experts")
        found.setdefault(site, []).append(_part(names[part], by_part[part], base.experts[site], half))
    if any(len(parts) > 1 and any(part.half is None for part in parts) for parts in found.values()):
        raise CorruptAdapter(f"{module}: expected either gate_up_proj or gate_proj and up_proj")
    return {site: ExpertTensors(tuple(parts), fused=False) for site, parts in found.items()}


def _part(named: str, pairs: Mapping[int, Mapping[str, TensorEntry]], spec: SiteSpec, half: int | None) -> ExpertPart:
    """Check one part's shapes. Raises `ShapeMismatch`."""
    sides = spec.in_features, spec.out_features // (1 if half is None else 2)
    ranks = set()
    if ALL in pairs and len(pairs) > 1:
        raise CorruptAdapter(f"{named}: expected tensors of single experts or of all, got both")
    for expert, pair in pairs.items():
        if expert >= spec.experts:
            raise ShapeMismatch(f"{named}: expected experts below {spec.experts}, got {expert}")
        a, b = pair["A"].shape, pair["B"].shape
        lead = {(), (1,), (spec.experts,)} if expert == ALL else {()}
        if len(a) < 2 or len(b) < 2 or not {a[:-2], b[:-2]} <= lead or (a[-1], b[-2]) != sides or a[-2] != b[-1]:
            raise ShapeMismatch(
                f"{named}: expected matrices [r, {sides[0]}] and [{sides[1]}, r]"
                f"{f', or {spec.experts} or 1 of each' if expert == ALL else ''}, got {list(a)[:8]} and {list(b)[:8]}"
            )
        ranks.add(a[-2])
    if len(ranks) > 1 or 0 in ranks:
        raise UnsupportedAdapter(f"{named}: expected one rank for all experts, got {sorted(ranks)[:8]}")
    in_a, in_b = ({expert: pair[kind] for expert, pair in pairs.items()} for kind in "AB")
    return ExpertPart(named, ranks.pop(), in_a, in_b, half)
