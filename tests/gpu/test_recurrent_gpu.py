"""Layers with a recurrent state on a GPU: compiled, in CUDA graphs and by kernels, against plain torch on the CPU. Run
with `pytest -m gpu`."""

from __future__ import annotations

import pytest

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from coserve.model.fused import FusedBase
from tests.support.executors import eager, graphs
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf

pytestmark = pytest.mark.gpu

REF = AdapterRef("a", 1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "nemotron_h", "falcon_h1", "jamba", "lfm2"])
@pytest.mark.filterwarnings("ignore")
def test_steps_on_a_gpu_give_the_tokens_of_the_cpu(family: str) -> None:
    requests = [request(str(i), prompt(3 + 17 * i, i), GREEDY, REF if i % 2 else None) for i in range(4)]
    long = {"max_position_embeddings": 128}
    base = wrap_base(tiny_family(family, **long), name=family, eos_token_ids=())
    kv = KvCache.for_base(base, 8192, 16, sequences=4)
    store = Shelf({REF: adapter(base, 1, 3)}).store()
    expected = collect(Generator(base, store, kv, eager(base, kv), max_running=4, step_tokens=48), requests)
    base = wrap_base(tiny_family(family, **long).cuda(), name=family, eos_token_ids=())
    kv = KvCache.for_base(base, 8192, 16, sequences=4)
    executor = graphs(FusedBase(base), kv, SEGMENTED, max_running=4)
    store = Shelf({REF: adapter(base, 1, 3)}).store()
    generator = Generator(base, store, kv, executor, max_running=4, step_tokens=48)
    for _ in range(2):  # the second time from snapshots of states
        assert collect(generator, requests) == expected
    assert generator.scheduler.active.prefix_hits == 16 + 32
