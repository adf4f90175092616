"""Generation on bases whose last layers read the keys and values of earlier ones, or that cache latents: the tokens of
whole forwards, without a cache."""

from __future__ import annotations

import msgspec
import pytest
import torch

from coserve.core.sampling import SamplingParams
from coserve.core.types import FinishReason
from coserve.generate.generator import Generator
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.examples import in_turns
from tests.support.executors import eager, graphs
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lengths import OneMoreToken
from tests.support.lora_backends import GROUPED
from tests.support.shelf import Shelf, named

SAMPLING = SamplingParams(max_tokens=6, temperature=0.0)
FAMILIES = ["gemma3n_text", "gemma4_text", "deepseek_v3", "youtu", "glm4_moe_lite"]


def whole(base: Base, weights: LoraWeights | None, tokens: tuple[int, ...]) -> list[int]:
    """Greedy tokens, each by one forward of all before it."""
    found = [*tokens]
    for _ in range(SAMPLING.max_tokens):
        rows = len(found)
        lora = None if weights is None else LoraBatch(Segments((0, rows), (0,)), (weights,), GROUPED)
        with torch.no_grad():
            logits_1V = base.forward(
                torch.tensor(found),
                torch.arange(rows),
                PackedAttention((0, rows)),
                lora=lora,
                keep=torch.tensor([rows - 1]),
            )
        found.append(int(logits_1V[0].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize("family", in_turns(FAMILIES, ["gemma3n_text", "deepseek_v3"], days=3))
@pytest.mark.slow
def test_tokens_are_those_of_whole_forwards(family: str) -> None:
    """Of the base and of adapters in one batch: prompts longer than a step and the window, pages found in the prefix
    cache, sequences that are preempted, and steps as graphs run them."""
    base = wrap_base(tiny_family(family, max_position_embeddings=256), name=family, eos_token_ids=())
    shelf, text = Shelf(named([adapter(base, 1, 3), adapter(base, 2, 5)])), prompt(70)
    cases = [(70, None), (50, None), *((30, ref) for ref in shelf.weights)]
    asked = [request(str(i), text[:length], SAMPLING, ref) for i, (length, ref) in enumerate(cases)]
    weights = {None: None} | shelf.weights
    expected = {one.id: whole(base, weights[one.adapter], one.prompt) for one in asked}
    assert expected["2"] != expected["3"], "an adapter that is left out would not be seen"
    fused = FusedBase(base, compiled=False)
    for ahead, tokens in ((False, 1024), (True, 1024), (True, 80)):
        kv = KvCache.for_base(base, tokens, 4)
        executor = graphs(fused, kv, max_running=4) if ahead else eager(base, kv)
        lengths = OneMoreToken()
        gen = Generator(base, shelf.store(), kv, executor, max_running=4, step_tokens=48, lengths=lengths)
        first = asked[:2] if ahead else asked  # without adapters, whose kernels need a GPU
        again = [msgspec.structs.replace(one, id=f"again {one.id}") for one in first]
        assert collect(gen, first) == {one.id: (expected[one.id], FinishReason.LENGTH) for one in first}
        assert bool(gen.scheduler.preemptions) == (tokens < 1024)
        for one, before in zip(again, first, strict=True):
            assert collect(gen, [one])[one.id][0] == expected[before.id]
