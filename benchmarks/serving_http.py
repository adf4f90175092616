"""Serving through HTTP: the daemon under closed-loop and Poisson load, alone and beside a fine-tuning job.

    python -m benchmarks.serving_http --out benchmarks/results

The Llama-3.1-8B shape with random weights (`--load-format dummy`); adapters of rank 16 on all seven sites of a layer,
imported through the API. First the closed loop in process, through an engine in a process of its own (what HTTP costs is
counted against it), then the daemon. Greedy, every request to its last token. `--tiny`: a small base, on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.http_load import Ask, Plan
from benchmarks.http_report import closed_row, online_row, write
from coserve.client import Client
from coserve.types import TrainingSettings
from coserve.workloads.arrivals import Arrivals, Process, arrival_times
from coserve.workloads.replay import Sample

SEED = 7
RANK = 16
ADAPTERS = 32
SITES = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    config: dict[str, Any]
    device: str
    streams: int = 64
    rounds: int = 3
    prompt: int = 16
    output: int = 256
    rates: tuple[float, ...] = (5, 20, 10, 40)
    beside: tuple[float, ...] = (5, 20)
    seconds: float = 20.0
    median_in: int = 160
    median_out: int = 180
    spread: float = 0.7
    """Standard deviation of the logarithms of lengths."""
    longest_in: int = 2048
    longest_out: int = 1024
    batch_tokens: int = 4096
    row_tokens: int = 512
    kv_tokens: int = 200_000
    max_running: int = 256
    step_tokens: int = 2048
    processes: int = 4


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = LLAMA_8B | {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
FULL = Size(LLAMA_8B, "cuda")
SMALL = Size(
    TINY, "cpu", 8, 2, 16, 32, (5,), (5,), 4.0, 20, 16, 0.7, 64, 64, 256, 64, 8192, 32, 256, 2
)  # fmt: skip


def model_folder(folder: Path, size: Size) -> Path:
    """config.json, and the bundled tokenizer with a token for every id."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(size.config))
    bundled = Path(str(resources.files("coserve") / "assets" / "tiny"))
    shutil.copy(bundled / "tokenizer_config.json", folder)
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġw{id}": id for id in range(max(vocab.values()) + 1, size.config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def adapter_folders(root: Path, config: dict[str, Any], distinct: int = 2) -> list[Path]:
    """PEFT folders of random adapters; a few distinct contents under many names (each is loaded on its own)."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = (
        (heads, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, heads),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    )
    shapes = dict(zip(SITES, sizes, strict=True))
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0}
    settings |= {"target_modules": [site.split(".")[1] for site in SITES], "bias": "none"}
    folders = []
    for i in range(ADAPTERS):
        folder = root / f"a{i:02d}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        file = folder / "adapter_model.safetensors"
        if i < distinct:
            g = torch.Generator().manual_seed(SEED + i)
            tensors = {}
            for layer in range(config["num_hidden_layers"]):
                for site, (out_features, in_features) in shapes.items():
                    at = f"base_model.model.model.layers.{layer}.{site}"
                    for kind, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
                        tensors[f"{at}.lora_{kind}.weight"] = (torch.randn(shape, generator=g) * 0.02).bfloat16()
            save_file(tensors, file)
        else:
            os.link(folders[i % distinct] / file.name, file)
        folders.append(folder)
    return folders


# ---- what is asked


def closed_asks(size: Size, adapters: int, run: str) -> list[Ask]:
    chance = random.Random(f"{SEED}/closed/{adapters}/{run}")
    vocab = size.config["vocab_size"]
    return [
        Ask(
            index=i,
            prompt=[chance.randrange(1000, vocab) for _ in range(size.prompt)],
            max_tokens=size.output,
            adapter=f"a{i % adapters:02d}" if adapters else None,
        )
        for i in range(size.streams * (1 if run == "warm" else size.rounds))
    ]


def online_asks(size: Size, rate: float) -> list[Ask]:
    """Poisson arrivals, log-normal lengths, adapters uniform."""
    chance = random.Random(f"{SEED}/online/{rate}")
    vocab = size.config["vocab_size"]

    def length(median: int, longest: int) -> int:
        return min(longest, max(1, round(chance.lognormvariate(math.log(median), size.spread))))

    times = arrival_times(Arrivals(process=Process.POISSON, rate=rate), size.seconds, chance)
    return [
        Ask(
            index=i,
            prompt=[chance.randrange(1000, vocab) for _ in range(length(size.median_in, size.longest_in))],
            max_tokens=length(size.median_out, size.longest_out),
            adapter=f"a{chance.randrange(ADAPTERS):02d}",
            at=at,
        )
        for i, at in enumerate(times)
    ]


# ---- the daemon


def serve_arguments(size: Size, model: Path, data: Path) -> dict[str, Any]:
    """Settings of the daemon, and of the engine that is measured in process."""
    return {
        "model": model,
        "data_dir": data,
        "load_format": "dummy",
        "device": size.device,
        "kv_tokens": size.kv_tokens,
        "step_tokens": size.step_tokens,
        "inference_batch_size": size.max_running,
        "max_adapters_resident": 64,
        "micro_batch_tokens": size.batch_tokens,
        "policy": "slack",
        # Within the limits that are counted below (5 s, 45 ms): the policy spends what it is given to the last millisecond.
        "slo_ttft": 1.0,
        "slo_tpot": 0.04,
    }


@contextlib.contextmanager
def daemon(size: Size, model: Path, root: Path, log: Path) -> Iterator[str]:
    """A running daemon's address."""
    settings = serve_arguments(size, model, root / "data") | {"data_root": root / "adapters", "port": 0}
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coserve.cli", "serve", *options, "--no-prefix-cache"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        line = next((line for line in process.stdout if "listens on" in line), None)
        try:
            if line is None:
                raise SystemExit(f"the daemon did not start:\n{log.read_text()[-3000:]}")
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            print("the daemon's last words:", *log.read_text().splitlines()[-6:], sep="\n  ", flush=True)


def import_adapter(url: str, name: str) -> None:
    """From the folder of that name under the daemon's `data_root`."""
    body = json.dumps({"name": name, "path": name}).encode()
    request = urllib.request.Request(f"{url}/adapters", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def soon() -> float:
    """On the monotonic clock: load processes that start now have imported what they need."""
    return time.monotonic() + 3.0


def load(url: str, size: Size, asks: Sequence[Ask], *, closed: bool, start: float | None = None) -> list[Sample]:
    """The samples of all load processes, which start together, at `start`."""
    count = size.processes
    start = soon() if start is None else start
    processes = []
    for i in range(count):
        streams = size.streams // count if closed else None
        plan = Plan(url=url, start=start, asks=list(asks[i::count]), streams=streams)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http_load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        processes.append(process)
    samples: list[Sample] = []
    for process in processes:
        assert process.stdout is not None
        samples += msgspec.json.decode(process.stdout.read(), type=list[Sample])
        process.wait()
    return sorted(samples, key=lambda sample: sample.index)


def corpus(size: Size) -> list[dict[str, str]]:
    text = resources.files("coserve").joinpath("assets/corpora/pirate.jsonl").read_text() * 4
    step = size.row_tokens * 8  # at least a token in eight characters
    return [{"text": text[i * 37 : i * 37 + step]} for i in range(128)]


def beside(client: Client, size: Size, url: str, rate: float) -> dict[str, Any]:
    """Online load while one job fine-tunes; its tokens a second while requests arrive."""
    training = TrainingSettings(
        steps=10_000, batch_tokens=size.batch_tokens, max_length=size.row_tokens, checkpoint_steps=10_000, seed=SEED
    )
    job = client.finetune(f"trained-{rate:g}", corpus(size), lora={"r": RANK}, training=msgspec.to_builtins(training))
    waited = time.monotonic()
    while client.job(job.id).info.step < 2 and time.monotonic() - waited < 60:  # the kernels are compiled
        time.sleep(0.2)
    asks = online_asks(size, rate)
    start = soon()
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(trained_between, client, job.id, start, start + size.seconds)
        samples = load(url, size, asks, closed=False, start=start)
        trained = watcher.result()
    info = client.job(job.id).cancel()
    return online_row(rate, size.seconds, samples) | {"finetune_tok_s": round(trained, 1), "steps": info.step}


def trained_between(client: Client, job: str, start: float, end: float) -> float:
    """Tokens a second that a job was trained on between two times of the monotonic clock."""
    time.sleep(max(0.0, start - time.monotonic()))
    began, before = time.monotonic(), client.job(job).info.trained_tokens
    time.sleep(max(0.0, end - time.monotonic()))
    after = client.job(job).info.trained_tokens
    return (after - before) / (time.monotonic() - began)


# ---- in process


async def offline(size: Size, model: Path, root: Path) -> None:
    """The closed loops without HTTP; prints a line of JSON for each."""
    from coserve.config import Config
    from coserve.link import FromEngine, Generate, RequestFailed, Shutdown, Tokens, local_pair
    from coserve.model.base import load_base
    from coserve.state.folder import DataFolder
    from coserve.types import AdapterRef, SamplingParams, Slo
    from coserve.worker import build_engine

    config = Config(**serve_arguments(size, model, root / "offline"), prefix_cache=False)
    for i in range(ADAPTERS):
        copy = DataFolder(config.data_dir).adapter(AdapterRef(f"a{i:02d}", 1))
        shutil.copytree(root / "adapters" / f"a{i:02d}", copy, copy_function=os.link)
    base = load_base(str(model), device=size.device, dtype="auto", load_format="dummy")
    api, theirs = local_pair()
    engine, ready = build_engine(base, config, theirs)
    print(json.dumps({"notes": ready.notes}), flush=True)
    sys.stdin.readline()
    running = asyncio.create_task(engine.run())
    sampling = SamplingParams(max_tokens=size.output, temperature=0.0, ignore_eos=True)
    for adapters, run in ((0, "warm"), (0, "run"), (ADAPTERS, "warm"), (ADAPTERS, "run")):
        asks = closed_asks(size, adapters, run)
        began, tokens, ended, sent = time.monotonic(), 0, 0, 0
        while ended < len(asks):
            while sent < len(asks) and sent - ended < size.streams:
                ask = asks[sent]
                ref = AdapterRef(ask.adapter, 1) if ask.adapter else None
                id, slo = f"{adapters}/{run}/{sent}", Slo(ttft=3600.0, tpot=3600.0)
                api.send(Generate(id=id, prompt=tuple(ask.prompt), sampling=sampling, adapter=ref, slo=slo))
                sent += 1
            message: FromEngine = await api.receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, Tokens):
                tokens += len(message.tokens)
                ended += message.finished is not None
        row = {"adapters": adapters, "run": run, "tok_s": round(tokens / (time.monotonic() - began), 1)}
        print(json.dumps(row), flush=True)
    api.send(Shutdown())
    await running


class Offline:
    """The process of `offline`: it starts beside the daemon, and measures when told."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        tiny = ["--tiny"] if options.tiny else []
        command = [sys.executable, "-m", "benchmarks.serving_http", "--offline", str(root), *tiny]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self) -> dict[str, float]:
        out, _ = self._process.communicate("go\n")
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        print("offline", rows, flush=True)
        return {f"a{row['adapters']}": row["tok_s"] for row in rows if row.get("run") == "run"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip-offline", action="store_true")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the base, the adapters and the data")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=None, help="of arrivals")
    parser.add_argument("--budget", type=float, default=None, help="seconds after which no further load is begun")
    options = parser.parse_args()
    size = SMALL if options.tiny else FULL
    size = size if options.seconds is None else replace(size, seconds=options.seconds)
    if options.offline is not None:
        asyncio.run(offline(size, options.offline / "model", options.offline))
        return
    record: dict[str, Any] = {"settings": {k: v for k, v in vars(size).items() if k != "config"} | {"rank": RANK}}

    def keep() -> None:
        write(options.out, record, seed=SEED, revision=options.commit, tiny=options.tiny)

    began = time.monotonic()

    def say(what: str, row: object = "") -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", json.dumps(row) if row else "", flush=True)

    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        model = model_folder(root / "model", size)
        adapter_folders(root / "adapters", size.config)
        say("folders made")
        offline_process = None if options.skip_offline else Offline(options, root)
        log = root / "daemon.log"
        options.out.mkdir(parents=True, exist_ok=True)
        with daemon(size, model, root, log) as url, Client(url) as client:
            health = client.health()
            record["start_seconds"] = round(time.monotonic() - began, 1)
            record["notes"] = health.notes
            say("daemon up", health.notes)
            for i in range(ADAPTERS):
                import_adapter(url, f"a{i:02d}")
            say("adapters imported")
            if offline_process is not None:
                record["offline"] = offline_process.measure()
                say("offline measured")
            record["closed"] = {}
            for adapters in (0, ADAPTERS):
                load(url, size, closed_asks(size, adapters, "warm"), closed=True)
                samples = load(url, size, closed_asks(size, adapters, "run"), closed=True)
                record["closed"][f"a{adapters}"] = row = closed_row(
                    samples, record.get("offline", {}).get(f"a{adapters}")
                )
                say(f"closed, {adapters} adapters", row)
                keep()
            record["online"], record["beside"] = [], []
            todo = [("online", rate) for rate in size.rates[:2]] + [("beside", rate) for rate in size.beside]
            for kind, rate in [*todo, *(("online", rate) for rate in size.rates[2:])]:
                if options.budget is not None and time.monotonic() - began > options.budget - 2 * size.seconds:
                    say(f"no time left for {kind}, {rate:g} requests/s")
                    break
                if kind == "online":
                    row = online_row(rate, size.seconds, load(url, size, online_asks(size, rate), closed=False))
                else:
                    row = beside(client, size, url, rate)
                record[kind].append(row)
                say(f"{kind}, {rate:g} requests/s", row)
                keep()


if __name__ == "__main__":
    main()
