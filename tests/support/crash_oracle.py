"""What must hold of a daemon's data whatever moment it was killed at.

- an acknowledged job is there, under its id, and one request with one key is one job;
- every adapter is exactly one of those that an uninterrupted run makes, by SHA-256;
- registry and files agree: before the restart no row lacks its files, after it no file lacks its row;
- the loss curve of a job that was interrupted is that of one that was not, to the last bit;
- the daemon restarts unaided.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from tests.support.daemon_process import DaemonProcess, Died, Json

KEY = "0123456789abcdef"
STEPS = 6
FILE = "adapter_model.safetensors"
ROWS = [{"text": f"The {word} of line {n} is read by nobody but the test."} for n, word in enumerate("abcdefghijkl")]
PROMPT = {"prompt": "The quick", "max_tokens": 8, "ignore_eos": True, "seed": 7}
Curve = dict[int, float]


def job_request(adapter: str) -> Json:
    """Six optimizer steps with a checkpoint after every second."""
    training = {
        "steps": STEPS,
        "batch_tokens": 64,
        "max_length": 64,
        "checkpoint_steps": 2,
        "learning_rate": 0.01,
        "seed": 3,
    }
    return {"adapter": adapter, "data": ROWS, "lora": {"r": 2}, "training": training}


def digest(adapter: Path) -> str:
    """SHA-256 of an adapter's tensors. (The file's own differs between equal adapters: its header's order does.)"""
    state = hashlib.sha256()
    for name, tensor in sorted(load_file(adapter / FILE).items()):
        state.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return state.hexdigest()


def curve_of(events: list[Json]) -> Curve:
    """Loss by step; a step that ran twice must have lost the same twice."""
    curve: Curve = {}
    for event in events:
        if event["type"] == "metrics":
            step, loss = event["metrics"]["step"], event["metrics"]["loss"]
            assert curve.setdefault(step, loss) == loss, f"step {step} differs from its first run"
    return curve


@dataclass(frozen=True)
class Reference:
    """What the job does when nothing interrupts it, on a daemon with the key `KEY`."""

    curve: Curve
    digest: str
    text: str
    data: Path
    """The daemon's data folder."""
    adapter: Path
    """The job's adapter in it, a folder to import."""
    children: tuple[bytes, ...]
    """Environment and command line of each child process of the daemon."""
    listening: tuple[int, ...] = ()
    """Ports on which the daemon and its children listen."""


@dataclass
class Oracle:
    """One data folder through many deaths."""

    model: Path
    data: Path
    reference: Reference
    jobs: dict[str, str] = field(default_factory=dict)
    """Acknowledged: id by idempotency key."""
    asked: int = 0
    """Jobs asked for, answered or not."""
    imports: int = 0

    def start(self, failpoints: str = "") -> DaemonProcess:
        return DaemonProcess(self.model, self.data, failpoints=failpoints, data_root=self.reference.adapter)

    # ---- what is done to it

    def submit(self, daemon: DaemonProcess, key: str) -> str:
        """Ask for the job of `key` (again), and remember it once it is acknowledged."""
        self.asked += key not in self.jobs
        status, job = daemon.call("POST", "/finetune", job_request(key), {"Idempotency-Key": key})
        assert status in (200, 201, 202), (status, job)
        assert self.jobs.setdefault(key, job["id"]) == job["id"], "one key made two jobs"
        return str(job["id"])

    def follow(self, daemon: DaemonProcess, id: str) -> list[Json]:
        """All events of a job until it ends."""
        return list(daemon.events("GET", f"/finetune/{id}/events"))

    def bring_in(self, daemon: DaemonProcess) -> tuple[int, Any]:
        self.imports += 1
        body = {"name": f"import-{self.imports}", "path": str(self.reference.adapter)}
        return daemon.call("POST", "/adapters", body)

    def stream(self, daemon: DaemonProcess) -> str:
        """The text of a streamed generation from the base."""
        return "".join(chunk["text"] for chunk in daemon.events("POST", "/generate", PROMPT | {"stream": True}))

    # ---- what must hold

    def check_dead(self) -> None:
        """On the files as the death left them."""
        folder = DataFolder(self.data)
        registry = Registry(folder.database)
        try:
            registry.check()
            kept = {job.spec.id for job in registry.jobs(limit=-1)}
            assert set(self.jobs.values()) <= kept, "an acknowledged job is lost"
            for job in registry.unfinished():
                assert folder.corpus(job.spec.id).is_file(), "a job lost its corpus"
            for ref in registry.adapter_refs():
                file = folder.adapter(ref) / FILE
                assert hashlib.sha256(file.read_bytes()).hexdigest() == registry.adapter(ref.id, ref.version).sha256
                assert digest(folder.adapter(ref)) == self.reference.digest, f"{ref} is not what the job makes"
        finally:
            registry.close()

    def check_alive(self, daemon: DaemonProcess) -> None:
        """On a daemon that has just started again."""
        for key, id in self.jobs.items():
            status, job = daemon.call("GET", f"/finetune/{id}")
            assert (status, job["adapter"]) == (200, key)
            assert job["state"] in ("queued", "running", "succeeded")
        _, listed = daemon.call("GET", "/adapters?limit=100")
        for adapter in listed["data"]:
            assert digest(self.data / "adapters" / adapter["id"] / str(adapter["version"])) == self.reference.digest

    def settle(self) -> None:
        """The last start, unarmed: every job ends as if nothing had happened, and nothing is left over."""
        with self.start() as daemon:
            daemon.wait_ready()
            self.check_alive(daemon)
            for key, id in self.jobs.items():
                assert self.submit(daemon, key) == id
                events = self.follow(daemon, id)
                assert events[-1]["state"] == "succeeded", events[-1]
                assert curve_of(events) == self.reference.curve
            assert self.stream(daemon) == self.reference.text
            assert daemon.stop() == 0
        self.check_dead()
        self.check_tidy()

    def check_tidy(self) -> None:
        """Rows and files are one to one; no temporary file anywhere."""
        folder = DataFolder(self.data)
        registry = Registry(folder.database)
        try:
            assert registry.adapter_refs() == folder.adapter_refs()
            named = {entry.name for entry in folder.adapters.iterdir() if any(entry.iterdir())}
            assert named == {ref.id for ref in folder.adapter_refs()}
            assert set(folder.job_ids()) <= {job.spec.id for job in registry.jobs(limit=-1)}
            assert len(registry.jobs(limit=-1)) <= self.asked
            assert registry.notes() == []
        finally:
            registry.close()
        left = list(folder.root.rglob(".*"))
        assert left == []

    def die_at(self, rule: str, act: str) -> None:
        """Start armed with `rule`, check what the last death left, do `act` until this one; check the files."""
        with self.start(rule) as daemon:
            try:
                daemon.wait_ready()
                self.check_alive(daemon)
                self.act(daemon, act)
            except Died:
                pass
            else:
                raise AssertionError(f"{rule}: the daemon lives")
            assert daemon.wait() == -9, f"{rule}: {daemon.log.read_text()[-2000:]}"
        self.check_dead()

    def act(self, daemon: DaemonProcess, act: str) -> None:
        match act:
            case "job":
                self.follow(daemon, self.submit(daemon, f"adapter-{len(self.jobs)}"))
            case "end":  # of a job, and what comes after its last event
                self.follow(daemon, self.submit(daemon, f"adapter-{len(self.jobs)}"))
                for _ in range(3000):
                    daemon.call("GET", "/health")
                    time.sleep(0.05)
            case "import":
                self.bring_in(daemon)
            case "stream":
                self.stream(daemon)
            case "stop":
                id = self.submit(daemon, f"adapter-{len(self.jobs)}")
                next(daemon.events("GET", f"/finetune/{id}/events"))
                daemon.stop()
                raise Died("told to stop")


@dataclass(frozen=True)
class Restarted:
    """What became of a daemon whose engine was killed in the fifth of the six steps of its second job."""

    oracle: Oracle
    """Of its data folder; the reference is of before: the first job, a text, the processes."""
    restarts: list[int]
    """Of the engine, before the second job and after it."""
    events: list[Json]
    """Of the second job."""
    text: str
    """After the second job."""
