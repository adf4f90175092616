"""Requests to a generator on a GPU, their adapters, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.generator import Generator
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.executors import eager, graphs
from tests.support.generation import collect
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf

NEW = 16
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def gpu_base(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Base:
    return wrap_base(model.to("cuda", dtype), name="tiny", eos_token_ids=())


def request(id: str, tokens: tuple[int, ...], ref: AdapterRef | None = None, sampling: SamplingParams = GREEDY):
    return Generate(id=id, prompt=tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1))


def texts(
    base: Base,
    requests: Iterable[Generate],
    shelf: Shelf | None = None,
    *,
    lora_backend: LoraBackend = SEGMENTED,
    kv_tokens: int = 2048,
    step_tokens: int = 256,
    prefix_cache: bool = True,
    fused: FusedBase | None = None,
) -> dict[str, list[int]]:
    """`fused`: one step ahead and with graphs. The pool has `kv_tokens` beside the largest adapter."""
    largest = shelf.largest if shelf is not None else 0
    page = KvCache.for_base(base, 1, 16).buffer.page_bytes
    kv = KvCache.for_base(base, kv_tokens + 16 * -(-largest // page), 16)
    plain = eager(base, kv, lora_backend)
    generator = Generator(
        base,
        (shelf or Shelf()).store(),
        kv,
        plain if fused is None else graphs(fused, kv, lora_backend, max_running=16),
        max_running=16,
        step_tokens=step_tokens,
        prefix_cache=prefix_cache,
    )
    return {id: tokens for id, (tokens, _) in collect(generator, [*requests]).items()}
