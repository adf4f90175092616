"""What quantising costs a small real base: SmolLM2-135M-Instruct in FP8 and NF4, and with an FP8 KV cache, beside the
weights of its file.

    python -m benchmarks.quant.accuracy --out benchmarks/results          (a CPU, about two minutes)

Texts are the guide's pages, in rows of 256 tokens. Each token is predicted by the base and by its quantised forms:
perplexity, the Kullback-Leibler divergence from the base, and how often the most likely token is the same. On a CPU
activations stay as they are, so `fp8` has the numbers of its weights alone, as batches of up to `fp8.FEW_ROWS` rows do
on a GPU. `fp8_rounded` rounds each row of activations too, as FP8 tensor cores make larger ones do.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.quantized import fp8
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.load import load_base

MODEL = "smollm2"
PAGES = ("serve.md", "fine-tune.md", "memory.md", "operate.md")
ROW = 256


def rows(pages: int, each: int) -> list[Tensor]:
    """The first rows of each page."""
    tokenizer = Tokenizer.load(MODEL)
    found = []
    for page in PAGES[:pages]:
        ids = tokenizer.encode((Path("docs/guide") / page).read_text())
        found += [torch.tensor(ids[at : at + ROW]) for at in range(0, each * ROW, ROW)]
    return found


@torch.no_grad()
def predict(base: Base, texts: list[Tensor], kv_cache_dtype: str) -> Tensor:
    """Log-probabilities of every next token, (tokens, vocabulary), by keys and values from pages."""
    found, kv = [], KvCache.for_base(base, ROW, ROW, kv_cache_dtype=kv_cache_dtype)
    for ids_T in texts:
        positions_T, attention = torch.arange(len(ids_T)), kv.attention([TokenRun(len(ids_T), 0, (0,))])
        logits_TV = base.forward(ids_T, positions_T, attention, lora=None, keep=None)
        found.append(logits_TV[:-1].float().log_softmax(-1))
    return torch.cat(found)


def rounded_product(x_TD: Tensor, codes_OD: Tensor, scale_O: Tensor) -> Tensor:
    """`fp8.product` in float32."""
    x_codes_TD, x_scale_T = fp8.quantize(x_TD)
    return fp8.dequantize(x_codes_TD, x_scale_T, x_TD.dtype) @ fp8.dequantize(codes_OD, scale_O, x_TD.dtype).T


def main() -> None:
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2, help="rows of each page")
    parser.add_argument("--pages", type=int, default=len(PAGES))
    options = parser.parse_args()
    texts = rows(options.pages, options.rows)
    targets = torch.cat([ids_T[1:] for ids_T in texts])
    results = Results.of(
        options,
        "quant_accuracy.json",
        __file__,
        {"model": MODEL, "pages": PAGES[: options.pages], "rows": options.rows, "row": ROW},
        hardware=f"CPU, {platform.machine()}",
    )
    expected = Tensor()
    for kind in ("none", "fp8", "fp8_rounded", "nf4", "kv_fp8"):
        weights, cache = ("none", "fp8") if kind == "kv_fp8" else (kind.removesuffix("_rounded"), "auto")
        base = load_base(MODEL, device="cpu", dtype="float32", quantization=weights)
        rounds = kind == "fp8_rounded"
        with patch.object(fp8, "has_tensor_cores", lambda x: rounds), patch.object(fp8, "product", rounded_product):  # noqa: B023
            found = predict(base, texts, cache)
        perplexity = round(float(found.gather(1, targets[:, None]).mean().neg().exp()), 3)
        about: dict[str, object] = {"tokens": len(targets)}
        if kind == "none":
            expected = found
        else:
            about["kl"] = round(float((expected.exp() * (expected - found)).sum(1).mean()), 5)
            about["same_token"] = round(float((found.argmax(1) == expected.argmax(1)).float().mean()), 4)
        results.put(f"quant.perplexity.smollm2.{kind}", perplexity, "perplexity", None, (), about)


if __name__ == "__main__":
    main()
