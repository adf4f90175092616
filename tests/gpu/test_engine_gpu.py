"""Generation and fine-tuning as the engine runs them, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.core.link.jobs import JobSucceeded
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.generation import adapter, prompt
from tests.support.gpu_engine import NEW, gpu_base, request, texts
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, REFERENCE, SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import FAMILIES, VOCAB, tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = (3, 17, 40, 1, 5, 23)
RANKS = (4, 1, 16, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str) -> None:
    """Together, in chunks of 7 tokens, and in a pool too small for all."""
    model = tiny_model(family).cuda()
    expected = {}
    for length in LENGTHS:
        ids = torch.tensor([prompt(length)], device="cuda")
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected[str(length)] = out[0, length:].tolist()
    base = gpu_base(model)
    requests = [request(str(length), prompt(length)) for length in LENGTHS]
    assert texts(base, requests) == expected
    assert texts(base, requests, step_tokens=7) == expected
    assert texts(base, requests, kv_tokens=64) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2"])
def test_ways_agree_on_mixed_adapters(family: str) -> None:
    base = gpu_base(tiny_model(family))
    refs = [AdapterRef(f"a{i}", 1) for i in range(len(RANKS))]
    shelf = Shelf({ref: adapter(base, i, rank) for i, (ref, rank) in enumerate(zip(refs, RANKS, strict=True))})
    chosen = [None, refs[0], refs[1], refs[2], refs[0], refs[3]]
    requests = [request(str(n), prompt(n), ref) for n, ref in zip(LENGTHS, chosen, strict=True)]
    found = {
        lora_backend: texts(base, requests, shelf, lora_backend=lora_backend) for lora_backend in (GROUPED, SEGMENTED)
    }
    assert found[SEGMENTED] == found[GROUPED]
    plain = texts(base, requests[:1])
    assert found[SEGMENTED][str(LENGTHS[0])] == plain[str(LENGTHS[0])]


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2"])
def test_ways_give_the_same_logits(family: str) -> None:
    """Those of `block_sparse` to TF32's precision, with which stk multiplies fp32."""
    base = gpu_base(tiny_model(family))
    adapters = tuple(adapter(base, i, rank) for i, rank in enumerate(RANKS))
    bounds, tokens = (0, 5, 6, 40, 60, 61, 80), torch.arange(80, device="cuda")
    positions = torch.cat([torch.arange(b - a, device="cuda") for a, b in pairwise(bounds)])

    def logits(lora_backend: LoraBackend) -> Tensor:
        batch = LoraBatch(Segments(bounds, (0, 1, 2, -1, 3, 0)), adapters, lora_backend)
        with torch.no_grad():
            return base.forward(tokens, positions, PackedAttention(bounds), lora=batch, keep=None)

    expected = logits(REFERENCE)
    for lora_backend, tolerance in ((GROUPED, 1e-4), (SEGMENTED, 1e-4), (BLOCK_SPARSE, 2e-2)):
        assert (logits(lora_backend) - expected).norm() <= tolerance * expected.norm(), lora_backend


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_graphed_texts_are_the_models(family: str) -> None:
    """Compiled, captured and a step ahead: with adapters beside, padded to a bucket, in chunks, preempted."""
    base = gpu_base(tiny_model(family))
    refs = [AdapterRef(f"a{i}", 1) for i in range(len(RANKS))]
    shelf = Shelf({ref: adapter(base, i, rank) for i, (ref, rank) in enumerate(zip(refs, RANKS, strict=True))})
    drawn = SamplingParams(max_tokens=NEW, temperature=1.3, top_k=30, top_p=0.95, ignore_eos=True, seed=1)
    stopped = SamplingParams(max_tokens=NEW, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 2)))
    odd = SamplingParams(
        max_tokens=NEW,
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        min_tokens=5,
        logit_bias={7: 2.0},
        stop_token_ids=tuple(range(0, VOCAB, 3)),
        logprobs=3,
        seed=2,
    )
    bare = [request(f"bare{n}", prompt(n), None) for n in LENGTHS]
    others = [request("drawn", prompt(9), None, drawn), request("stopped", prompt(8), None, stopped)]
    others.append(request("odd", prompt(11), None, odd))
    chosen = [refs[0], refs[1], refs[2], refs[0], refs[3]]
    adapted = [request(f"with{i}", prompt(4 + 3 * i), ref) for i, ref in enumerate(chosen)]
    expected = texts(base, [*bare, *others, *adapted], shelf, lora_backend=GROUPED)
    fused = FusedBase(base)
    for changes in ({}, {"step_tokens": 9}, {"kv_tokens": 96}, {"prefix_cache": False}):
        assert texts(base, [*bare, *others, *adapted], shelf, fused=fused, **changes) == expected, changes
    assert texts(base, bare, fused=fused) == {one.id: expected[one.id] for one in bare}
    for one in (*bare[:2], *others):
        assert texts(base, [one], fused=fused)[one.id] == expected[one.id]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_jobs_learn_alike_in_both_ways(tmp_path: Path, recompute: bool) -> None:
    corpus, losses = random_corpus(lengths=(40, 9, 64, 12, 30, 50)), {}
    for lora_backend in (GROUPED, SEGMENTED):
        base = gpu_base(tiny_model("llama"))
        bench = Bench(base, tmp_path / lora_backend.name, recompute=recompute, lora_backend=lora_backend)
        spec = bench.place(corpus, job_spec(corpus, steps=20, batch_tokens=128, micro_batch_tokens=64))
        messages = bench.train(spec)
        assert isinstance(messages[-1], JobSucceeded)
        losses[lora_backend] = [metrics.loss for metrics in metrics_of(messages)]
    assert losses[SEGMENTED][-1] < losses[SEGMENTED][0] - 0.3
    assert losses[SEGMENTED] == pytest.approx(losses[GROUPED], rel=2e-2)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_job_learns_in_bfloat16(tmp_path: Path, stacked: bool) -> None:
    """`stacked`: through the weights of shared inputs, as beside a compiled base."""
    corpus, base = random_corpus(lengths=(40, 9, 64, 12, 30, 50)), gpu_base(tiny_model("llama"), torch.bfloat16)
    if stacked:
        FusedBase(base, compiled=False)
    bench = Bench(base, tmp_path, lora_backend=SEGMENTED)
    messages = bench.train(bench.place(corpus, job_spec(corpus, steps=20, batch_tokens=128, micro_batch_tokens=64)))
    losses = [metrics.loss for metrics in metrics_of(messages)]
    assert losses[-1] < losses[0] - 0.3


def test_the_bundled_base_serves_in_bfloat16() -> None:
    base = load_base("bundled", device="cuda", dtype="auto")
    assert base.dtype is torch.bfloat16
    shelf = Shelf({AdapterRef("a", 1): adapter(base, 1, 8)})
    asked = SamplingParams(max_tokens=NEW, temperature=0.8, top_p=0.9, ignore_eos=True)
    requests = [
        request("greedy", prompt(20)),
        request("sampled", prompt(30), sampling=asked),
        request("adapted", prompt(25), AdapterRef("a", 1)),
    ]
    found = texts(base, requests, shelf)
    assert {id: len(tokens) for id, tokens in found.items()} == {"greedy": NEW, "sampled": NEW, "adapted": NEW}
    exact = texts(load_base("bundled", device="cuda", dtype="float32"), requests[:1])
    assert found["greedy"][0] == exact["greedy"][0]
