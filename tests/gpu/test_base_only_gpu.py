"""Requests without an adapter, before any adapter is loaded and after: the same tokens. Run with `pytest -m gpu`."""

from __future__ import annotations

import random

import pytest
import torch

from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.generator import Generator
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from coserve.model.fused import FusedBase
from tests.support.executors import graphs
from tests.support.generation import adapter
from tests.support.lora_backends import SEGMENTED
from tests.support.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.gpu

SEQUENCES, ADAPTERS = 12, 8
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def asks(name: str, adapters: int = 0) -> list[Generate]:
    chance = random.Random(0)
    return [
        Generate(
            id=f"{name}{i}",
            prompt=tuple(chance.randrange(3, VOCAB) for _ in range(5 + 7 * i)),
            sampling=SAMPLING,
            adapter=AdapterRef(f"a{i % adapters}", 1) if adapters else None,
            slo=Slo(ttft=1, tpot=1),
        )
        for i in range(SEQUENCES)
    ]


def texts(generator: Generator, requests: list[Generate]) -> list[list[int]]:
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        generator.add(one)
    while generator.running:
        for message in generator.step():
            assert isinstance(message, Tokens), message
            found[message.id].extend(message.tokens)
    return list(found.values())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_loaded_adapters_change_nothing_for_the_base(family: str) -> None:
    """In bfloat16, as it is served: the batch is the same, so not even a rounding may differ."""
    base = wrap_base(tiny_model(family).to("cuda", torch.bfloat16), name="tiny", eos_token_ids=())
    made = {AdapterRef(f"a{i}", 1): adapter(base, i, 16) for i in range(ADAPTERS)}
    store = AdapterStore(lambda ref, digests: made[ref], 1 << 40)
    kv = KvCache.for_base(base, 16384, 16)
    generator = Generator(
        base,
        store,
        kv,
        graphs(FusedBase(base), kv, SEGMENTED, max_running=16),
        max_running=16,
        step_tokens=256,
        prefix_cache=False,
    )
    before = texts(generator, asks("before"))
    assert len({tuple(text) for text in before}) > SEQUENCES // 2, "expected prompts that differ to be told apart"
    with_adapters = texts(generator, asks("with", ADAPTERS))
    assert with_adapters != before
    assert set(store.resident()) == set(made)
    assert texts(generator, asks("after")) == before
