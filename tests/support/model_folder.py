"""A model folder for a daemon under test: a random Llama of two narrow layers with the bundled tokenizer. No torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import coserve

BUNDLED = Path(coserve.__file__).parent / "assets" / "tiny"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 48, 2, 4, 2, 256


def make_model_folder(folder: Path, context: int = CONTEXT) -> Path:
    """The same files on every call. `context`: tokens."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {
        "dtype": "float32",
        "head_dim": HIDDEN // HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": context,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(int(config["vocab_size"])), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(vocab: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (kv, HIDDEN) for name in "kv"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER)}
    weights = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{name}_layernorm.weight" for n in range(LAYERS) for name in ("input", "post_attention")]
    return weights | {name: np.ones(HIDDEN, np.float32) for name in (*norms, "model.norm.weight")}
