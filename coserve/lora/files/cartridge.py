"""Cartridges (arXiv 2506.06266): trained KV prefixes, in the files of PEFT's `cartridge` (0.21). No torch.

The file holds one tensor, `prompt_embeddings` (P, 2 L K D): for each of P tokens, the keys of layer 0, its values, the
keys of layer 1, and so on, each of K heads with D numbers. Keys have their rotary positions 0 to P - 1 already; the
sequence's own tokens follow at position P.

Here the keys of a layer are the matrix A (P, K D) of a pair, and its values the matrix B (K D, P): attention over the
prefix is `softmax(q Aᵀ) Bᵀ`, a low-rank adapter with a softmax in the middle. So the adapter store, the optimizer and
checkpoints treat a cartridge as they treat LoRA.

An adapter may have a cartridge beside LoRA matrices. Then one file holds the tensors of both, and the config has those
of both parts, `lora` and `cartridge`, each as PEFT writes it.
"""

from __future__ import annotations

from coserve.core.errors import BaseMismatch, CorruptAdapter, ShapeMismatch
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.targets import NO_CARTRIDGES
from coserve.lora.files.tensorfile import TensorEntry, TensorFile

EMBEDDINGS = "prompt_embeddings"
FROZEN = 1
"""Leading tokens of a new cartridge that are not trained: the first one is an attention sink (section 3.2)."""


def read_cartridge(config: dict[str, object], file: TensorFile, base: BaseSpec) -> tuple[int, TensorEntry]:
    """Return the tokens of an open file's cartridge, whose config was checked by `gate`, and its tensor.

    Raises:
        BaseMismatch: a base that takes no cartridges, or of other sizes.
        CorruptAdapter, ShapeMismatch: files that contradict each other.
    """
    if not base.prefixes:
        raise BaseMismatch(f"{base.name} takes no cartridges: {NO_CARTRIDGES}")
    width = next(iter(base.prefixes.values())).in_features
    for key, expected in (
        ("num_layers", base.layers),
        ("token_dim", width),
        ("num_attention_heads", base.kv_heads),
    ):
        if (got := config.get(key)) != expected:
            raise BaseMismatch(f"{base.name}: expected {key} of {expected}, got {got}", field=key)
    tokens = config.get("num_virtual_tokens")
    entry = file.entries.get(EMBEDDINGS)
    if entry is None or not isinstance(tokens, int):
        raise CorruptAdapter(f"expected num_virtual_tokens and the tensor {EMBEDDINGS}")
    if (frozen := config.get("num_frozen_tokens", 0)) > tokens:  # type: ignore[operator]
        raise CorruptAdapter(f"expected at most num_virtual_tokens, {tokens}, got {frozen}", field="num_frozen_tokens")
    if entry.shape != (want := (tokens, 2 * base.layers * width)):
        raise ShapeMismatch(f"{EMBEDDINGS}: expected shape {list(want)}, got {list(entry.shape)[:8]}")
    if tokens >= base.context:
        raise ShapeMismatch(f"expected fewer tokens than the base's context of {base.context}, got {tokens}")
    return tokens, entry


def read_alone(config: dict[str, object], file: TensorFile, base: BaseSpec) -> tuple[LoraSettings, TensorEntry]:
    """Return the settings of an adapter that is a cartridge alone, and its tensor. Raises as `read_cartridge`."""
    tokens, entry = read_cartridge(config, file, base)
    if len(file.entries) != 1:
        raise CorruptAdapter(f"expected the one tensor {EMBEDDINGS}")
    return LoraSettings(r=tokens, cartridge=True), entry


def cartridge_config(tokens: int, base: BaseSpec) -> dict[str, object]:
    """Return the content of `adapter_config.json` for a cartridge of `tokens` tokens."""
    return {
        "peft_type": "CARTRIDGE",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.hub_name,
        "inference_mode": True,
        "num_virtual_tokens": tokens,
        "num_frozen_tokens": min(FROZEN, tokens),
        "num_layers": base.layers,
        "num_attention_heads": base.kv_heads,
        "num_transformer_submodules": 1,
        "token_dim": next(iter(base.prefixes.values())).in_features,
    }
