"""Schemathesis over the whole OpenAPI file of a real daemon: `clients.openapi_cases`.

    python -m benchmarks.clients.openapi_cases [--cases 10000] [--part 1/4] --out benchmarks/results
    python -m benchmarks.clients.openapi_cases --cases 200 --tiny --out /tmp/tried

The daemon serves a tiny base on the CPU; cases are requests that fit a route's schema and requests that violate it. The
value is the number of answers that the OpenAPI file does not allow: a status, content type or body that it does not
describe, or any 5xx but a described 503. `clients.openapi_loop_block`: most CPU milliseconds of the event loop's
thread between two of its beats (`tests.support.heart`); with it, the callbacks that kept the loop longest. Each part
has its own operations and daemon; parts of one commit add up in the result.
Needs schemathesis (`tests/harness.txt`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aiohttp import web

from benchmarks.clients.callbacks import measured_callbacks
from benchmarks.common.options import make_parser
from benchmarks.common.provenance import ROOT, cpu_name
from benchmarks.common.results import Results, Target, summarize
from tests.support.daemon_process import DaemonProcess
from tests.support.heart import Heart
from tests.support.model_folder import make_model_folder

FILE, SEED, KEY, MOST_MS, CONTEXT = "openapi_cases.json", 1, "key-of-the-cases", 50.0, 64
PHASES = "coverage,fuzzing"
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = ("--kv-tokens", "4096", "--max-jobs", "4", "--micro-batch-tokens", "512")


def serve(report: str, arguments: Sequence[str]) -> None:
    """Run `coserve serve`; write to `report` the most CPU milliseconds between two beats of its event loop, and its
    longest callbacks."""
    from coserve import cli
    from coserve.cli.daemon import http

    make: Callable[..., web.Application] = vars(http)["make_app"]

    def watched(*given: Any, **settings: Any) -> web.Application:  # noqa: ANN401 - as `make_app`
        app = make(*given, **settings)
        hearts = list[Heart]()

        def measure() -> None:
            hearts[0].longest = 0.0
            callbacks.clear()

        async def begin(_: web.Application) -> None:
            hearts.append(Heart(time.thread_time))
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, measure)

        async def end(_: web.Application) -> None:
            found = {"block": round(1000 * hearts[0].longest, 1), "callbacks": callbacks}
            Path(report).write_text(json.dumps(found))  # noqa: ASYNC240 - the loop ends

        app.on_startup.append(begin)
        app.on_shutdown.append(end)
        return app

    sys.argv = ["coserve", "serve", *arguments]
    with patch.object(http, "make_app", watched), measured_callbacks(MOST_MS / 5000) as callbacks:
        cli.main()


@contextmanager
def daemon(root: Path) -> Iterator[str]:
    """Run a daemon; yields its URL once it is ready."""
    model, environ = make_model_folder(root / "base", CONTEXT), {"COSERVE_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    module = ("benchmarks.clients.openapi_cases", "--serve", str(root / "block"), "--")
    with DaemonProcess(model, root / "data", options=OPTIONS, environ=environ, module=module) as running:
        running.wait_ready()
        asyncio.run(_ready(running.url))
        running.process.send_signal(signal.SIGUSR1)  # measure from now on
        yield running.url
        running.stop()


async def _ready(url: str) -> None:
    from coserve.client import AsyncClient

    async with AsyncClient(url, api_key=KEY) as client:
        await client.wait_ready(timeout=600)


def make_records(url: str, root: Path) -> dict[str, list[str]]:
    """Train an adapter, import it under further names and make one record of each other kind; `known_records` has a
    half of the cases use their names, which are returned by path or field."""
    from coserve.client import Client

    rows = [{"prompt": "the cat", "completion": " sat"}]
    training = {"epochs": 1, "max_length": 32}
    with Client(url, api_key=KEY) as client:
        jobs = [client.finetune("first", rows, training=training)]
        jobs[0].wait()
        client.download_adapter("first", root / "first")
        adapters = [client.import_adapter(f"import-{number}", root / "first").id for number in range(8)]
        jobs += [client.finetune(f"trained-{number}", rows, training=training) for number in range(2)]
        jobs += [client.finetune("endless", rows, training=training | {"epochs": 1000})]
        aliases = [client.set_alias(f"alias-{number}", adapters[number]).name for number in range(8)]
        sessions = [client.training_session(r=2).id]
    ids = [job.id for job in jobs]
    adapters += ["first"]
    return {
        "/adapters": adapters,
        "adapter": adapters,
        "model": [*adapters, *aliases, "base"],
        "base_model": ["base"],
        "/v1/models": adapters,
        "/aliases": aliases,
        "/finetune": ids,
        "/v1/fine_tuning/jobs": ids,
        "/sessions": sessions,
    }


def operations(url: str) -> dict[str, int]:
    """Number of operations of each path."""
    request = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        paths: dict[str, dict[str, object]] = json.load(answer)["paths"]
    verbs = {"get", "post", "put", "patch", "delete"}
    return {path: len(verbs & set(paths[path])) for path in sorted(paths)}


def wrong_answers(report: dict[str, Any], statuses: Mapping[int, int]) -> int:
    """Answers that the OpenAPI file does not allow, and every 5xx but 503."""
    undocumented = sum(number for status, number in statuses.items() if status >= 500 and status != 503)
    return undocumented + sum(int(one["count"]) for one in report["failures"])


def run(
    url: str, each: int, root: Path, known: Mapping[str, list[str]], paths: Sequence[str] = (), phases: str = PHASES
) -> tuple[dict[str, Any], Counter[int]]:
    """Send `each` random cases to every operation of `paths` (none: of all). Returns Schemathesis' report, and the
    number of answers by status. `known`: as `make_records` returns."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--phases", phases]
    command += ["-n", str(each), "--seed", str(SEED), "--no-shrink", "--continue-on-failure", "--checks", CHECKS]
    command += ["-H", f"Authorization: Bearer {KEY}", "--suppress-health-check", "all", "--warnings", "off"]
    command += ["--request-timeout", "120", "--generation-database", "none", "--no-color", "--report", "json,ndjson"]
    command += [argument for path in paths for argument in ("--include-path", path)]
    root = root.resolve()  # its folder, since it keeps what it found there
    command += ["--report-json-path", str(root / "report.json"), "--report-ndjson-path", str(root / "events.ndjson")]
    hooks = {"SCHEMATHESIS_HOOKS": "benchmarks.clients.known_records", "KNOWN_RECORDS": json.dumps(known)}
    hooks |= {"PYTHONPATH": str(ROOT)}
    with (root / "schemathesis.log").open("w") as log:
        done = subprocess.run(
            command, check=False, stdout=log, stderr=subprocess.STDOUT, cwd=root, env=os.environ | hooks
        )
    if done.returncode > 1:
        raise SystemExit(f"schemathesis failed:\n{(root / 'schemathesis.log').read_text()[-3000:]}")
    statuses = Counter[int]()
    with (root / "events.ndjson").open() as events:
        for line in events:
            if finished := json.loads(line).get("ScenarioFinished"):
                for one in finished["recorder"]["interactions"].values():
                    if one.get("response") is not None:
                        statuses[one["response"]["status_code"]] += 1
    return json.loads((root / "report.json").read_text()), statuses


def main() -> None:
    parser = make_parser(__doc__, tiny="few cases, to try the script")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--part", default="1/1", help="I/N: every Nth path from the Ith on; the parts add up")
    parser.add_argument("--keep", type=Path, help="keep the logs and reports of the run in this folder")
    parser.add_argument("--serve", help="(internal) run the daemon, and write its event loop's longest block here")
    parser.add_argument("arguments", nargs="*", help="(internal) of the daemon")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        with daemon(root) as url:
            numbers = operations(url)
            first, parts = map(int, options.part.split("/"))
            each, paths = -(-options.cases // sum(numbers.values())), list(numbers)[first - 1 :: parts]
            report, statuses = run(url, each, root, make_records(url, root), paths)
        loop = json.loads((root / "block").read_text())
        print((root / "schemathesis.log").read_text()[-6000:])
    results = Results.of(
        options, FILE, __file__, {"cases": options.cases, "part": options.part}, seed=SEED, hardware=cpu_name()
    )
    about: dict[str, Any] = {
        "cases": report["test_cases"]["generated"],
        "operations": report["operations"]["tested"],
        "statuses": Counter({str(status): statuses[status] for status in sorted(statuses)}),
        "failures": [{key: one[key] for key in ("title", "count", "operations")} for one in report["failures"]],
        "parts": [options.part],
    }
    wrong, block = wrong_answers(report, statuses), loop["block"]
    longest = loop["callbacks"]
    answers, stood = results.row("clients.openapi_cases"), results.row("clients.openapi_loop_block")
    if answers and stood and options.part not in answers.get("parts", [options.part]):
        wrong, block = wrong + answers["value"], max(block, stood["value"])
        about = {key: type(value)(answers[key]) + value for key, value in about.items()}
        longest = [*stood["longest"], *longest]
    results.put("clients.openapi_cases", wrong, "answers", Target(0, most=True), about=about)
    about = {"longest": sorted(longest, key=lambda one: -max(one["cpu"], one["waited"]))[:5]}
    results.put("clients.openapi_loop_block", block, "ms of CPU", Target(MOST_MS, most=True), about=about)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
