"""What 10,000 registered adapters cost a daemon: seconds of its start, and memory of its API process. Needs no GPU.

    python -m benchmarks.adapters.registration --out benchmarks/results

The bundled base on the CPU. One adapter is imported; the others are registered with links to its files. Starts with one
adapter and with all take turns. The index: the API process's memory after it has listed all adapters, more than with
one; the registry's file is told beside it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.adapters.fleet import get, link, wait_ready, write_adapter
from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target
from benchmarks.serving.http_daemon import daemon, import_adapter
from coserve.core.limits import PAGE_LIMIT
from coserve.core.types import SiteSpec

ADAPTERS, ROUNDS, RANK, HIDDEN = 10_000, 3, 8, 256
SITES = {f"model.layers.0.self_attn.{name}_proj": SiteSpec(HIDDEN, HIDDEN, 0) for name in "qo"}


class Cost(NamedTuple):
    """Seconds until a daemon is ready, and MiB of its API process after a full list."""

    seconds: float
    mib: float


def started(data: Path, root: Path) -> Cost:
    """Start and end a daemon."""
    began = time.monotonic()
    with daemon({"data_dir": data, "data_root": root, "device": "cpu"}, root / "log.txt") as url:
        wait_ready(url)
        seconds, after = time.monotonic() - began, ""
        while True:
            page = json.loads(get(f"{url}/adapters?limit={PAGE_LIMIT}&after={after}"))
            if not page["has_more"]:
                break
            after = page["data"][-1]["id"]
        resident = memory_of_daemon()
    return Cost(seconds, resident)


def memory_of_daemon() -> float:
    """MiB of the process that this one has started with `serve`."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"serve" in Path(f"/proc/{child}/cmdline").read_bytes():
            found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{child}/status").read_text(), re.MULTILINE)
            assert found is not None, child
            return int(found[1]) / 1024
    raise LookupError("no daemon runs")


def main() -> None:
    options = make_parser(__doc__).parse_args()
    results = Results.of(
        options,
        "adapter_registration.json",
        __file__,
        {"adapters": ADAPTERS, "rounds": ROUNDS, "rank": RANK},
        hardware=cpu_name(),
    )
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_adapter(root / "first", SITES, RANK, seed=0)
        for data in (few := root / "few", many := root / "many"):
            with daemon({"data_dir": data, "data_root": root, "device": "cpu"}, root / "log.txt") as url:
                wait_ready(url)
                import_adapter(url, "first")
        link(many, ["first"], [f"adapter-{i:05d}" for i in range(ADAPTERS - 1)])
        registry, found = (many / "registry.sqlite3").stat().st_size / 2**20, list[tuple[Cost, Cost]]()
        for _ in range(ROUNDS):
            found.append((started(few, root), started(many, root)))
            report(results, found, registry)


def report(results: Results, found: Sequence[tuple[Cost, Cost]], registry: float) -> None:
    """Write the medians of the rounds so far. `registry`: MiB of its file."""
    longer = [with_all.seconds - with_one.seconds for with_one, with_all in found]
    larger = [with_all.mib - with_one.mib for with_one, with_all in found]
    start = {
        "start_s_one": [round(one.seconds, 2) for one, _ in found],
        "start_s_all": [round(every.seconds, 2) for _, every in found],
    }
    seconds, mib = round(statistics.median(longer), 3), round(statistics.median(larger), 1)
    results.put(f"adapters.start_s.{ADAPTERS}", seconds, "s longer", Target(1.0, True), longer, start)
    about = {"registry_mb": round(registry, 1)}
    results.put(f"adapters.index_mb.{ADAPTERS}", mib, "MiB", Target(50.0, True), larger, about)


if __name__ == "__main__":
    main()
