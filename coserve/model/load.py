"""Loads a base: the tiny one that comes with coserve, a folder, a model of the hub or a GGUF file."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import is_gguf
from coserve.data.pretrained.source import fetch_files, hub_revision, locate
from coserve.kernels.gpu.device import usable_device
from coserve.model.base import Base, wrap_base
from coserve.model.formats.dense import open_folder
from coserve.model.formats.gguf import open_gguf
from coserve.model.formats.load import DenseModel, from_files
from coserve.model.formats.source import loadable, read_config, set_generation
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.settings import refuse_config
from coserve.model.sharded import load_shard
from coserve.model.truncate import truncate_layers
from coserve.model.wrappers import drop_other_parts, model_class

DUMMY_SEED = 0
"""Seed of random weights."""


def load_base(
    source: str,
    *,
    device: str,
    dtype: str,
    trust_remote_code: bool = False,
    load_format: str = "auto",
    few_layers: bool = False,
    mesh: Mesh | None = None,
    strategy: str = Strategy.NFS,
    ep: int = 1,
    quantization: str = "none",
    mla_cache: str = "latents",
) -> Base:
    """Load a base and wrap it (`wrap_base`).

    `source`: "bundled", a folder with safetensors, a hub name (NAME or NAME@REVISION, also safetensors) or a GGUF file.
    `device`: auto, cpu or cuda. `dtype`: auto (float32 on CPU, bfloat16 on CUDA) or the name of a torch dtype.
    `load_format`: auto (weights from files) or dummy (only config.json is read; weights are random, and the same each
    time on one kind of device). `few_layers`: random weights, and only the first layers (`truncate.truncate_layers`).
    `mesh`: the ranks that hold the base together, a shard each; all of them call this at the same time. `strategy`:
    nfs or slora, for adapters that are not block-diagonal. `ep`: the number of GPUs that share out the experts.
    `quantization`: none, fp8 or nf4. `mla_cache`: latents or heads.

    Raises:
        UnsupportedBase: see `wrap_base`; no readable weights; code or settings in the files that we don't run.
        ConfigError: no such device.
        RuntimeError: another rank of `mesh` is gone.
    """
    where = usable_device(device)
    kind = (torch.bfloat16 if where.type == "cuda" else torch.float32) if dtype == "auto" else getattr(torch, dtype)
    folder = Path(locate(source))
    gguf = is_gguf(str(folder))
    local = folder.exists()
    if source == "bundled" and not (folder / "config.json").is_file():
        raise UnsupportedBase("the bundled base is not part of this installation")
    path, revision = hub_revision(str(folder))
    name, hub_name = (source, None) if local else (path, path)
    if local and folder == Path(source):
        name = folder.resolve().name
    with loadable(name):
        config, form = read_config(path, name, revision, trust_remote_code=trust_remote_code)
        refuse_config(config)
        kind_of_model = model_class(config)
        if few_layers:
            truncate_layers(config)
    drawn = load_format == "dummy" or few_layers
    sharded = mesh is not None and mesh.size > 1
    origin = "GGUF" if gguf else None if form is None else form.name
    note = "" if origin is None or drawn else f"the base's weights are dequantised from {origin} at load"
    if (sharded or note or quantization != "none") and not (local or drawn):
        folder = fetch_files(source, ("*.safetensors", "*.json"))
    opened = partial(open_gguf, folder, config) if gguf else partial(open_folder, folder, form, where)
    if mesh is not None and sharded:
        with loadable(name), ExitStack() as stack:
            loaded = load_shard(
                None if drawn else stack.enter_context(opened()),
                config,
                mesh,
                name=name,
                device=where,
                dtype=kind,
                quantization=quantization,
                seed=DUMMY_SEED,
                strategy=Strategy(strategy),
                by_expert=ep > 1,
                trust_remote_code=trust_remote_code,
            )
            if not drawn:
                set_generation(loaded.model, folder)
        # Outside of `loadable`: the RuntimeError of collectives with a dead rank says nothing about the base.
        shard = loaded.share_fingerprint(where)
        return wrap_base(shard.model, name=name, hub_name=hub_name, shard=shard, note=note, mla_cache=mla_cache)
    with loadable(name):
        dense = DenseModel(config, kind, where, trust_remote_code, quantization)
        if drawn:
            model = dense.random(DUMMY_SEED)
        elif note or quantization != "none":
            with opened() as tensors:
                model = dense.load(tensors)
            set_generation(model, folder)
        else:
            model = from_files(
                kind_of_model.from_pretrained,
                path,
                whole=False,
                revision=revision,
                config=config,
                dtype=kind,
                device_map=None if where.type == "cpu" else where,  # a tensor at a time: host memory never holds all
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=local,
            )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedBase(f"{name}: it brings an adapter of its own; expected a base model")
    drop_other_parts(model)
    return wrap_base(model.to(where), name=name, hub_name=hub_name, note=note, mla_cache=mla_cache)
