"""Multi-head latent attention on one GPU: a cache of latents beside one of all heads' keys and values.

    python -m benchmarks.models.latents --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.models.latents --tiny --out /tmp/tried

The attention is DeepSeek-V2-Lite's (16 heads, latents of 512 and 64), its feed-forward layers are dense; 27 layers,
random weights in bfloat16. Both values of `--mla-cache` run through the engine with compiled layers and CUDA graphs,
one after the other; a row's value is that of latents, and `heads` the other's.

`decode_tok_s.b64`, `.b64.a32`   64 sequences of 16 and 256 tokens, without adapters and with 32 at every linear module
`decode_tok_s.b32.8k`            32 sequences behind prompts of 8,192 tokens, 128 each; the prompts' time is not counted
`prompt_tok_s`                   8 prompts of 4,096 tokens
`prompt_tok_s.16k`               2 prompts of 16,000 tokens, in steps of 4,096: most continue a context
"""

from __future__ import annotations

import asyncio
import gc
import statistics
from dataclasses import replace

import torch
from transformers import MiniCPM3Config

from benchmarks.common.llama import random_model
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results
from benchmarks.serving.case import ADAPTERS, SEED, Bench, Load, Shape
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base

FULL = Shape(27, 2048, 10944, 16, 16, 102400, 16384, "cuda", 64, 4096, 300_000)
TINY = Shape(2, 32, 48, 4, 4, 512, 256, "cpu", 4, 32, 4096)
PAGE_TOKENS = 16
REPEATS = 3
WAYS = ("heads", "latents")


def make_base(shape: Shape, way: str) -> Base:
    tiny = shape.device == "cpu"
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = MiniCPM3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        q_lora_rank=24 if tiny else 1536,
        **(sizes if tiny else dict(zip(sizes, (512, 128, 64, 128), strict=True))),
    )
    return wrap_base(random_model(config, shape.device, SEED), name=f"mla-random-{way}", mla_cache=way)


LOADS = {
    "decode_tok_s.b64": Load(64, 16, 256),
    "decode_tok_s.b64.a32": Load(64, 16, 256, ADAPTERS),
    "decode_tok_s.b32.8k": Load(32, 8192, 128),
    "prompt_tok_s": Load(8, 4096, 1),
    "prompt_tok_s.16k": Load(2, 16_000, 1),
}


def small(load: Load) -> Load:
    return replace(load, requests=2, prompt=min(load.prompt, 12), output=4)


async def measure(bench: Bench, loads: dict[str, Load], found: dict[str, list[float]]) -> None:
    """Add each load's tokens a second."""
    async with bench.serving():
        for key, load in loads.items():
            if load.prompt > load.output > 1:  # decodes alone: less the time of the same prompts
                prompts = await bench.speeds(replace(load, output=1), f"prompts of {key}", REPEATS)
                seconds = load.requests / statistics.median(prompts)
                whole = await bench.speeds(load, key, REPEATS)
                tokens = load.requests * load.output
                found[key] = [(tokens - load.requests) / (tokens / one - seconds) for one in whole]
            else:
                speeds = await bench.speeds(load, key, REPEATS)
                found[key] = [one * load.prompt for one in speeds] if load.output == 1 else speeds


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    add_names(parser, "--only", LOADS, what="loads")
    options = parser.parse_args()
    loads = {key: small(LOADS[key]) if options.tiny else LOADS[key] for key in options.only}
    shape = TINY if options.tiny else FULL
    results = Results.of(options, "latents.json", __file__, vars(shape), seed=SEED)
    found: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    for way in WAYS:
        base = make_base(shape, way)
        kv = KvCache.for_base(base, shape.kv_tokens, PAGE_TOKENS, sequences=shape.max_running)
        sizes[way] = kv.buffer.page_bytes // PAGE_TOKENS
        bench = Bench(base, shape, kv=kv)
        bench.publish("a")
        print(f"{way}: {sizes[way]} bytes a token, compiled and captured in {bench.capture():.1f} s", flush=True)
        asyncio.run(measure(bench, loads, found.setdefault(way, {})))
        print(way, found[way], flush=True)
        del base, kv, bench
        gc.collect()
        if shape.device == "cuda":
            torch.cuda.empty_cache()
    for key in found["latents"]:
        heads, latents = (found[way][key] for way in WAYS)
        about = {"heads": round(statistics.median(heads), 1), "heads_runs": heads, "kv_bytes_a_token": sizes}
        results.put(f"models.latents.{key}", round(statistics.median(latents), 1), "tok/s", None, latents, about)


if __name__ == "__main__":
    main()
