"""Tensors of a PEFT file for the model's input embedding and head, besides LoRA pairs: replaced rows. No torch.

- `embed_tokens.token_adapter.trainable_tokens_delta` (K, D): rows of the tokens in `trainable_token_indices`. The name
  is wrong: they replace the base's rows.
- `lm_head.weight` (V, D): all rows, of a module in `modules_to_save` or of a resized model.
- `lm_head.base_layer.weight` (V, D): the weight under a LoRA, which PEFT replaces, too; mostly a copy of the base's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from coserve.core.errors import CorruptAdapter, ShapeMismatch, UnsupportedAdapter
from coserve.core.names import ADAPTER_CONFIG, PEFT_PREFIX, TOKEN_ROWS, WHOLE_COPY, end_of
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.tensorfile import TensorEntry
from coserve.lora.files.wrapped import outside_text

_FORMS = {
    f"{TOKEN_ROWS}.trainable_tokens_delta": TOKEN_ROWS,
    ".base_layer.weight": WHOLE_COPY,
    ".modules_to_save.weight": WHOLE_COPY,
    ".weight": WHOLE_COPY,
}


def end_named(named: str, base: BaseSpec) -> str | None:
    """Return the base's embedding or head that a file calls `named`, by itself or in a multimodal wrapper."""
    if named in base.ends:
        return named
    if outside_text(named) is not None or any(part.isdigit() for part in named.split(".")):
        return None
    leaf = named.rpartition(".")[2]
    return next((end for end in base.ends if end.rpartition(".")[2] == leaf), None)


def take_rows(entries: dict[str, TensorEntry], base: BaseSpec, config: Mapping[str, object]) -> dict[str, TensorEntry]:
    """Remove the tensors of replaced rows from `entries`. Return them by the name of the embedding or head followed by
    `TOKEN_ROWS` or `WHOLE_COPY`. On a tied base, a weight that is no module of `modules_to_save` stands for both ends.

    Raises `ShapeMismatch` for a vocabulary that is not the base's, and `CorruptAdapter`.
    """
    found: dict[str, TensorEntry] = {}
    both: list[TensorEntry] = []
    saved = {name.rpartition(".")[2] for name in cast("list[str]", config.get("modules_to_save") or [])}
    for name in [*entries]:
        form = next((form for form in _FORMS if name.startswith(PEFT_PREFIX) and name.endswith(form)), None)
        own = name.removeprefix(PEFT_PREFIX)
        end = None if form is None else end_named(own.removesuffix(form), base)
        if form is None or end is None:
            continue
        rows, width = weight_shape(end, base)
        shape = entries[name].shape
        if len(shape) != 2 or shape[1] != width or (_FORMS[form] == WHOLE_COPY and shape[0] != rows):
            raise ShapeMismatch(
                f"{own}: expected {'K' if _FORMS[form] == TOKEN_ROWS else rows} rows of {width}, "
                f"got {list(shape)[:8]}: serve a base with the adapter's vocabulary"
            )
        if end + _FORMS[form] in found:
            raise CorruptAdapter(f"the file replaces rows of {end} twice")
        found[end + _FORMS[form]] = entries.pop(name)
        if base.tied and form == ".weight" and end.rpartition(".")[2] not in saved:
            both.append(found[end + WHOLE_COPY])
    return {end + WHOLE_COPY: entry for entry in both for end in base.ends} | found


def weight_shape(end: str, base: BaseSpec) -> tuple[int, int]:
    """Return the shape (V, D) of the weight of an embedding or a head."""
    spec = base.ends[end]
    both = spec.in_features, spec.out_features
    return both if spec.layer < 0 else (both[1], both[0])


def trained_tokens(
    config: Mapping[str, object], rows: Mapping[str, TensorEntry], base: BaseSpec
) -> dict[str, tuple[int, ...]] | None:
    """Return the tokens of `trainable_token_indices` by embedding or head; None: there are none.

    Raises `CorruptAdapter` unless the file holds a row for each.
    """
    own = config.get("trainable_token_indices") or {}
    if isinstance(own, list):
        own = {next((end for end, spec in base.ends.items() if spec.layer < 0), "the embedding"): own}
    found: dict[str, tuple[int, ...]] = {}
    for name, tokens in cast("dict[str, list[int]]", own).items():
        end = end_named(name, base)
        if end is None:
            raise UnsupportedAdapter(
                f"trainable_token_indices: expected modules among {', '.join(base.ends) or 'none, on several GPUs'}, "
                f"got {name[:80]!r}",
                field="trainable_token_indices",
            )
        check_tokens(end, tokens, base)
        entry = rows.get(end + TOKEN_ROWS)
        if entry is None and base.tied and base.ends[end].layer >= 0:  # tied: PEFT stores only the embedding's rows
            continue
        if entry is None or entry.shape[0] != len(tokens):
            raise CorruptAdapter(
                f"{end}: expected the rows of {len(tokens)} tokens, got {0 if entry is None else entry.shape[0]}",
                field="trainable_token_indices",
            )
        found[end] = tuple(tokens)
    for name in rows:
        if name.endswith(TOKEN_ROWS) and end_of(name) not in found:
            raise CorruptAdapter(
                f"{name}: the file has rows for it, but {ADAPTER_CONFIG} does not say of which tokens",
                field="trainable_token_indices",
            )
    return found or None


def check_tokens(end: str, tokens: Sequence[int], base: BaseSpec) -> None:
    """Raise `CorruptAdapter` for ids beyond the vocabulary, and for any given twice."""
    vocab = weight_shape(end, base)[0]
    wrong = next((token for token in tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        raise CorruptAdapter(f"{end}: expected token ids below {vocab}, got {wrong}", field="trainable_token_indices")
    if len(set(tokens)) < len(tokens):
        raise CorruptAdapter(f"{end}: expected each token once", field="trainable_token_indices")


def replaced_rows(settings: LoraSettings, base: BaseSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes of an adapter's replaced rows, by their names in `LoraWeights`."""
    tokens = settings.trainable_token_indices or {}
    found = {end + TOKEN_ROWS: (len(own), weight_shape(end, base)[1]) for end, own in tokens.items()}
    return found | {end + WHOLE_COPY: weight_shape(end, base) for end in settings.modules_to_save or ()}


def ends_config(settings: LoraSettings) -> dict[str, object]:
    """Return the keys of `adapter_config.json` for replaced rows."""
    tokens, saved = settings.trainable_token_indices, settings.modules_to_save
    return {
        "trainable_token_indices": tokens and {name: list(own) for name, own in tokens.items()},
        "modules_to_save": saved and [name.rpartition(".")[2] for name in saved],
    }


def peft_name(site: str, sites: Mapping[str, object]) -> str:
    """Return PEFT's name of the tensor of replaced rows. `sites`: all sites of the adapter. A replaced weight is named
    `base_layer` if the same embedding or head also has a LoRA pair."""
    end = end_of(site)
    if site.endswith(TOKEN_ROWS):
        return f"{site}.trainable_tokens_delta"
    return f"{end}.base_layer.weight" if end in sites else f"{end}.weight"
