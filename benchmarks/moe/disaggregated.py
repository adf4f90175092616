"""Serviceable rate of a mixture's adapters: experts' terms computed coupled on all GPUs, or on LoRA servers apart.

    python -m benchmarks.moe.disaggregated --out R               # two GPUs; --gpus 4: on four
    python -m benchmarks.moe.disaggregated --adapters 512 --ratios 0.3 --rates 2,4,8,16 --budget 250 --out R
    python -m benchmarks.moe.disaggregated --gpus 4 --ratios 0.3 --without overlap,layerwise,placement --out R
    python -m benchmarks.moe.disaggregated --tiny --out /tmp/tried

Qwen3-30B-A3B's shape with random weights, adapters of rank 4 at every expert, popularity a power law of exponent 1.2,
Poisson arrivals. Few adapters have files of their own: the others are links to them. `coupled`: one engine on all GPUs
(`--tp N --ep N`), whose page pool has room for the ratio's share of the adapters beside a batch. `servers`: one engine
on one GPU, with pages for the batch alone, and N - 1 LoRA servers, which hold that share, placed as `coserve plan` says
(or by `--ep`). Both have host memory for the same share, and it is filled with the most popular adapters first.

The rate rises until P95 of TTFT is above 0.25 s or mean TPOT above 0.1 s, the paper's limits (InfiniLoRA, section 6.1),
for the second time; `infini.rate.*` is the last one below the first miss. `infini.tpot_ratio.*`: TPOT of `servers` over
that of `coupled`, at the highest rate that both keep, or else that both have a TPOT for. `--without`: the paper's
ablations (`ablation/`), servers alone, each with a daemon of its own; the keys end in `.no_overlap`, `.no_layerwise`,
`.no_placement`. What fails leaves its error in `infini.failed.*`, and the other rows stay.

What is like the paper's figure: the shape of the model, 512 adapters, their popularity, Poisson arrivals, the limits,
equal GPUs and equal memory for adapters. What is not:

- The paper's coupled system is eight engines of two GPUs, each with its own share of the cache and of the adapters;
  here one engine has all GPUs and so one cache. A request waits for room only if the adapters of the running requests
  fill the share: 64 at a time want 32 adapters on average, and 154 have room. The planner's `admission` of a row says
  whether requests can wait at all; with `--ratios 0.1 --batch 128 --rates 16,32,64` every seventh does. `at_once`: the
  most requests, and the most adapters, that ran at a time.
- A miss costs more than the paper's copy from host memory: engines of several ranks read and sort the adapter's file
  again, and servers hold what host memory holds, so theirs is a read of a file as well.
- Prefill runs on the same GPUs, and TTFT contains it. The paper's counts from the decoding engine's queue on.
- Lengths are uniform, not BurstGPT's; adapters have rank 4, not 32; a rate is measured for seconds, not minutes.
- Servers copy from and to the engine's GPU, by the copy engine, and launch their kernels one by one; the paper's GPUs
  write into each other's memory by kernels. Both have CUDA graphs, as users' have. A token has 2.2 MB in all layers:
  a mean prompt of 132 tokens 286 MB, in 96 exchanges one after another.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.adapters.fleet import ablation, get, link, load_seconds, post, resident, wait_ready
from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target
from benchmarks.serving.http_case import SMALL, model_folder
from benchmarks.serving.http_daemon import LoadProcesses, daemon, import_adapter, soon
from benchmarks.serving.http_load import LoadRequest
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.kernels.lora.types import VECTOR
from coserve.lora.files.packed_header import PACKED_FILE
from coserve.state.folder import DataFolder
from coserve.workloads.arrivals import Arrivals, Process, arrival_times
from coserve.workloads.distributions import Popularity, Shape, shares
from coserve.workloads.provisioning import Hardware, MoeShape, immediate_admission, plan_servers
from coserve.workloads.replay import Sample

RANK, EXPONENT, SEED, REAL, FIRST = 4, 1.2, 7, 2, 1000
REST, TOGETHER, FILLING = 2.0, 16, 0.3
"""Seconds after the last arrival at which answers are cut off; adapters that are asked for at a time; the most of a
daemon's time in which memory is filled."""
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
            "intermediate_size": shape.inner,  # of dense layers, which it has not
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

    @property
    def adapter_bytes(self) -> int:
        """Bytes of an adapter in memory: on a GPU, the rows of B are as wide as rank 8's."""
        if self.device == "cpu":
            return 2 * self.shape.adapter_bytes(RANK)
        columns = self.shape.layers * self.shape.experts * (2 * self.shape.inner + self.shape.hidden)
        return self.shape.adapter_bytes(RANK) + 2 * columns * (VECTOR - RANK)

    def kv_tokens(self, adapters: float) -> int:
        """Tokens of a page pool with room for a batch and so many whole adapters."""
        heads, width = self.heads["num_key_value_heads"], self.heads["head_dim"]
        token = 2 * self.shape.layers * heads * width * (2 if self.device == "cuda" else 4)
        return 2 * self.longest * self.batch + math.ceil(adapters * self.adapter_bytes / token)


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


def at_once(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the most requests that had a token and were not finished at one time, and the most adapters of those."""
    spans = [(each.times[0], each.finished, each.adapter) for each in samples if each.times]
    running = [{i for i, (first, end, _) in enumerate(spans) if first <= at < end} for at, _, _ in spans]
    return {
        "requests": max(map(len, running), default=0),
        "adapters": max((len({spans[i][2] for i in own}) for own in running), default=0),
    }


def wait_until_packed(url: str, data: Path, names: Sequence[str]) -> None:
    """Have adapters read, and wait for the packed files that are written then. Raises `TimeoutError`."""
    for name in names:
        post(f"{url}/adapters/{name}/prefetch")
    paths, until = (
        [DataFolder(data).adapter(AdapterRef(name, 1)) / PACKED_FILE for name in names],
        time.monotonic() + 30,
    )
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            raise TimeoutError("no packed files")
        time.sleep(0.05)


def fill(url: str, names: Sequence[str], until: float) -> int:
    """Have adapters read, some at a time, until a monotonic time; return how many are in memory then."""
    for first in range(0, len(names), TOGETHER):
        wanted = set(names[first : first + TOGETHER])
        for name in sorted(wanted):
            post(f"{url}/adapters/{name}/prefetch")
        while time.monotonic() < until and not wanted <= resident(url, "a"):
            time.sleep(0.05)
    return len(resident(url, "a") & set(names))


@dataclass(frozen=True)
class Inputs:
    """Folders that all daemons of a run read."""

    model: Path
    adapters: Path

    @classmethod
    def write(cls, root: Path, case: Case) -> Inputs:
        for seed in range(REAL):
            write_adapter(root / "adapters" / f"real{seed}", case.shape, seed)
        return cls(model_folder(root / "model", dataclasses.replace(SMALL, config=case.config)), root / "adapters")


@dataclass
class Run:
    """One daemon: `coupled` or `servers`, with memory for a share of the adapters."""

    case: Case
    system: str
    ratio: float
    gpus: int
    results: Results
    until: float
    """Monotonic time after which no rate is begun."""
    ep: int = 1
    without: str = ""
    """The part of the servers that is turned off; empty: none."""
    tpot: dict[float, float] = field(default_factory=dict)
    """By rate, in seconds, of those that were measured and had answers."""
    measured: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    """Rates below the first miss."""

    @property
    def name(self) -> str:
        return f"{self.system}.r{self.ratio}" + (f".no_{self.without}" if self.without else "")

    def settings(self, inputs: Inputs, data: Path) -> dict[str, object]:
        case, held = self.case, self.ratio * self.case.adapters
        found: dict[str, object] = {"model": inputs.model, "data_dir": data, "data_root": inputs.adapters}
        found |= {"device": case.device, "load_format": "dummy", "shed": "off", "policy": "slack"}
        found |= {"max_running": case.batch, "host_adapter_bytes": math.ceil(held * case.adapter_bytes)}
        if self.system == "servers":
            found |= {"lora_server": max(1, self.gpus - 1), "lora_server_ep": self.ep}
        elif self.gpus > 1:
            found |= {"tp": self.gpus, "ep": self.gpus}
        return found | {"kv_tokens": case.kv_tokens(0 if self.system == "servers" else held)}

    def measure(self, inputs: Inputs) -> None:
        """Write the rows; errors too, whatever they are."""
        with tempfile.TemporaryDirectory() as scratch:
            log, data = Path(scratch) / "log.txt", Path(scratch) / "data"
            try:
                began = time.monotonic()
                with daemon(self.settings(inputs, data), log, **ablation(__file__, self.without)) as url:
                    wait_ready(url, self.until)
                    self._rates(url, data, {"ready_s": round(time.monotonic() - began, 1)})
            except (Exception, SystemExit) as error:  # noqa: BLE001 - rows that are measured stay, and others follow
                traceback.print_exc()
                tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                failed = {"error": f"{error!r}"[:1000], "log": tail}
                self.results.put(f"infini.failed.{self.name}", 1, "failures", None, about=failed)
            finally:  # also where this process is ended
                if self.measured:
                    self.results.put(f"infini.rate.{self.name}", max(self.kept, default=0.0), "requests/s", None)

    def _rates(self, url: str, data: Path, about: dict[str, object]) -> None:
        case, missed = self.case, 0
        real, names = [f"real{seed}" for seed in range(REAL)], [f"a{i:04d}" for i in range(case.adapters)]
        for name in real:
            import_adapter(url, name)
        if self.system == "servers" or self.gpus == 1:  # else each link would be packed on its own; ranks pack none
            wait_until_packed(url, data, real)
        link(data, real, names)
        began = time.monotonic()
        popular = names[: int(self.ratio * case.adapters)]
        filled = fill(url, popular, min(self.until, began + FILLING * (self.until - began)))
        of_each = shares(Popularity(Shape.POWER_LAW, EXPONENT), case.adapters)
        about |= {"admission": round(immediate_admission(of_each, case.batch, len(popular)), 4), "filled": filled}
        about |= {"fill_s": round(time.monotonic() - began, 1)}
        first = dataclasses.replace(case, seconds=min(4.0, case.seconds))
        # The first steps load their kernels.
        LoadProcesses(2).run(url, make_requests(first, names, case.rates[0]), start=soon(), until=10 * first.seconds)
        for rate in case.rates:
            if missed == 2:
                break
            if time.monotonic() + case.seconds > self.until:
                raise TimeoutError(f"no time left for {rate:g} requests a second")
            before, requests = load_seconds(url), make_requests(case, names, rate)
            samples = LoadProcesses(2).run(url, requests, start=soon(), until=case.seconds + REST)
            ttft, tpot = latencies(samples)
            errors = [each.error for each in samples if each.error is not None]
            row = {
                "tpot_ms": None if math.isinf(tpot) else round(1e3 * tpot, 2),
                "requests": len(samples),
                "errors": {code: errors.count(code) for code in sorted(set(errors))},
                "at_once": at_once(samples),
                "loads": {
                    cause: [count - before[cause][0], round(seconds - before[cause][1], 3)]
                    for cause, (count, seconds) in load_seconds(url).items()
                    if cause in before and count > before[cause][0]
                },
            }
            health = json.loads(get(f"{url}/health"))
            row |= {name: health[name] for name in ("adapters_resident", "lora_servers", "notes")}
            key = f"infini.ttft_p95_ms.{self.name}.at{rate:g}"
            self.results.put(key, round(1e3 * min(ttft, case.seconds + REST), 1), "ms", None, about=about | row)
            self.measured.append(rate)
            if not math.isinf(tpot):
                self.tpot[rate] = tpot
            missed += ttft > case.limits[0] or tpot > case.limits[1]
            if not missed:
                self.kept.append(rate)


def planned_ep(case: Case, ratio: float, servers: int) -> int:
    """Return how many of the servers share out the experts of a layer, as `coserve plan` chooses."""
    held, popular = math.ceil(ratio * case.adapters), shares(Popularity(Shape.POWER_LAW, EXPONENT), case.adapters)
    hardware = Hardware(memory=math.ceil(held / servers) * case.shape.adapter_bytes(RANK))
    plan = plan_servers(
        case.shape, RANK, held, popular, batch=case.batch, engines=1, tpot=case.limits[1], hardware=hardware
    )
    return plan.ep if plan.gpus == servers else 1


def compare(coupled: Run, servers: Run, results: Results) -> None:
    """Write what the servers gain, as far as both were measured."""
    ratio = coupled.ratio
    if coupled.kept and servers.measured:
        gain = max(servers.kept, default=0.0) / max(coupled.kept)
        target = Target(2.0) if ratio <= 0.3 else None
        results.put(f"infini.rate_gain.r{ratio}", round(gain, 3), "of coupled", target)
    both = {*coupled.kept} & {*servers.kept} or coupled.tpot.keys() & servers.tpot.keys()
    if both:
        rate = max(both)
        about = {"rate": rate, "within_limits": rate in coupled.kept and rate in servers.kept}
        share = round(servers.tpot[rate] / coupled.tpot[rate], 3)
        results.put(f"infini.tpot_ratio.r{ratio}", share, "of coupled", Target(1.1, most=True), about=about)


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base on the CPU, one engine against an engine and one server")
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4))
    parser.add_argument("--adapters", type=int, help=f"default {FULL.adapters}, of 0.3 GB each")
    parser.add_argument("--ratios", help="shares of the adapters that have room, separated by commas")
    parser.add_argument("--rates", help="requests a second, rising, separated by commas")
    parser.add_argument("--batch", type=int, help=f"requests that run at once, default {FULL.batch}")
    parser.add_argument("--ep", type=int, help="servers that share out a layer's experts; default: as planned")
    parser.add_argument("--without", default="", help="separated by commas: overlap, layerwise, placement")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds after which nothing is begun")
    options = parser.parse_args()
    case, began = (TINY if options.tiny else FULL), time.monotonic()
    case = dataclasses.replace(
        case,
        adapters=options.adapters or case.adapters,
        batch=options.batch or case.batch,
        ratios=tuple(map(float, options.ratios.split(","))) if options.ratios else case.ratios,
        rates=tuple(map(float, options.rates.split(","))) if options.rates else case.rates,
    )
    of_each = options.budget / (max(2, options.without.count(",") + 1) * len(case.ratios) * len(case.rates))
    case = dataclasses.replace(case, seconds=min(case.seconds, max(8.0, of_each / 4)))
    gpus = 1 if options.tiny else options.gpus
    results = Results.of(
        options,
        f"disaggregated_{options.gpus}.json",
        __file__,
        dataclasses.asdict(case) | {"gpus": gpus, "rank": RANK, "exponent": EXPONENT, "real_files": REAL},
        seed=SEED,
    )
    end, systems = began + options.budget, [("servers", each) for each in options.without.split(",")]
    systems += [] if options.without else [("coupled", "")]  # last: it starts in minutes, servers in seconds
    left = len(systems) * len(case.ratios)
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Inputs.write(Path(scratch), case)
        for ratio in case.ratios:
            runs = dict[str, Run]()
            for system, without in systems:
                share = (end - time.monotonic()) / left
                until = time.monotonic() + (0.8 * share if left > 1 else share)
                ep = options.ep or planned_ep(case, ratio, max(1, gpus - 1))
                runs[system], left = Run(case, system, ratio, gpus, results, until, ep, without), left - 1
                runs[system].measure(inputs)
            if "coupled" in runs:
                compare(runs["coupled"], runs["servers"], results)


if __name__ == "__main__":
    main()
