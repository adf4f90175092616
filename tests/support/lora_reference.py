"""Adapters made, saved and run by the real `peft` package: the oracle of the adapter tests."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from coserve.model.base import Base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.seam import ReferenceAttention
from tests.support.lora_backends import lora_of


def save_peft(model: PreTrainedModel, folder: Path, *, seed: int = 0, **settings: object) -> PeftModel:
    """A PEFT adapter with random, nonzero weights on `model` (changed in place), saved to `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"init_lora_weights": False, "task_type": "CAUSAL_LM"} | settings
        peft_model = get_peft_model(model, LoraConfig(**settings)).eval()
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                    parameter.normal_(std=0.3)
    peft_model.save_pretrained(str(folder))
    return peft_model


def tokens_of(length: int, seed: int = 0, vocab: int = 128) -> Tensor:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def alone(model: torch.nn.Module, tokens_T: Tensor) -> Tensor:
    """Logits (T, V) of one sequence, by a model's own forward."""
    with torch.no_grad():
        return model(input_ids=tokens_T[None]).logits[0]


def adapted(base: Base, weights: LoraWeights, tokens_T: Tensor) -> Tensor:
    """Logits (T, V) of one sequence with an adapter, as it is served."""
    return packed(base, [tokens_T], lora_of(base.served(weights), len(tokens_T)))[0]


def packed(
    base: Base, sequences: list[Tensor], lora: LoraBatch | None = None, keep: Tensor | None = None
) -> list[Tensor]:
    """Logits of each sequence, from one packed forward (with `keep`: of the kept rows, in one tensor)."""
    bounds = [0]
    for tokens_T in sequences:
        bounds.append(bounds[-1] + len(tokens_T))
    positions_T = torch.cat([torch.arange(len(tokens_T)) for tokens_T in sequences])
    attention = ReferenceAttention(tuple(bounds))
    with torch.no_grad():
        logits = base.forward(torch.cat(sequences), positions_T, attention, lora=lora, keep=keep)
    return [logits] if keep is not None else list(logits.split([len(t) for t in sequences]))
