"""Fully sharded adapters on two GPUs, in CUDA graphs: the tokens of eager steps and of one GPU, alone and beside
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepExecutor, StepInput
from coserve.generate.sampling.choices import Choice
from coserve.generate.sampling.rows import SamplingRow
from coserve.kernels.attention.interface import TokenRun
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice
from coserve.model.load import load_base
from coserve.model.lora import LoraWeights
from coserve.model.parallel.mesh import Mesh
from tests.support import sharded
from tests.support.executors import eager, graphs
from tests.support.lora_backends import SEGMENTED
from tests.support.ranks import Ranks
from tests.support.sharded import KINDS, Kind, whole_adapter
from tests.support.tiny_models import VOCAB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ADAPTERS = (*KINDS, Kind(48))
"""The second is block-diagonal, the rank of the fourth is odd: both are local. The third has more blocks than there are
GPUs."""
CASES: dict[str, list[tuple[int, int]]] = {
    "one row": [(4, 5)],
    "fully sharded": [(0, 5), (4, 9), (0, 70)],
    "mixed": [(1, 5), (0, 9), (BASE_ONLY, 4), (3, 7), (4, 6), (2, 8)],
    "long": [(0, 1500), (4, 20)],
}
"""Adapter and length of the prompts. Intermediates of the last one's are too long for a one-shot all-reduce."""
NEW = 6
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

Found = dict[str, list[list[int]]]
"""Tokens by case and sequence."""


def test_graphs_have_the_tokens_of_eager_steps_and_of_one_gpu(two: Ranks, tmp_path: Path) -> None:
    folder = sharded.save_base(tmp_path, hidden_size=1536, max_position_embeddings=2048)
    expected = eager_tokens(None, folder)
    for eager_found, graph_found in two.run(both_tokens, folder):
        assert eager_found == expected
        for found in graph_found:
            assert found == expected


def both_tokens(mesh: Mesh, folder: str) -> tuple[Found, list[Found]]:
    """By eager steps, and by graphs, which steps of a kind have from the second on; also with the GEMV for one row."""
    found = list[Found]()
    for gemv in (False, True):
        base = load_base(folder, device="cuda", dtype="float32", mesh=mesh, strategy="slora")
        fused = FusedBase(base, compiled=not gemv)
        if gemv:
            kinds = [(own.weight.shape[1], *own.sizes) for own in fused.stacked]
            fused.gemms = GemmChoice(gemv=dict.fromkeys(kinds, (4, 4)))
        kv = KvCache.for_base(base, 4096, 16)
        executor = graphs(fused, kv, SEGMENTED, max_running=8, step_tokens=1536)
        found += [tokens_of_cases(base, kv, executor), tokens_of_cases(base, kv, executor)]
    return eager_tokens(mesh, folder), found


def eager_tokens(mesh: Mesh | None, folder: str) -> Found:
    base = load_base(folder, device="cuda", dtype="float32", mesh=mesh, strategy="slora")
    kv = KvCache.for_base(base, 4096, 16)
    return tokens_of_cases(base, kv, eager(base, kv, SEGMENTED))


def tokens_of_cases(base: Base, kv: KvCache, executor: StepExecutor) -> Found:
    parts = [base.shard(whole_adapter(base.spec, kind)) for kind in ADAPTERS]
    adapters = [(AdapterRef(f"a{i}", 1), moved(part, base)) for i, part in enumerate(parts)]
    found = {name: generate(executor, kv, adapters, prompts) for name, prompts in CASES.items()}
    for ref, _ in adapters:
        executor.evicted(ref)
    return found


def moved(weights: LoraWeights, base: Base) -> LoraWeights:
    pairs = weights.sites.items()
    sites = {n: replace(pair, a_RD=pair.a_RD.to(base.device), b_OR=pair.b_OR.to(base.device)) for n, pair in pairs}
    return LoraWeights(weights.settings, sites)


def generate(
    executor: StepExecutor,
    kv: KvCache,
    adapters: Sequence[tuple[AdapterRef, LoraWeights]],
    prompts: Sequence[tuple[int, int]],
) -> list[list[int]]:
    """One step of all prompts, then steps of a token each."""
    refs, weights = tuple(ref for ref, _ in adapters), [own for _, own in adapters]
    pages = list[list[int]]()
    for _, length in prompts:
        held = kv.allocate(kv.pages_for(length + NEW))
        assert held is not None
        pages.append(list(held))
    tokens = [
        [(31 * number + 7 * place) % (VOCAB - 3) + 3 for place in range(n)] for number, (_, n) in enumerate(prompts)
    ]
    found: list[list[int]] = [[] for _ in prompts]
    positions = [0] * len(prompts)
    for output in range(NEW):
        sequences = []
        for number, (adapter, _) in enumerate(prompts):
            run = TokenRun(len(tokens[number]), positions[number], tuple(pages[number]))
            row = SamplingRow(number, GREEDY, output)
            sequences.append(SequenceInput(number, adapter, tokens[number], run, row, None, False))
            positions[number] += run.tokens
        for step in executor.launch(StepInput(refs, sequences), weights):
            for number, choice in step.collect().sampled:
                assert isinstance(choice, Choice)
                found[number].append(choice.token)
                tokens[number] = [choice.token]
    for number, held in enumerate(pages):
        executor.forget(number)
        kv.free(held)
    return found
