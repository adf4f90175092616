"""Adapters of the embedding and the head in steps that graphs serve otherwise."""

from __future__ import annotations

import msgspec
import pytest
import torch

from coserve.core.names import TOKEN_ROWS, WHOLE_COPY
from coserve.core.types import AdapterRef
from coserve.generate.generator import Generator
from coserve.kernels.lora.types import LoraPair
from coserve.memory.kv import KvCache
from coserve.model.adapters.end_sites import replaced
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.executors import eager, graphs
from tests.support.generation import adapter, collect, prompt, request
from tests.support.shelf import Shelf
from tests.support.tiny_models import VOCAB, tiny_model


def of_ends(base: Base, seed: int) -> LoraWeights:
    """A LoRA of a layer's site and of the head, with trained tokens and another head."""
    g, plain = torch.Generator().manual_seed(seed), adapter(base, seed, 3, ("q_proj",))
    tokens = {"model.embed_tokens": tuple(range(20, 60))}
    head = LoraPair(torch.randn(4, 32, generator=g) * 0.3, torch.randn(VOCAB, 4, generator=g) * 0.3, 0.7)
    rows = replaced(torch.randn(40, 32, generator=g))
    whole = replaced(torch.randn(VOCAB, 32, generator=g))
    sites = {"model.embed_tokens" + TOKEN_ROWS: rows, "lm_head" + WHOLE_COPY: whole, "lm_head": head}
    settings = msgspec.structs.replace(plain.settings, trainable_token_indices=tokens)
    return LoraWeights(settings, {**plain.sites, **sites})


@pytest.mark.slow
def test_texts_of_mixed_steps_are_those_without_graphs() -> None:
    """Prompts in chunks and decodes, of the base, a plain adapter and two of the ends."""
    fused = FusedBase(wrap_base(tiny_model("llama"), name="llama", eos_token_ids=()), compiled=False)
    base = fused.base
    refs = [AdapterRef(name, 1) for name in ("plain", "ends", "others")]
    weights = [adapter(base, 1, 8), of_ends(base, 2), of_ends(base, 3)]
    found = []
    for captured in (False, True):
        kv, shelf = KvCache.for_base(base, 2048, 4), Shelf(dict(zip(refs, weights, strict=True)))
        executor = graphs(fused, kv, max_running=8, step_tokens=64) if captured else eager(base, kv)
        if captured:
            executor.warm_up((8,))
        gen = Generator(base, shelf.store(), kv, executor, max_running=8, step_tokens=32)
        found.append(
            collect(
                gen, [request(f"{n}", prompt(7 + n, n), ref=ref) for n, ref in enumerate([None, *refs, None, *refs])]
            )
        )
    assert found[0] == found[1]
    texts = {tuple(tokens) for tokens, _ in found[0].values()}
    assert len(texts) == 8
