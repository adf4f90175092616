"""Long prompt chunks over a cache of latents on a GPU, with DeepSeek-V2-Lite's heads. Run with `pytest -m gpu`."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from coserve.core.types import LoraSettings
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.slot_lora import slot_lora
from coserve.kernels.attention.expanded import StepTerms
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.memory.buffer import cache_dtype
from coserve.memory.kv import KvCache
from coserve.memory.plan import Work
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.families import tiny_family
from tests.support.gpu_engine import gpu_base
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import named
from tests.support.tiny_models import VOCAB

pytestmark = pytest.mark.gpu

PAGE, CONTEXT = 16, 4096
STEPS = ((700, 520, 30, 0, 512), (1, 600, 40, 900, 1), (513, 1, 520, 33, 1))
BATCH = (1, -1, 0, 0, -1)


def latent_base(dtype: torch.dtype = torch.bfloat16) -> Base:
    """The same weights in each dtype."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    others = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 64}
    model = tiny_family("minicpm3", max_position_embeddings=CONTEXT, **sizes, **others)
    return gpu_base(model.bfloat16(), dtype)


def adapters(base: Base) -> list[LoraWeights]:
    """Of all linear modules of attention; the second one is DoRA."""
    found, g = [], torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * 0.1).bfloat16().to(base.device, base.dtype)

    for rank, dora in ((3, False), (17, True)):
        sites = {
            name: LoraPair(
                draw(rank, site.in_features),
                draw(site.out_features, rank),
                0.7,
                scale_O=1 + draw(site.out_features).float() if dora else None,
            )
            for name, site in base.spec.sites.items()
            if "self_attn" in name
        }
        found.append(LoraWeights(LoraSettings(r=rank, use_dora=dora), sites))
    return found


def logits(fused: FusedBase, kv_cache_dtype: str, *, expands: bool) -> Tensor:
    """Of all rows of `STEPS`: decodes, new prompts, continued ones and short chunks."""
    base, g = fused.base, torch.Generator().manual_seed(0)
    slots = AdapterSlots(fused.groups, 2, base.device, fused.exchanges, base.sites.biases)
    placed = slots.place(named(adapters(base)))
    shapes = [shape._replace(expanded=shape.expanded * expands) for shape in base.kv_shapes]
    dtype = cache_dtype(kv_cache_dtype, base.dtype, base.device)
    kv = KvCache(shapes, pages=512, page_tokens=PAGE, dtype=dtype, device=base.device)
    pages = [tuple(kv.allocate(kv.pages_for(sum(own))) or ()) for own in zip(*STEPS, strict=True)]
    at, found = [0] * len(pages), []
    for step in STEPS:
        runs = [TokenRun(tokens, at[i], pages[i]) for i, tokens in enumerate(step) if tokens]
        assert kv.expands(runs) == expands
        tokens_T = torch.randint(3, VOCAB, (sum(step),), generator=g).to(base.device)
        positions = [torch.arange(one.position, one.position + one.tokens) for one in runs]
        segments = Segments((0, *accumulate(step)), tuple(-1 if own < 0 else placed[own] for own in BATCH))
        terms, lora = StepTerms(segments, partial(slot_lora, slots)), slot_lora(slots, segments)
        attention = kv.attention(runs, terms)
        found.append(fused.forward(tokens_T, torch.cat(positions).to(base.device), attention, lora=lora, keep=None))
        at = [before + tokens for before, tokens in zip(at, step, strict=True)]
    return torch.cat(found).float()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_rows_of_mixed_steps_are_as_exact_as_absorbed_ones(kv_cache_dtype: str) -> None:
    """Compiled layers too."""
    fused = FusedBase(latent_base(), compiled=kv_cache_dtype == "auto")
    exact = logits(FusedBase(latent_base(torch.float32), compiled=False), kv_cache_dtype, expands=False)
    assert all(shape.expanded for shape in fused.base.kv_shapes)
    got, absorbed = (
        ((logits(fused, kv_cache_dtype, expands=one) - exact).norm(dim=1) / exact.norm(dim=1)).mean()
        for one in (True, False)
    )
    assert absorbed < 0.2
    assert got < 1.2 * absorbed


def test_the_memory_plan_covers_the_longest_contexts() -> None:
    base = latent_base()
    given = Conditions(SEGMENTED, recompute=False, max_running=4, page_tokens=PAGE, work=Work(1024, 512, 1))
    meter = CudaMemoryMeter(base.device)
    planned = MemoryProfiler(base, meter, given).step(1024)
    fused = FusedBase(base, compiled=False)
    kv = KvCache.for_base(base, 2 * CONTEXT, PAGE)
    runs = [TokenRun(512, CONTEXT - 512, tuple(kv.allocate(CONTEXT // PAGE) or ())) for _ in range(2)]
    assert kv.expands(runs)
    tokens_T = torch.full((1024,), 3, device="cuda")
    positions_T, keep = torch.arange(1024, device="cuda") + CONTEXT - 1024, torch.zeros(2, dtype=torch.long).cuda()
    for _ in range(2):  # the first one allocates workspaces
        meter.reset()
        before = meter.now()
        fused.forward(tokens_T, positions_T, kv.attention(runs), lora=None, keep=keep)
        peak = meter.peak() - before
    assert peak > 2 * CONTEXT * base.kv_shapes[0].expanded, "contexts were expanded"
    assert planned >= peak
