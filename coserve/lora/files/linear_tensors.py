"""The tensors of linear modules, embedding and head in an adapter's file: sorted by the base's sites, or refused by
name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coserve.core.errors import BaseMismatch, CorruptAdapter, UnsupportedAdapter
from coserve.core.names import PEFT_PREFIX
from coserve.core.types import BaseSpec
from coserve.lora.files.ends import end_named
from coserve.lora.files.tensorfile import TensorEntry
from coserve.lora.files.wrapped import outside_text, site_of

MAGNITUDE = "lora_magnitude_vector"
_KINDS = {
    "base_layer": "the file holds weights of the base itself, which is not implemented",
    "token_adapter": "tokens are replaced in the input embedding and the head alone, on one GPU",
    "modules_to_save": "the input embedding and the head alone can be replaced, on one GPU",
    "lora_B.bias": "LoRA with a bias is not implemented",
}
_ENDS = {"lm_head", "embed_tokens", "wte", "wpe", "embed_out"}


@dataclass(frozen=True)
class LinearTensors:
    """Tensors by site; each site has both an A and a B."""

    a: dict[str, TensorEntry]
    b: dict[str, TensorEntry]
    magnitudes: dict[str, TensorEntry]
    """DoRA's, by site."""
    names: dict[str, str]
    """The file's name of each site, which the config's patterns are matched with."""


def sort_tensors(entries: Mapping[str, TensorEntry], base: BaseSpec) -> LinearTensors:
    """Sort the tensors that are left when those of experts and of replaced rows are taken out.

    Raises `CorruptAdapter` for a matrix that is there twice, or without the other one of its pair, and
    `UnsupportedAdapter` or `BaseMismatch` for a tensor of anything else.
    """
    kinds: dict[str, dict[str, TensorEntry]] = {"lora_A": {}, "lora_B": {}, MAGNITUDE: {}}
    names: dict[str, str] = {}
    for name, entry in entries.items():
        site, named, kind = _site_of(name, base)
        if site in kinds[kind]:
            raise CorruptAdapter(f"the file has two matrices {kind} of {site}")
        kinds[kind][site], names[site] = entry, named
    found = LinearTensors(kinds["lora_A"], kinds["lora_B"], kinds[MAGNITUDE], names)
    if lonely := sorted(found.a.keys() ^ found.b.keys()):
        raise CorruptAdapter(f"{lonely[0]}: expected both lora_A and lora_B, got only one of them")
    return found


def _site_of(name: str, base: BaseSpec) -> tuple[str, str, str]:
    """Split a tensor's name into its site, the site's name in the file, and `lora_A`, `lora_B` or `MAGNITUDE`."""
    shown = repr(name[:120])
    if not base.ends and not _ENDS.isdisjoint(name.split(".")):
        raise UnsupportedAdapter(
            f"tensor {shown}: expected linear modules of decoder layers: the input embedding and the head take no "
            "adapters here, as on several GPUs"
        )
    for part, reason in _KINDS.items():
        if f".{part}" in f".{name}":
            raise UnsupportedAdapter(f"tensor {shown}: {reason}")
    named, _, rest = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    end = end_named(named, base)
    embeds = end is not None and base.ends[end].layer < 0
    known = ("embedding_A", "embedding_B") if embeds else ("A.weight", "B.weight", "magnitude_vector")
    if not name.startswith(PEFT_PREFIX) or (rest not in known and not rest.startswith("embedding_")):
        raise UnsupportedAdapter(
            f"tensor {shown}: expected only lora_A.weight, lora_B.weight and {MAGNITUDE} of linear modules"
        )
    site, other = end or site_of(named, base.sites), outside_text(named)
    if site is not None and rest in known:
        return site, named, f"lora_{rest.removesuffix('.weight').removeprefix('embedding_')}"
    if other is not None:
        raise UnsupportedAdapter(f"tensor {shown}: it adapts {other}, but coserve runs the language model alone")
    if rest not in known or named.rsplit(".", 1)[-1] in _ENDS:
        raise UnsupportedAdapter(
            f"tensor {shown}: expected linear modules of decoder layers, or {' and '.join(base.ends) or 'one GPU'}"
        )
    raise BaseMismatch(f"tensor {shown}: {base.name} has no such module that an adapter can change")
