"""A daemon over several processes that share the base: `coserve serve --tp 2`, on CPU.

All of it is slow; without that mark such a daemon trains, serves and stops in `test_daemon_lifecycle`, with adapters
sharded otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from coserve.cli.daemon.engine_process import EngineProcess
from coserve.config import Config
from coserve.core.errors import UnsupportedBase
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.generator import Generator
from coserve.lora.store.files import load_adapter
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.load import load_base
from tests.support.answers import answers
from tests.support.crash_oracle import curve_of, job_request
from tests.support.daemon_process import DaemonProcess, Died, Json
from tests.support.examples import TURN, in_turns, on_days
from tests.support.executors import eager
from tests.support.families import tiny_family
from tests.support.generation import collect, request
from tests.support.model_folder import make_model_folder

PROMPTS = ("The quick", "Once upon a time there was", "def main():", "a")
GREEDY: Json = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
DRAWN: Json = {"temperature": 1.0, "top_k": 50, "seed": 5, "max_tokens": 12, "ignore_eos": True}
FIRST = TURN % 2
"""The rank that is stopped while it starts."""


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One of whose ranks is stopped while it starts: it is ready once all have been started again."""
    data = tmp_path_factory.mktemp("ranks") / "data"
    options = ("--tp", "2", "--lora-sharding", "slora", "--log-format", "json")
    with DaemonProcess(model, data, options=options) as found:
        while not (started := pids_of(found, FIRST)):
            time.sleep(0.01)
        os.kill(started[0], signal.SIGSTOP)
        found.wait_ready()
        yield found
        assert found.stop() == 0


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return alone(model, None)


def alone(model: Path, adapter: Path | None) -> list[list[int]]:
    """Tokens of each prompt by one process that holds the whole base: greedy, then drawn. `adapter`: its files."""
    base, tokenizer = load_base(str(model), device="cpu", dtype="float32"), Tokenizer.load(str(model))
    kv = KvCache.for_base(base, 2048, 16, sequences=8)
    ref = None if adapter is None else AdapterRef("learned", 1)
    store = AdapterStore(lambda *_: load_adapter(adapter or Path(), base.spec, dtype=base.dtype), 1 << 40)
    generator = Generator(base, store, kv, eager(base, kv), max_running=8, step_tokens=256)
    asked = [
        request(f"{i} {j}", tuple(tokenizer.encode(prompt)), SamplingParams(**sampling), ref)
        for i, sampling in enumerate((GREEDY, DRAWN))
        for j, prompt in enumerate(PROMPTS)
    ]
    found = collect(generator, asked)
    return [found[one.id][0] for one in asked]


def tokens(daemon: DaemonProcess, **more: object) -> list[list[int]]:
    """Of the same requests, all at once."""
    bodies = [{"prompt": prompt, **sampling, **more} for sampling in (GREEDY, DRAWN) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: daemon.call("POST", "/generate", body), bodies))
    return [answer["choices"][0]["token_ids"] for status, answer in answers if status == 200]


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_starts_is_told_of_and_all_are_started_again(daemon: DaemonProcess) -> None:
    assert f"rank {FIRST} of 2 {SILENT}" in daemon.log.read_text()
    assert [len(pids_of(daemon, rank)) for rank in (0, 1)] == [2, 2]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_serve_and_train_as_one_does(tmp_path: Path, ranks: int) -> None:
    lora: Json = {"r": 16, "bd_blocks": ranks}
    alone, together = (answers(tmp_path / str(tp), "--tp", str(tp), lora=lora) for tp in (1, ranks))
    assert [rank["state"] for rank in together.health["ranks"]] == ["ready"] * ranks
    assert together.tokens == alone.tokens
    assert together.losses == pytest.approx(alone.losses, rel=1e-3)


@pytest.mark.slow
def test_texts_are_those_of_one_process(daemon: DaemonProcess, expected: list[list[int]]) -> None:
    assert tokens(daemon) == expected
    _, health = daemon.call("GET", "/health")
    assert health["tp"] == 2
    assert [(rank["rank"], rank["state"]) for rank in health["ranks"]] == [(0, "ready"), (1, "ready")]


@pytest.mark.slow
def test_all_ranks_have_room_for_the_recurrent_states_of_all_requests_and_snapshots_of_them(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tiny_family("qwen3_5_text", vocab_size=vocab, max_position_embeddings=256).save_pretrained(folder)
    with DaemonProcess(folder, tmp_path / "data", options=("--tp", "2", "--dtype", "float32")) as daemon:
        daemon.wait_ready()
        assert tokens(daemon) == alone(folder, None)
        body = {"prompt": " ".join(PROMPTS[1] for _ in range(9)), **GREEDY}
        (_, first), (_, again) = (daemon.call("POST", "/v1/completions", body) for _ in range(2))
        assert again["choices"] == first["choices"]
        used = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert used == again["usage"]["prompt_tokens"] // 16 * 16 - 16 > 0
        assert daemon.stop() == 0


@pytest.mark.slow
def test_ranks_stay_together_while_clients_come_and_go(daemon: DaemonProcess, expected: list[list[int]]) -> None:
    def leave_early(number: int) -> None:
        body = {"prompt": PROMPTS[number % 4] * (1 + number), "max_tokens": 60, "ignore_eos": True, "stream": True}
        for seen, _ in enumerate(daemon.events("POST", "/generate", body)):
            if seen == number:
                break

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(leave_early, range(16)))
    assert tokens(daemon) == expected


@pytest.mark.slow
def test_a_job_trains_on_all_ranks_and_its_adapter_is_served(
    daemon: DaemonProcess, model: Path, expected: list[list[int]]
) -> None:
    asked = job_request("learned")
    asked["training"] |= {
        "sample_prompts": PROMPTS[:2],
        "sample_steps": 4,
        "sample_temperature": 0.0,
        "sample_max_tokens": 12,
    }
    _, job = daemon.call("POST", "/finetune", asked)
    events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
    assert events[-1]["state"] == "succeeded", events[-1]
    samples = {(one["step"], one["prompt"]): one["text"] for one in map(sample_of, events) if one}
    assert sorted(samples) == [(4, 0), (4, 1), (6, 0), (6, 1)]
    for number, prompt in enumerate(PROMPTS[:2]):  # the last snapshot is what was published
        body = {"prompt": prompt, "adapter": "learned", "temperature": 0.0, "max_tokens": 12}
        assert daemon.call("POST", "/generate", body)[1]["choices"][0]["text"] == samples[6, number]
    learned = alone(model, daemon.data / "adapters" / "learned" / "1")
    assert learned != expected
    assert tokens(daemon, adapter="learned") == learned  # published in memory
    status, _ = daemon.call("POST", "/adapters", {"name": "again", "path": str(daemon.data / "adapters/learned/1")})
    assert status == 201
    assert tokens(daemon, adapter="again") == learned  # read from files
    assert tokens(daemon) == expected


def sample_of(event: Json) -> Json | None:
    return event["sample"] if event["type"] == "sample" else None


def pids_of(daemon: DaemonProcess, rank: int) -> list[int]:
    """Each process that was started as that rank; the last one is the current engine's."""
    started = [one for one in daemon.entries() if one["message"] == "rank starts" and one["rank"] == rank]
    return [int(one["engine_pid"]) for one in started]


LOST, SILENT = "was killed by SIGKILL", "did not answer for 6 s"
LOSSES = {
    "1 killed": (1, signal.SIGKILL, LOST),
    "0 killed": (0, signal.SIGKILL, LOST),
    "0 stopped": (0, signal.SIGSTOP, SILENT),
    "1 stopped": (1, signal.SIGSTOP, SILENT),
}


@pytest.mark.parametrize("case", in_turns(LOSSES, days=8))
def test_a_rank_that_is_lost_ends_its_requests_and_all_ranks_are_started_again(
    daemon: DaemonProcess, expected: list[list[int]], case: tuple[int, int, str]
) -> None:
    rank, number, how = case
    restarts = daemon.call("GET", "/health")[1]["engine_restarts"]
    long = job_request(f"long-{rank}-{number}")
    long["training"] |= {"steps": 40}
    _, job = daemon.call("POST", "/finetune", long)
    events = daemon.events("GET", f"/finetune/{job['id']}/events")
    told = [next(event for event in events if event["type"] == "checkpoint")]
    stream = daemon.events(
        "POST", "/generate", {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "stream": True}
    )
    next(stream)
    os.kill(pids_of(daemon, rank)[-1], number)
    chunks = list[Json]()
    with suppress(Died):
        chunks += stream
    assert chunks[-1]["error"]["code"] == "engine_unavailable"
    loss = f"rank {rank} of 2 {how}"
    assert loss in chunks[-1]["error"]["message"]
    while (health := daemon.call("GET", "/health")[1])["engine_restarts"] == restarts:
        noted = any(loss in note for note in health["notes"])
        assert noted or health["status"] != "starting" or not health["notes"], health
        time.sleep(0.2)
    assert loss in daemon.log.read_text()
    assert tokens(daemon) == expected
    told += events  # the API process never left
    assert told[-1]["state"] == "succeeded", told[-1]
    assert len(curve_of(told)) > 30, "steps that ran twice had the same loss"


@on_days(1)
async def test_a_base_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    tiny_family("llama", hidden_size=48, num_attention_heads=12, num_key_value_heads=3).save_pretrained(
        tmp_path / "odd"
    )
    (tmp_path / "data" / "staging").mkdir(parents=True)
    with pytest.raises(UnsupportedBase, match="number of key/value heads"):
        await EngineProcess.start(Config(model=str(tmp_path / "odd"), data_dir=tmp_path / "data", device="cpu", tp=2))
    assert list((tmp_path / "data" / "staging").iterdir()) == []
