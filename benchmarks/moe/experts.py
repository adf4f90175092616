"""Adapters of experts on one GPU, at Qwen3-30B-A3B's shape (or gpt-oss-20b's) with random weights: decode beside the
base alone, and training beside PEFT's.

    python -m benchmarks.moe.experts --out benchmarks/results [--only kernels,serve,train] [--layers 24]
    python -m benchmarks.moe.experts --base gpt-oss-20b --only serve,train --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.moe.experts --tiny --out /tmp/tried

`serve`: 1 to 256 requests at once without adapters, all of one adapter, and uniformly of 32, through the engine with
compiled layers and CUDA graphs. Adapters have rank 16 at every expert's gate and up, and down. The ceiling adds to the
base's time that of reading each (adapter, expert) pair that tokens choose once, at `--bandwidth`. `train`: optimizer
steps of one such adapter on 8 rows of 512 tokens, ours and PEFT's (`target_parameters`), one after the other in one
process. `kernels`: the terms' kernels alone (`kernels.py`). A part that fails leaves its error in the result.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from benchmarks.common.llama import random_model
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.common.timing import steps_tok_s
from benchmarks.ets.figure_5_1_trainer import random_corpus
from benchmarks.finetuning.with_peft import optimizer_step, plain_loss
from benchmarks.moe.kernels import measure_kernels
from benchmarks.serving.case import SEED, Bench, Load, Shape
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.workloads.provisioning import MoeShape
from tests.support.finetuning import pack_rows

FULL = Shape(24, 2048, 6144, 32, 4, 151936, 8192, "cuda", 256, 8192, 560_000)
TINY = Shape(2, 32, 48, 4, 2, 256, 256, "cpu", 4, 32, 4096)
MOE = MoeShape(24, 2048, 768, 128, 8)
GPT_OSS = Shape(24, 2880, 2880, 64, 8, 201088, 8192, "cuda", 256, 8192, 560_000)
GPT_OSS_MOE = MoeShape(24, 2880, 2880, 32, 4)
TINY_MOE = MoeShape(2, 32, 16, 4, 2)
RANK, ADAPTERS, REPEATS = 16, 32, 3
TRAINED_LAYERS = 8
"""Layers of the base that is trained: PEFT's forward keeps whole adapted weights."""
BOTH = ("experts.gate_up_proj", "experts.down_proj")


BASES = {"qwen3-30b-a3b": (FULL, MOE), "gpt-oss-20b": (GPT_OSS, GPT_OSS_MOE)}


def make_model(shape: Shape, moe: MoeShape, base: str) -> PreTrainedModel:
    """`base`: one of `BASES`, whose family the model is of."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_experts_per_tok": moe.chosen,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
    }
    on_gpu = shape.device == "cuda"
    if base == "gpt-oss-20b":
        config: PretrainedConfig = GptOssConfig(
            num_local_experts=moe.experts, intermediate_size=moe.inner, head_dim=64 if on_gpu else 8, **common
        )
    else:
        config = Qwen3MoeConfig(
            num_experts=moe.experts,
            intermediate_size=shape.inner,
            moe_intermediate_size=moe.inner,
            head_dim=128 if on_gpu else 8,
            norm_topk_prob=True,
            **common,
        )
    return random_model(config, shape.device, SEED)


def make_adapter(base: Base, seed: int, dtype: torch.dtype | None = None) -> LoraWeights:
    g = torch.Generator(base.device).manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        found = torch.randn(rows, columns, generator=g, device=base.device, dtype=base.dtype) * 0.02
        return found if dtype is None else found.to(dtype)

    sites = {
        name: LoraPair(
            draw(site.experts * RANK, site.in_features),
            draw(site.experts * site.out_features, RANK),
            1.0,
            experts=site.experts,
        )
        for name, site in base.spec.experts.items()
    }
    return LoraWeights(LoraSettings(r=RANK, alpha=RANK, target_parameters=BOTH), sites)


class Adapted(Bench):
    """An engine whose adapters are of experts."""

    def publish(self, family: str) -> None:
        """See `Bench`."""
        for i in range(ADAPTERS if self.shape.device == "cuda" else 2):
            ref = AdapterRef(f"{family}{i}", 1)
            self._made[ref] = self.store.host_copy(make_adapter(self.base, i))
            self.store.publish(ref, self._made[ref])


async def serve(bench: Adapted, results: Results, moe: MoeShape, bandwidth: float, *, prefix: str, tiny: bool) -> None:
    """Output tokens a second, and from them retention and the share of the ceiling. `prefix`: of the keys; targets are
    for Qwen3's."""
    pair_bytes = moe.adapter_bytes(RANK) / moe.experts
    async with bench.serving():
        for sequences in (1, 3) if tiny else (64, 1, 8, 128, 256):
            speeds = dict[int, float]()
            for adapters in (0, 1, 2 if tiny else ADAPTERS):
                load = Load(sequences, 8, 3 if tiny else 128, min(adapters, sequences))
                found = await bench.speeds(load, f"{sequences}/{adapters}", REPEATS, warm=0 if tiny else 6)
                speeds[adapters] = statistics.median(found)
                key = f"{prefix}decode_tok_s.b{sequences}.a{adapters}"
                results.put(key, round(speeds[adapters], 1), "output tok/s", None, [round(one, 1) for one in found])
                if adapters:
                    kept = round(speeds[adapters] / speeds[0], 4)
                    target = Target(0.93) if (prefix, sequences, adapters) == ("moe.", 64, 1) else None
                    name = f"{prefix}retention.b{sequences}" + ("" if adapters == 1 else f".a{adapters}")
                    results.put(name, kept, "fraction", target)
                if adapters > 1:
                    used = min(adapters, sequences)
                    read = moe.active_pairs([1 / used] * used, sequences) * pair_bytes
                    least = sequences / speeds[0] + read / bandwidth
                    share = round(speeds[adapters] * least / sequences, 4)
                    target = Target(0.85) if prefix == "moe." and sequences >= 64 else None
                    about = {"pair_bytes": round(read), "base_seconds": round(sequences / speeds[0], 6)}
                    results.put(f"{prefix}of_ceiling.b{sequences}", share, "fraction", target, about=about)


def ours(shape: Shape, moe: MoeShape, base_name: str, rows: int, length: int) -> Callable[[int], int]:
    """One optimizer step of the daemon's own parts."""
    base = wrap_base(make_model(shape, moe, base_name), name=f"{base_name}-random")
    training = TrainingSettings()
    optimizer = AdapterOptimizer(make_adapter(base, 0, torch.float32), base.spec, training, base.dtype, base.device)
    runner = MicroBatchRunner(base, recompute=False)
    packed = pack_rows(random_corpus(shape.vocab, rows, length, 0), [*range(rows)], base.device)
    backend = make_backend("grouped" if shape.device == "cpu" else "segmented")

    def step(run: int) -> int:
        lora = LoraBatch(Segments((0, packed.tokens), (0,)), (optimizer.weights(),), backend)
        optimizer.zero_grad()
        run_to_end(runner.forward_backward(packed, lora, optimizer.trainable, optimizer.grads))
        optimizer.step(targets=packed.targets, learning_rate=1e-4)
        return packed.tokens

    return step


def peft(shape: Shape, moe: MoeShape, base_name: str, rows: int, length: int) -> Callable[[int], int]:
    """One optimizer step of PEFT's adapter."""
    settings = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=list(BOTH))
    model: Any = get_peft_model(make_model(shape, moe, base_name), settings).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, weight_decay=0.0, fused=shape.device == "cuda")
    corpus = random_corpus(shape.vocab, rows, length, 0)
    ids_BL = torch.from_numpy(corpus.tokens.reshape(rows, length)).long().to(shape.device)

    def step(run: int) -> int:
        optimizer_step(plain_loss(model, ids_BL), optimizer)
        return ids_BL.numel()

    return step


def train(shape: Shape, moe: MoeShape, base: str, results: Results, *, prefix: str, tiny: bool) -> None:
    """Tokens a second of both."""
    rows, length = (2, 8) if tiny else (8, 512)
    speeds = dict[str, float]()
    for name, make in (("ours", ours), ("peft", peft)):
        step = make(shape, moe, base, rows, length)
        found = steps_tok_s(step, shape.device, REPEATS)
        speeds[name] = statistics.median(found)
        each = [round(one, 1) for one in found]
        results.put(f"{prefix}ft_tok_s.{name}", round(speeds[name], 1), "tok/s", None, each, {"layers": shape.layers})
        del step
        gc.collect()
        torch.cuda.empty_cache()
    results.put(
        f"{prefix}ft_vs_peft", round(speeds["ours"] / speeds["peft"], 3), "x", Target(1.3) if prefix == "moe." else None
    )


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    add_names(parser, "--only", ("kernels", "serve", "train"))
    parser.add_argument("--base", choices=[*BASES], default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=FULL.layers, help="of the base that serves; Qwen3's has 48")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second of the GPU's memory")
    options = parser.parse_args()
    tiny, base_name = options.tiny, options.base
    shape, moe = (TINY, TINY_MOE) if tiny else BASES[base_name]
    if not tiny:
        shape, moe = replace(shape, layers=options.layers), replace(moe, layers=options.layers)
    gpt_oss = base_name == "gpt-oss-20b"
    prefix = "moe.gpt_oss." if gpt_oss else "moe."
    results = Results.of(
        options,
        "moe_gpt_oss.json" if gpt_oss else "moe.json",
        __file__,
        vars(shape) | vars(moe) | {"base": base_name, "rank": RANK, "bandwidth": options.bandwidth},
        seed=SEED,
    )

    def served() -> None:
        base = wrap_base(make_model(shape, moe, base_name), name=f"{base_name}-random")
        bench = Adapted(base, shape, kv=KvCache.for_base(base, shape.kv_tokens, 16))
        bench.publish("a")
        asyncio.run(serve(bench, results, moe, options.bandwidth, prefix=prefix, tiny=tiny))

    def trained() -> None:
        few = shape if tiny else replace(shape, layers=TRAINED_LAYERS)
        train(few, moe, base_name, results, prefix=prefix, tiny=tiny)

    def timed() -> None:
        measure_kernels(results, moe, RANK, options.bandwidth, torch.device(shape.device), tiny=tiny)

    for part, run in (("kernels", timed), ("train", trained), ("serve", served)):
        if part not in options.only or (gpt_oss and part == "kernels"):
            continue
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the other part is still to run
            traceback.print_exc()
            results.put(f"{prefix}failed.{part}", 1, "failures", None, about={"error": f"{error!r}"[:500]})
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
