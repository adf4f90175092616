"""Loads a whole model from dense tensors that are made when they are read, such as dequantised or random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import is_gguf
from coserve.data.pretrained.source import fetch_files, hub_revision
from coserve.kernels.quantized.fp8 import refuse_unusable
from coserve.model.formats.dense import DenseTensor, Tensors, open_folder
from coserve.model.formats.gguf import open_gguf
from coserve.model.formats.source import loadable, read_config, set_generation
from coserve.model.parallel.build import empty_model
from coserve.model.parallel.drawn import DrawnWeights
from coserve.model.quantized.load import QuantizeAtLoad
from coserve.model.wrappers import drop_other_parts, model_class, random_model, whole_class


@dataclass(frozen=True)
class DenseModel:
    """A model to build from tensors by their names in a checkpoint; transformers renames and merges them."""

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool
    quantization: str = "none"
    """fp8 or nf4: the weights of the layers' linear modules are quantised as they are read."""
    whole: bool = False
    """Build the towers for images too, where transformers has a class without them."""

    def load(self, tensors: Tensors) -> PreTrainedModel:
        """Build the model. Each tensor is read once, cast to `dtype` and put on `device` before its memory is freed.

        Raises `UnsupportedBase` as `from_files` does, and `ConfigError` for a GPU without FP8.
        """
        with torch.device("meta"):
            found = (whole_class if self.whole else model_class)(self.config)
            kind = type(found.from_config(self.config, trust_remote_code=self.trust_remote_code))
        settings: dict[str, object] = {}
        if self.quantization != "none":
            if self.quantization == "fp8":
                refuse_unusable(self.device, "quantization")
            settings["quantization_config"] = QuantizeAtLoad(self.quantization, self.device)
        return from_files(
            kind.from_pretrained,
            None,
            whole=True,
            config=self.config,
            state_dict=dict(tensors),
            dtype=self.dtype,
            device_map=None if self.device.type == "cpu" else self.device,  # by accelerate
            **settings,
        )

    def random(self, seed: int) -> PreTrainedModel:
        """Build the model with random weights; quantised ones are drawn one by one."""
        if self.quantization == "none":
            trust = self.trust_remote_code
            return random_model(self.config, self.device, self.dtype, seed, trust_remote_code=trust)
        model = empty_model(self.config, self.dtype, trust_remote_code=self.trust_remote_code)
        drawn = DrawnWeights(model, self.device, seed)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return self.load({name: DenseTensor(name, partial(drawn.get, name, own), own) for name, own in shapes.items()})


def from_files(load: Callable[..., Any], path: str | None, *, whole: bool, **settings: object) -> PreTrainedModel:
    """Return what `load`, a `from_pretrained`, builds; unless `whole`, without the towers for images and audio.

    Raises `UnsupportedBase` for missing parameters, which transformers would draw at random.
    """
    model: PreTrainedModel
    model, report = load(path, output_loading_info=True, **settings)
    if not whole:
        drop_other_parts(model)
    missing = sorted(report["missing_keys"] & model.state_dict().keys())
    if missing:
        raise UnsupportedBase(f"its files lack {len(missing)} parameters, the first is {missing[0]}")
    return model


def load_whole(source: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load a base dense and with its towers, on the CPU: in its own dtype, a GGUF file in float32. `source`: a folder,
    a hub name or a GGUF file. Raises `UnsupportedBase`."""
    cpu = torch.device("cpu")
    if is_gguf(source):
        config, _ = read_config(source, source, "", trust_remote_code=False)
        with open_gguf(Path(source), config) as tensors:
            return DenseModel(config, torch.float32, cpu, trust_remote_code=False).load(tensors)
    path, revision = hub_revision(source)
    local = Path(path).exists()
    with loadable(path):
        config, form = read_config(path, path, revision, trust_remote_code=trust_remote_code)
        if form is None:
            return from_files(
                whole_class(config).from_pretrained,
                path,
                whole=True,
                revision=revision,
                config=config,
                dtype="auto",
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=local,
            )
        folder = Path(path) if local else fetch_files(source, ("*.safetensors", "*.json"))
        with open_folder(folder, form, cpu) as tensors:
            dtype = config.get_text_config().dtype or torch.bfloat16
            model = DenseModel(config, dtype, cpu, trust_remote_code, whole=True).load(tensors)
        set_generation(model, folder)
        return model
