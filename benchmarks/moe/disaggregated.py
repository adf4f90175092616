"""Serviceable rate of a mixture's adapters: experts' terms computed coupled on all GPUs, or on LoRA servers apart.

    python -m benchmarks.moe.disaggregated --out R               # two GPUs; --gpus 4: on four
    python -m benchmarks.moe.disaggregated --tiny --out /tmp/tried

Qwen3-30B-A3B's shape with random weights, adapters of rank 4 at every expert, popularity a power law of exponent 1.2,
Poisson arrivals. Few adapters have files of their own: the others are links to them. `coupled`: one engine on all GPUs
(`--tp N --ep N`), whose page pool has room for the ratio's share of the adapters beside a batch. `servers`: one engine
on one GPU, with pages for the batch alone, and N - 1 LoRA servers, which hold that share. The rate rises until P95 of
TTFT is above 0.25 s or mean TPOT above 0.1 s, the paper's limits (InfiniLoRA, section 6.1); `infini.rate.*` is the last
that keeps both. `infini.tpot_ratio.*`: TPOT of `servers` over that of `coupled`, at the highest rate that both keep.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.adapters.fleet import get, link, wait_ready
from benchmarks.common.options import check_tiny, make_parser
from benchmarks.common.provenance import gpu_names
from benchmarks.common.results import Results, Target
from benchmarks.serving.http_case import SMALL, model_folder
from benchmarks.serving.http_daemon import LoadProcesses, daemon, import_adapter, soon
from benchmarks.serving.http_load import LoadRequest
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.workloads.arrivals import Arrivals, Process, arrival_times
from coserve.workloads.popularity import Popularity, Shape, shares
from coserve.workloads.provisioning.servers import MoeShape
from coserve.workloads.replay import Sample

RANK, EXPONENT, SEED, REAL, FIRST = 4, 1.2, 7, 2, 1000
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}


@dataclass(frozen=True)
class Case:
    """Sizes of a run. `longest`: tokens of a prompt and of an answer, uniform from 8 on; `batch`: requests that the
    pages have room for; `limits`: P95 of TTFT, and mean TPOT, in seconds."""

    shape: MoeShape
    heads: dict[str, int]
    vocab: int
    device: str
    adapters: int
    ratios: tuple[float, ...]
    rates: tuple[float, ...]
    seconds: float
    longest: int = 256
    batch: int = 64
    limits: tuple[float, float] = (0.25, 0.1)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the base."""
        shape = self.shape
        return self.heads | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": 3 * shape.inner,
            "moe_intermediate_size": shape.inner,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "num_hidden_layers": shape.layers,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    def kv_tokens(self, adapters: float) -> int:
        """Tokens of a page pool with room for a batch and so many whole adapters."""
        heads, width = self.heads["num_key_value_heads"], self.heads["head_dim"]
        token = 2 * self.shape.layers * heads * width * (2 if self.device == "cuda" else 4)
        whole = self.shape.adapter_bytes(RANK) * (1 if self.device == "cuda" else 2)
        return 2 * self.longest * self.batch + math.ceil(adapters * whole / token)


FULL = Case(
    MoeShape(48, 2048, 768, 128, 8), HEADS, 151936, "cuda", 512, (0.1, 0.3, 1.0), (1, 2, 4, 8, 12, 16, 24, 32), 20.0
)
TINY = Case(
    MoeShape(2, 32, 16, 4, 2),
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    8192,
    "cpu",
    8,
    (0.5,),
    (1, 2),
    4.0,
    longest=16,
    batch=8,
    limits=(30.0, 10.0),
)


def write_adapter(folder: Path, shape: MoeShape, seed: int) -> None:
    """A PEFT folder of random pairs at the fused parameters, bf16: rows of A by expert, columns of B by rank."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    parts = {"experts.base_layer": (shape.hidden, 2 * shape.inner), "experts": (shape.inner, shape.hidden)}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in parts.items():
            for kind, size in (("A", (shape.experts * RANK, inputs)), ("B", (outputs, RANK * shape.experts))):
                drawn = torch.randn(size, generator=generator) * 0.02
                tensors[f"base_model.model.model.layers.{layer}.mlp.{name}.lora_{kind}.weight"] = drawn.bfloat16()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    more = {"target_modules": [], "target_parameters": parameters, "bias": "none"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | more))


def make_requests(case: Case, names: Sequence[str], rate: float) -> list[LoadRequest]:
    """Poisson arrivals of `case.seconds`, each adapter's own."""
    chance, found = random.Random(f"{SEED}/{rate}"), list[tuple[float, str]]()
    of_each = shares(Popularity(Shape.POWER_LAW, EXPONENT), len(names))
    for name, share in zip(names, of_each, strict=True):
        arrivals = Arrivals(process=Process.POISSON, rate=rate)
        found += [(at, name) for at in arrival_times(arrivals, case.seconds, chance, share=share)]
    return [
        LoadRequest(
            index=i,
            prompt=[chance.randrange(FIRST, case.vocab) for _ in range(chance.randint(8, case.longest))],
            max_tokens=chance.randint(8, case.longest),
            adapter=name,
            at=at,
        )
        for i, (at, name) in enumerate(sorted(found))
    ]


def latencies(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return P95 of TTFT, where a request without an answer counts as infinite, and mean TPOT, in seconds."""
    waits = sorted(each.times[0] - each.due if each.times else math.inf for each in samples)
    pauses = [(each.times[-1] - each.times[0]) / (each.tokens - 1) for each in samples if each.tokens > 1]
    return waits[min(len(waits) - 1, int(0.95 * len(waits)))], statistics.fmean(pauses) if pauses else math.inf


def measure(case: Case, system: str, ratio: float, gpus: int, results: Results) -> dict[float, float]:
    """Raise the rate until a limit is missed; return TPOT by each rate that keeps both."""
    kept = dict[float, float]()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = model_folder(root / "model", dataclasses.replace(SMALL, config=case.config))
        held = ratio * case.adapters
        settings = {"model": model, "data_dir": root / "data", "data_root": root, "device": case.device}
        settings |= {"load_format": "dummy", "shed": "off", "policy": "slack", "max_running": case.batch}
        if system == "servers":
            whole = case.shape.adapter_bytes(RANK) * (1 if case.device == "cuda" else 2)
            settings |= {"lora_server": max(1, gpus - 1), "host_adapter_bytes": math.ceil(held * whole)}
        elif gpus > 1:
            settings |= {"tp": gpus, "ep": gpus}
        settings["kv_tokens"] = case.kv_tokens(0 if system == "servers" else held)
        with daemon(settings, root / "log.txt") as url:
            wait_ready(url)
            for seed in range(REAL):
                write_adapter(root / f"real{seed}", case.shape, seed)
                import_adapter(url, f"real{seed}")
            names = [f"a{i:04d}" for i in range(case.adapters)]
            link(root / "data", [f"real{seed}" for seed in range(REAL)], names)
            end = case.seconds + case.limits[0] + case.limits[1] * case.longest
            warm = make_requests(case, names, case.rates[0])
            LoadProcesses(2).run(url, warm, start=soon(), until=end)  # the first steps load their kernels
            for rate in case.rates:
                requests = make_requests(case, names, rate)
                samples = LoadProcesses(2).run(url, requests, start=soon(), until=end)
                ttft, tpot = latencies(samples)
                errors = sorted({each.error for each in samples if each.error is not None})
                health = json.loads(get(f"{url}/health"))
                about = {"tpot_ms": round(1e3 * tpot, 2), "requests": len(samples), "errors": errors}
                about |= {name: health[name] for name in ("adapters_resident", "lora_servers", "notes")}
                key = f"infini.ttft_p95_ms.{system}.r{ratio}.at{rate}"
                results.put(key, round(1e3 * min(ttft, end), 1), "ms", None, about=about)
                if ttft > case.limits[0] or tpot > case.limits[1]:
                    break
                kept[rate] = tpot
    results.put(f"infini.rate.{system}.r{ratio}", max(kept, default=0.0), "requests/s", None)
    return kept


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base on the CPU, one engine against an engine and one server")
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4))
    parser.add_argument("--adapters", type=int, help=f"default {FULL.adapters}, of 0.3 GB each")
    parser.add_argument("--ratios", help="shares of the adapters that have room, separated by commas")
    parser.add_argument("--rates", help="requests a second, rising, separated by commas")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds after which no daemon is started")
    options = parser.parse_args()
    check_tiny(parser, options)
    case, began = (TINY if options.tiny else FULL), time.monotonic()
    case = dataclasses.replace(
        case,
        adapters=options.adapters or case.adapters,
        ratios=tuple(map(float, options.ratios.split(","))) if options.ratios else case.ratios,
        rates=tuple(map(float, options.rates.split(","))) if options.rates else case.rates,
    )
    gpus = 1 if options.tiny else options.gpus
    results = Results.of(
        options,
        f"disaggregated_{options.gpus}.json",
        script="benchmarks.moe.disaggregated",
        hardware=gpu_names(options.tiny),
        seed=SEED,
        settings=dataclasses.asdict(case) | {"gpus": gpus, "rank": RANK, "exponent": EXPONENT, "real_files": REAL},
    )
    for ratio in case.ratios:
        found = dict[str, dict[float, float]]()
        for system in ("coupled", "servers"):
            if time.monotonic() - began < options.budget:
                found[system] = measure(case, system, ratio, gpus, results)
        if len(found) < 2:
            break
        coupled, servers = found["coupled"], found["servers"]
        if coupled:
            gain = max(servers, default=0.0) / max(coupled)
            target = Target(2.0) if ratio <= 0.3 else None
            results.put(f"infini.rate_gain.r{ratio}", round(gain, 3), "of coupled", target)
        if both := coupled.keys() & servers.keys():
            share = servers[max(both)] / coupled[max(both)]
            results.put(f"infini.tpot_ratio.r{ratio}", round(share, 3), "of coupled", Target(1.1, most=True))


if __name__ == "__main__":
    main()
