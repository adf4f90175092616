"""Training sessions through Tinker's SDK: against a native job, and many at once beside requests of others.

    python -m benchmarks.tinker.sessions [--only overhead,concurrent8] --out benchmarks/results
    python -m benchmarks.tinker.sessions --tiny --out /tmp/tried

The Llama-3.1-8B shape with random weights. `tinker.overhead`: tokens a second of forward_backward and optim_step of 8
rows of 512 tokens, pipelined as the SDK advises, as a fraction of a job's on batches of the same size.
`tinker.concurrent8`: 8 runs of one base, each of its own rank, with steps of 64 rollouts of 256 tokens and a policy
gradient over all of them. Their speed is a multiple of one run's alone, and the value the fraction that it is of
1 / (t + s / g): t and s are the solo shares of training and sampling, g how much faster 8 sample together than one
after another. `tinker.slo`: the fraction of others' requests (5/s) that kept their targets meanwhile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target, summarize
from benchmarks.serving.http_case import (
    FIRST_TOKEN,
    FULL,
    RANK,
    SEED,
    SMALL,
    Size,
    corpus,
    model_folder,
    poisson_requests,
)
from benchmarks.serving.http_daemon import daemon, load, serve_arguments, soon
from benchmarks.serving.over_http import watch_training
from coserve.client import Client
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.replay import Sample

FILE = "tinker.json"
PARTS = ("overhead", "concurrent8")
KEY = "tml-of-no-daemon-with-a-key"
RATE = 5.0
RUNS = 8


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement."""

    size: Size
    rows: int = 8
    row_tokens: int = 512
    steps: int = 20
    """Optimizer steps of the overhead."""
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 64
    sampled: int = 256
    rounds: int = 2
    """Steps of each concurrent run."""
    ttft: float = 1.0
    tpot: float = 0.05


WHOLE = Case(replace(FULL, seconds=30.0))
TRY = Case(SMALL, 4, 32, 4, 2, 4, 8, 8, 1, 5.0, 1.0)


class Measurement:
    """All parts against one daemon."""

    def __init__(self, case: Case, url: str, results: Results) -> None:
        import tinker

        self.case, self.url, self.results = case, url, results
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.base = str(Client(url).health().base.name)  # type: ignore[union-attr]
        self._random = np.random.default_rng(SEED)
        self._began = time.monotonic()

    def log(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def tokens(self, count: int) -> list[int]:
        return [int(each) for each in self._random.integers(FIRST_TOKEN, self.case.size.config["vocab_size"], count)]

    def trainer(self, rank: int) -> Any:  # noqa: ANN401 - the SDK is no dependency
        return self.service.create_lora_training_client(base_model=self.base, rank=rank, seed=rank).result()

    # ---- overhead

    def overhead(self) -> None:
        case = self.case
        native = self._native()
        self.log(f"a job: {native:.0f} tokens/s")
        ours = self._steps()
        self.log(f"through the SDK: {ours:.0f} tokens/s")
        self.results.put(
            "tinker.overhead",
            round(ours / native, 4),
            "fraction of a job's tokens/s",
            Target(0.9),
            about={"session_tok_s": round(ours, 1), "job_tok_s": round(native, 1), "rows": case.rows},
        )

    def _native(self) -> float:
        case = self.case
        tokens = case.rows * case.row_tokens
        training = TrainingSettings(
            steps=10_000, batch_tokens=tokens, max_length=case.row_tokens, checkpoint_steps=10_000, seed=SEED
        )
        with Client(self.url) as client:
            job = client.finetune("native", corpus(case.size), lora={"r": RANK}, training=msgspec.to_builtins(training))
            while client.job(job.id).info.step < 3:
                time.sleep(0.2)
            now = time.monotonic()
            found = watch_training(client, job.id, now, now + 10.0)
            client.job(job.id).cancel()
            return found["finetune_tok_s"]

    def _steps(self) -> float:
        import tinker

        case, trainer = self.case, self.trainer(RANK)
        rows = [self.tokens(case.row_tokens + 1) for _ in range(case.rows)]
        batch = [datum(row[:-1], row[1:], weights=np.ones(case.row_tokens, np.float32)) for row in rows]
        adam, waiting, began = tinker.AdamParams(learning_rate=1e-5), list[Any](), 0.0
        for step in range(case.steps + 3):
            if step == 3:  # the kernels are compiled
                for future in waiting:
                    future.result()
                waiting.clear()
                began = time.monotonic()
            waiting += [trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(adam)]
            if len(waiting) > 4:
                waiting.pop(0).result()
                waiting.pop(0).result()
        for future in waiting:
            future.result()
        return case.steps * case.rows * case.row_tokens / (time.monotonic() - began)

    # ---- many runs

    def concurrent8(self) -> None:
        case = self.case
        runs = [Run(self, 4 * (number + 1)) for number in range(RUNS)]
        with ThreadPoolExecutor(RUNS) as pool:
            list(pool.map(Run.step, runs))  # kernels of all ranks, and graphs
            self.log("8 runs have begun")
            first = runs[0]
            solo = [first.step() for _ in range(2)]
            sampling, training = (float(np.median([one[part] for one in solo])) for part in (0, 1))
            self.log(f"one alone: {sampling:.2f} s to sample, {training:.2f} s to train")
            began = time.monotonic()
            list(pool.map(Run.sample, runs))
            gain = RUNS * sampling / (time.monotonic() - began)
            self.log(f"8 sample {gain:.2f} times as fast as one after another")
            t = training / (training + sampling)
            most = 1 / (t + (1 - t) / gain)
            start = soon()
            others = pool_of_others(self.url, case.size, start)
            time.sleep(max(0.0, start - time.monotonic()))
            began = time.monotonic()
            list(pool.map(lambda run: [run.step() for _ in range(case.rounds)], runs))
            seconds = time.monotonic() - began
            samples = others.result()
        speed = RUNS * case.rounds * (sampling + training) / seconds
        about = {
            "solo_sampling_s": round(sampling, 3),
            "solo_training_s": round(training, 3),
            "sampling_gain": round(gain, 3),
            "speed": round(speed, 3),
            "limit": round(most, 3),
            "seconds": round(seconds, 2),
            "ranks": [run.rank for run in runs],
        }
        self.results.put(
            "tinker.concurrent8", round(speed / most, 4), "fraction of the limit", Target(0.9), about=about
        )
        during = [one for one in samples if one.sent <= seconds]
        kept = [self._kept(one) for one in during]
        self.results.put(
            "tinker.slo",
            round(sum(kept) / max(1, len(kept)), 4),
            "fraction in TTFT 1 s and TPOT 50 ms",
            Target(0.995),
            about={"requests": len(kept), "rate": RATE},
        )

    def _kept(self, sample: Sample) -> bool:
        if sample.error is not None or not sample.times:
            return False
        between = (sample.finished - sample.times[0]) / max(1, sample.tokens - 1)
        return sample.times[0] - sample.due <= self.case.ttft and between <= self.case.tpot


def pool_of_others(url: str, size: Size, start: float) -> Any:  # noqa: ANN401
    """Requests of others, from `start` on, for `size.seconds`; their samples in a future."""
    requests = [msgspec.structs.replace(each, adapter=None) for each in poisson_requests(size, RATE)]
    return ThreadPoolExecutor(1).submit(load, url, size, requests, closed=False, start=start)


class Run:
    """One GRPO-like run."""

    def __init__(self, owner: Measurement, rank: int) -> None:
        self.owner, self.rank, self.trainer = owner, rank, owner.trainer(rank)
        case = owner.case
        self.prompts = [owner.tokens(case.prompt_tokens) for _ in range(case.prompts)]

    def step(self) -> tuple[float, float]:
        """Seconds to sample, and to train on what was sampled."""
        import tinker

        began = time.monotonic()
        batch = self.sample()
        sampled = time.monotonic()
        computed = self.trainer.forward_backward(batch, "importance_sampling")
        stepped = self.trainer.optim_step(tinker.AdamParams(learning_rate=1e-6))
        computed.result()
        stepped.result()
        return sampled - began, time.monotonic() - sampled

    def sample(self) -> list[Any]:
        """Sample groups with the weights as they are; return the datums to learn."""
        from tinker import types

        case = self.owner.case
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=case.sampled, temperature=1.0, stop=[])
        prompts = [types.ModelInput.from_ints(prompt) for prompt in self.prompts]
        futures = [sampler.sample(prompt, case.group, params) for prompt in prompts]
        batch = []
        for prompt, future in zip(self.prompts, futures, strict=True):
            for number, one in enumerate(future.result().sequences):
                before, sampled = len(prompt) - 1, len(one.tokens)
                batch.append(
                    datum(
                        [*prompt, *one.tokens[:-1]],
                        [0] * before + list(one.tokens),
                        logprobs=np.array([0.0] * before + list(one.logprobs), np.float32),
                        advantages=np.array([0.0] * before + [(-1.0) ** number] * sampled, np.float32),
                    )
                )
        return batch


def datum(tokens: Sequence[int], labels: Sequence[int], **inputs: np.ndarray) -> Any:  # noqa: ANN401
    from tinker import types

    arrays = {"target_tokens": np.array(labels, np.int64)} | inputs
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    add_names(parser, "--only", PARTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    case = TRY if options.tiny else WHOLE
    os.environ["TINKER_TELEMETRY"] = "0"
    results = Results.of(
        options, FILE, __file__, {name: value for name, value in vars(case).items() if name != "size"}, seed=SEED
    )
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = model_folder(root / "model", case.size)
        settings = serve_arguments(case.size, model, root / "data") | {
            "policy": "auto",
            "slo_ttft": case.ttft,
            "slo_tpot": case.tpot,
        }
        with daemon(settings, root / "daemon.log") as url:
            run = Measurement(case, url, results)
            run.log("daemon up")
            for part in options.only:
                try:
                    getattr(run, part)()
                except Exception as error:  # noqa: BLE001 - the other part may still succeed
                    run.log(f"{part} failed: {error!r}")
            run.service.close("success").result()
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
