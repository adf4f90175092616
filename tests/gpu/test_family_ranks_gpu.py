"""Families whose layers differ, or keep a recurrent state, on two GPUs: compiled, in CUDA graphs and over NCCL, the
tokens and the gradients of one process on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution.start import make_start
from coserve.generate.generator import Generator
from coserve.kernels.attention.packed import PackedAttention
from coserve.memory.kv import KvCache
from coserve.model.load import load_base
from coserve.model.parallel.mesh import Mesh
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.ranks import Ranks
from tests.support.shelf import Shelf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

FAMILIES = (
    *("qwen3_5_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba", "lfm2"),
    *("gemma4_text", "llama4_text", "mimo_v2_flash", "opt"),
)
REF = AdapterRef("a", 1)


def generate(mesh: Mesh | None, folder: str) -> tuple[list[dict[str, list[int]]], torch.Tensor]:
    """Each request's tokens, twice (graphs are captured meanwhile), and the logits of a packed batch."""
    device = "cpu" if mesh is None else "cuda"
    base = load_base(folder, device=device, dtype="float32", mesh=mesh, strategy="slora")
    shelf = Shelf({REF: base.shard(adapter(base, 1, 4))})
    logits = base.forward(
        torch.tensor([*prompt(9), *prompt(4)], device=base.device),
        torch.tensor([*range(9), *range(4)], device=base.device),
        PackedAttention((0, 9, 13)),
        lora=None,
        keep=None,
    )
    kv = KvCache.for_base(base, 8192, 16, sequences=4)
    backend = GROUPED if mesh is None else SEGMENTED
    executor = make_start(base, kv, max_running=4, lora_backend=backend, compile=True).executor
    generator = Generator(base, shelf.store(), kv, executor, max_running=4, step_tokens=48)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    said = []
    for _ in range(2):
        asked = [request(str(i), prompt(3 + 17 * i, i), greedy, REF if i % 2 else None) for i in range(4)]
        said.append({id: tokens for id, (tokens, _) in collect(generator, asked).items()})
    return said, logits.detach().float().cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_two_gpus_give_the_tokens_of_one_process(two: Ranks, family: str, tmp_path: Path) -> None:
    tiny_family(family, max_position_embeddings=128).save_pretrained(tmp_path)
    expected, logits = generate(None, str(tmp_path))
    for found, own in two.run(generate, str(tmp_path)):
        torch.testing.assert_close(own, logits, rtol=1e-3, atol=1e-3)
        assert found == expected
