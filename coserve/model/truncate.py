"""Truncates a model's config to few layers, with every kind of layer, so that its kernels are those of the whole
model."""

from __future__ import annotations

from transformers import PretrainedConfig

SAME = 2
"""Layers of each kind to keep, if there are as many."""


def layer_kinds(config: PretrainedConfig) -> list[tuple[object, ...]]:
    """Describe each layer of a text model by its config; layers with equal entries are alike."""
    layers = config.num_hidden_layers
    lists = [value for value in config.to_dict().values() if isinstance(value, list) and len(value) == layers]
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", None) or 1
    first_sparse = getattr(config, "first_k_dense_replace", None) or 0
    windows = getattr(config, "max_window_layers", None)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return [
        (
            *(repr(value[layer]) for value in lists),
            layer in dense or (layer + 1) % step != 0,
            layer >= first_sparse,
            windows is not None and layer >= windows,
            layer >= layers - shared,
        )
        for layer in range(layers)
    ]


def truncate_layers(config: PretrainedConfig) -> None:
    """Keep the first layers, as many as needed for `SAME` layers of each kind (or all, if fewer). Also ties the head to
    the embedding."""
    text = config.get_text_config()
    kinds, layers = layer_kinds(text), text.num_hidden_layers
    wanted = {kind: min(SAME, kinds.count(kind)) for kind in kinds}
    kept = next(n for n in range(1, layers + 1) if all(kinds[:n].count(kind) >= most for kind, most in wanted.items()))
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == layers and layers > 1:
            setattr(text, name, value[:kept])
    if shared := getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = shared - (layers - kept)
    text.num_hidden_layers = kept
    config.tie_word_embeddings = text.tie_word_embeddings = True
