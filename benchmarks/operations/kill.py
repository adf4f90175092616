"""What random `kill -9` loses of what was acknowledged: `page.kill.lost`.

    python -m benchmarks.operations.kill --kills 100 --out benchmarks/results

A daemon is started, loaded with jobs, uploads, imports, streams and an open page, and killed with all its processes at
a random moment, also while it starts. Each time it must start again unaided, and have everything that it had
acknowledged: jobs by their idempotency keys, files and adapters by their bytes. At the end every job succeeds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target, summarize
from benchmarks.operations.load import ROWS, Load, for_seconds, job
from tests.support.daemon_process import DaemonProcess, Died
from tests.support.model_folder import make_model_folder

FILE, KEY, SEED = "kill.json", "page.kill.lost", 0
TARGET = Target(0, most=True)
STARTING, LOADED = 0.2, 4.0
"""Share of kills while the daemon starts; most seconds of load before the others."""


@dataclass
class Acknowledged:
    """What a daemon has answered for: jobs by key, and SHA-256 of files and of adapters' weights."""

    jobs: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.jobs) + len(self.files) + len(self.adapters)


class Writes(Load):
    """Actions whose answers are kept."""

    def __init__(self, url: str, http: aiohttp.ClientSession, adapter: Path, rng: random.Random) -> None:
        super().__init__(url, http, adapter, rng)
        self.kept = Acknowledged()

    async def job(self) -> None:
        key = self.new_name()
        status, made = await self.call("POST", "/finetune", json=job(key), headers={"Idempotency-Key": key})
        assert status == 202, made
        self.kept.jobs[key] = made["id"]
        await asyncio.sleep(1.0)

    async def file(self) -> None:
        content = self._rng.randbytes(20_000)
        form = aiohttp.FormData()
        form.add_field("purpose", "fine-tune")
        form.add_field("file", content, filename="rows.jsonl")
        status, made = await self.call("POST", "/v1/files", data=form)
        assert status == 200, made
        self.kept.files[made["id"]] = hashlib.sha256(content).hexdigest()

    async def adapter(self) -> None:
        name = self.new_name()
        status, made = await self.call("POST", "/adapters", json={"name": name, "path": str(self._adapter)})
        assert status == 201, made
        self.kept.adapters[made["ref"]] = made["sha256"]


async def load_until_killed(daemon: DaemonProcess, adapter: Path, rng: random.Random, kept: Acknowledged) -> int:
    """Load the daemon, kill it at a random moment, and return how many answers came."""
    async with aiohttp.ClientSession() as http:
        writes = Writes(daemon.url, http, adapter, rng)
        writes.kept = kept
        actions = (writes.job, writes.file, writes.adapter, writes.generate, writes.cancelled_stream, writes.page)
        running = asyncio.create_task(writes.run(actions))
        await asyncio.wait({running}, timeout=rng.uniform(0, LOADED))
        os.killpg(daemon.process.pid, signal.SIGKILL)
        with suppress(aiohttp.ClientError, ExceptionGroup, ConnectionError):
            await for_seconds(running, 60)
        return sum(writes.done.values())


def lost(daemon: DaemonProcess, data: Path, kept: Acknowledged) -> list[str]:
    """What was acknowledged and is not there, or not the same."""
    found = []
    for key, id in kept.jobs.items():
        status, body = daemon.call("GET", f"/finetune/{id}")
        if status != 200 or body["state"] not in ("queued", "running", "succeeded") or body["adapter"] != key:
            found.append(f"job {id}")
    for id, digest in kept.files.items():
        path = data / "files" / id / "content"
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            found.append(f"file {id}")
    for ref, digest in kept.adapters.items():
        status, _ = daemon.call("GET", f"/adapters/{ref}")
        path = data / "adapters" / ref.replace("@", "/") / "adapter_model.safetensors"
        if status != 200 or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            found.append(f"adapter {ref}")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=600.0, help="end earlier, after so long")
    options = parser.parse_args()
    rng, kept, missing, kills, answers, starting = random.Random(SEED), Acknowledged(), set[str](), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root, began = Path(folder), time.monotonic()
        model, data = make_model_folder(root / "model"), root / "data"
        with DaemonProcess(model, data, data_root=root) as daemon:
            daemon.wait_ready()
            _, made = daemon.call("POST", "/finetune", job("first"), {"Idempotency-Key": "first"})
            assert list(daemon.events("GET", f"/finetune/{made['id']}/events"))[-1]["state"] == "succeeded"
            kept.jobs["first"] = made["id"]
            assert daemon.stop() == 0
        adapter = data / "adapters" / "first" / "1"
        while kills < options.kills and time.monotonic() - began < 60 * options.minutes:
            with DaemonProcess(model, data, data_root=root) as daemon:
                if rng.random() < STARTING:
                    time.sleep(rng.uniform(0, 3))
                    os.killpg(daemon.process.pid, signal.SIGKILL)
                    starting += 1
                else:
                    daemon.wait_ready()
                    missing |= set(lost(daemon, data, kept))
                    answers += asyncio.run(load_until_killed(daemon, adapter, rng, kept))
                assert daemon.wait() == -signal.SIGKILL
            kills += 1
            print(f"{kills} kills, {len(kept)} acknowledged, lost: {sorted(missing)}", flush=True)
        with DaemonProcess(model, data, data_root=root) as daemon:
            daemon.wait_ready()
            missing |= set(lost(daemon, data, kept))
            for id in kept.jobs.values():
                with suppress(Died):
                    if list(daemon.events("GET", f"/finetune/{id}/events"))[-1]["state"] == "succeeded":
                        continue
                missing.add(f"job {id}")
            assert daemon.stop() == 0
        minutes = (time.monotonic() - began) / 60
    about = {
        "kills": kills,
        "while_starting": starting,
        "minutes": round(minutes, 1),
        "acknowledged": {"jobs": len(kept.jobs), "files": len(kept.files), "imports": len(kept.adapters)},
        "answers": answers,
        "lost": sorted(missing),
        "note": f"{kills} kills on {cpu_name()}",
    }
    results = Results.of(
        options, FILE, __file__, {"model": "tiny", "rows": json.dumps(ROWS[:1])}, seed=SEED, hardware=cpu_name()
    )
    results.put(KEY, len(missing), "acknowledged jobs, files and adapters", TARGET, about=about)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
