"""Tokens that ranks choose: those of one process, and what is sent for them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve.core.sampling import SamplingParams
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepInput
from coserve.generate.sampling.rows import SamplingRow
from coserve.kernels.attention.interface import TokenRun
from coserve.memory.kv import KvCache
from coserve.model.parallel.mesh import Mesh
from tests.support import sharded
from tests.support.executors import eager
from tests.support.ranks import Ranks
from tests.support.sharded import load

PAGE = 8
GREEDY = SamplingParams(temperature=0.0)
BATCHES: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (GREEDY,) * 3,
    "drawn": (GREEDY, SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.3, top_k=5, seed=4)),
    "biased": (GREEDY, SamplingParams(temperature=0.0, logit_bias={7: 100.0}), GREEDY),
    "penalised": (SamplingParams(temperature=0.0, repetition_penalty=1.5), GREEDY, GREEDY),
    "logprobs": (GREEDY, SamplingParams(temperature=0.0, logprobs=2), GREEDY),
}


def step_of(batch: str) -> StepInput:
    sequences = []
    for number, params in enumerate(BATCHES[batch]):
        tokens = [3 + number, 9, 17 + number, 5]
        row = SamplingRow(number, params, number, tokens=tokens, prompt_tokens=len(tokens))
        sequences.append(
            SequenceInput(number, BASE_ONLY, tokens, TokenRun(len(tokens), 0, (number,)), row, None, False)
        )
    return StepInput((), sequences)


def choose(mesh: Mesh | None, folder: str) -> dict[str, tuple[list[Any], int]]:
    """By batch: what is chosen, and the bytes of all-gathers."""
    base, found = load(folder, mesh), dict[str, tuple[list[Any], int]]()
    executor = eager(base, KvCache.for_base(base, 4 * PAGE, PAGE))
    for batch in BATCHES:
        if mesh is not None:
            mesh.traffic.clear()
        with torch.no_grad():
            sampled = [pair for one in executor.launch(step_of(batch), []) for pair in one.collect().sampled]
        chosen = [(number, getattr(choice, "token", choice)) for number, choice in sampled]
        found[batch] = chosen, 0 if mesh is None else mesh.traffic.bytes["all_gather"]
    return found


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield sharded.save_base(Path(name))


def test_greedy_rows_send_no_logits_and_all_rows_have_the_tokens_of_one_process(two: Ranks, folder: str) -> None:
    expected = choose(None, folder)
    for found in two.run(choose, folder):
        for batch, (chosen, _) in expected.items():
            assert found[batch][0] == chosen, batch
        assert found["greedy"][1] == 3 * 16
        for batch in BATCHES.keys() - {"greedy"}:
            assert found[batch][1] > 3 * 16, batch
