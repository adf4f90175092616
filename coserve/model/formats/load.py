"""Loads a whole model from dense tensors that are made when they are read, such as dequantised weights."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import is_accelerate_available

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.dense import Tensors
from coserve.model.wrappers import model_class


def load_dense(
    config: PretrainedConfig,
    tensors: Tensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Build the config's model from tensors by their names in a checkpoint; transformers renames and merges them.

    Each tensor is read once, cast to `dtype` and put on `device` before its memory is freed (onto a GPU only if
    accelerate is installed; without it, all of them lie in host memory first). Raises `UnsupportedBase` for missing
    parameters, which transformers would draw at random.
    """
    with torch.device("meta"):
        kind = type(model_class(config).from_config(config, trust_remote_code=trust_remote_code))
    model: PreTrainedModel
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        device_map=device if device.type != "cpu" and is_accelerate_available() else None,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedBase(f"its files lack {len(missing)} parameters, the first is {missing[0]}")
    return model
