"""Files of cartridges, and what requests with cartridges get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import CartridgeConfig, PeftModel, get_peft_model

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.generator import Generator
from coserve.lora.store.files import load_packed
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from tests.support.generation import answers, make_generator
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

CARTRIDGE = AdapterRef("cartridge", 1)
TOKENS = 11
"""Of the cartridge: pages of 4 leave a last one that is shared with nobody."""


def save_cartridge(folder: Path, family: str, tokens: int = TOKENS, seed: int = 0) -> PeftModel:
    """Write PEFT's own files of a random cartridge; return the model with it."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model(family), CartridgeConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM"))
    model.save_pretrained(str(folder))
    return model.eval()


def base_of(family: str) -> Base:
    return wrap_base(tiny_model(family), name=family, eos_token_ids=())


def read(folder: Path, base: Base) -> LoraWeights:
    return load_packed(folder, base.spec, dtype=torch.float32, for_kernels=False)


def make(base: Base, shelf: Shelf, *, cached: bool = True, **sizes: Any) -> Generator:
    return make_generator(base, shelf, page_tokens=4, prefix_cache=cached, **sizes)


def request(
    id: str, prompt: tuple[int, ...], ref: AdapterRef | None = CARTRIDGE, max_tokens: int = 6, **sampling: Any
) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, logprobs=2, temperature=0.0, **sampling)
    return Generate(id=id, prompt=prompt, sampling=params, adapter=ref, slo=Slo(ttft=1, tpot=1))


def run(gen: Generator, *requests: Generate) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Tokens, their log-probabilities, and those of the prompt, by the request's id."""
    found = answers(gen, requests)
    assert not any(one.failed for one in found.values())
    return {
        id: (one.tokens, *([each.logprob for each in entries] for entries in (one.logprobs, one.prompt_logprobs)))
        for id, one in found.items()
    }
