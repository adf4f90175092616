"""Reads the sizes of a base from its config: no weights are read, and no memory is taken for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from coserve.core.gpu_memory import BaseSizes
from coserve.core.types import BaseSpec, SiteSpec
from coserve.data.pretrained.source import check_source, hub_revision, locate
from coserve.memory.state_pool import state_bytes
from coserve.model.context import context_of
from coserve.model.formats.source import loadable, read_config
from coserve.model.latent.absorbed import latent_shapes
from coserve.model.lora import default_targets, site_weight
from coserve.model.parallel.build import empty_model, fill_shard
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import LoneRank
from coserve.model.probe.observe import decoder_layers, observe_shapes
from coserve.model.quantized.modules import quantizable, weight_bytes
from coserve.model.settings import refuse_config

STACKED = 2
"""Number of linear modules, the widest ones, that are dequantised at a time (gate and up)."""


def read_sizes(
    source: str,
    dtype: str,
    *,
    quantization: str = "none",
    mla_cache: str = "latents",
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> BaseSizes:
    """Return the sizes of a folder with a config.json, a hub name, a GGUF file or a packaged base. `dtype`,
    `quantization`, `mla_cache`, `ranks`: as it is served. Raises `UnsupportedBase`."""
    check_source(source, weights=False)
    path, revision = hub_revision(locate(source))
    with loadable(source):
        config, _ = read_config(path, source, revision, trust_remote_code=trust_remote_code)
        refuse_config(config)
        return config_sizes(
            config,
            dtype,
            name=source,
            quantization=quantization,
            mla_cache=mla_cache,
            ranks=ranks,
            trust_remote_code=trust_remote_code,
        )


def config_sizes(
    config: PretrainedConfig,
    dtype: str,
    *,
    name: str,
    quantization: str = "none",
    mla_cache: str = "latents",
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> BaseSizes:
    """Return the sizes of a config's model on each of `ranks` GPUs. Raises `UnsupportedBase` if they depend on values,
    or if the GPUs cannot share the base."""
    kind: torch.dtype = getattr(torch, dtype)
    model = empty_model(config, torch.bfloat16, trust_remote_code=trust_remote_code).eval()  # experts need bf16
    seen = observe_shapes(model)
    path, _ = decoder_layers(model, seen)
    linear = {
        f"{path}.{site}": module
        for site, module in model.get_submodule(path).named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    sites = {}
    for site, module in linear.items():
        outputs, inputs = site_weight(module).shape
        sites[site] = SiteSpec(inputs, outputs, int(site.removeprefix(f"{path}.").split(".", 1)[0]))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight  # then a shard is a view
    if ranks > 1:
        fill_shard(model, _NoWeights(), LoneRank(0, ranks), torch.device("meta"), Strategy.NFS)
        seen = observe_shapes(model)
    shapes = list(seen.kv_shapes)
    if mla_cache == "latents":
        shapes = latent_shapes(seen.attention, shapes)
    absorbed = [module.kv_b_proj for module in seen.attention] if shapes != list(seen.kv_shapes) else []
    local, saved, expanded = list[int](), 0, 0
    for site, module in linear.items():
        outputs, inputs = site_weight(module).shape
        local.append(outputs)
        if (
            quantization != "none"
            and type(module) is nn.Linear
            and quantizable(site, sites[site].in_features, sites[site].out_features, quantization)
        ):
            dense = inputs * outputs * kind.itemsize
            saved += (0 if module in absorbed else dense) - weight_bytes(inputs, outputs, quantization)
            expanded = max(expanded, STACKED * dense)
    head = model.get_output_embeddings().weight
    held = [one for one in (*model.parameters(), *model.buffers()) if ranks == 1 or not tied or one is not head]
    text = config.get_text_config()
    spec = BaseSpec(
        name=name,
        fingerprint="",
        family=config.model_type,
        dtype=dtype,
        device="meta",
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        streams=getattr(text, "altup_num_inputs", 1),
        vocab=text.vocab_size,
        context=context_of(config, least=1).tokens,
        eos_token_ids=(),
        sites=sites,
        default_targets=default_targets(config.model_type, sites),
        quantization=quantization,
    )
    return BaseSizes(
        spec=spec,
        outputs=tuple(local),
        weights=sum(one.numel() for one in held) * kind.itemsize - saved,
        kv=sum(one.numbers for one in shapes) * kind.itemsize,
        states=state_bytes(seen.states, kind),
        experts=_experts(text, ranks),
        expanded=expanded,
        ranks=ranks,
    )


class _NoWeights:
    """Implements `Weights`: tensors without memory."""

    def get(self, name: str, shape: torch.Size) -> Tensor:
        return torch.empty(shape, device="meta")

    def has(self, name: str) -> bool:
        return False


def _experts(text: PretrainedConfig, ranks: int) -> int:
    """Return the outputs of a token's experts in one layer, which are no linear modules: gate, up and down."""
    sizes = text.to_dict()
    chosen = int(sizes.get("num_experts_per_tok") or 0)
    if not chosen:
        return 0
    width = int(sizes.get("moe_intermediate_size") or sizes.get("intermediate_size") or 0)
    return chosen * (2 * width // ranks + int(sizes["hidden_size"]))
