"""Schemathesis over the whole OpenAPI file of a real daemon: `clients.openapi_cases`.

    python -m benchmarks.clients.openapi_cases [--cases 10000] --out benchmarks/results
    python -m benchmarks.clients.openapi_cases --cases 200 --tiny --out /tmp/tried

The daemon serves a tiny base on the CPU; cases are requests that fit a route's schema and requests that violate it. The
value is the number of answers that the OpenAPI file does not allow: a status, content type or body that it does not
describe, or any 5xx but a described 503. `clients.openapi_loop_block`: most CPU milliseconds of the event loop's
thread between two of its beats, on a machine of usual speed (`tests.support.heart`).
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

from benchmarks.common.options import check_tiny, make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target, summarize
from tests.support.heart import Heart
from tests.support.model_folder import make_model_folder

FILE, SEED, KEY, MOST_MS = "openapi_cases.json", 1, "key-of-the-cases", 50.0
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = ("--threads", "1", "--kv-tokens", "4096", "--max-jobs", "4", "--micro-batch-tokens", "512")


def serve(report: str, arguments: Sequence[str]) -> None:
    """Run `coserve serve`; write the longest gap between two beats of its event loop to `report`."""
    from coserve import cli
    from coserve.cli.daemon import http

    make: Callable[..., web.Application] = vars(http)["make_app"]

    def watched(*given: Any, **settings: Any) -> web.Application:  # noqa: ANN401 - as `make_app`
        app = make(*given, **settings)
        hearts = list[Heart]()

        async def begin(_: web.Application) -> None:
            hearts.append(Heart(time.thread_time))
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hearts[0].take)

        async def end(_: web.Application) -> None:
            found = hearts[0].take()
            Path(report).write_text(str(1000 * found["longest"] / found["slow"]))  # noqa: ASYNC240 - the loop ends

        app.on_startup.append(begin)
        app.on_shutdown.append(end)
        return app

    sys.argv = ["coserve", "serve", *arguments]
    with patch.object(http, "make_app", watched):
        cli.main()


@contextmanager
def daemon(root: Path) -> Iterator[str]:
    """Run a daemon; yields its URL once it is ready."""
    command = [sys.executable, "-m", "benchmarks.clients.openapi_cases", "--serve", str(root / "block"), "--"]
    model = make_model_folder(root / "base")
    given = ["--model", str(model), "--data-dir", str(root / "data"), "--port", "0", *OPTIONS]
    environment = os.environ | {"COSERVE_API_KEY": KEY, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (root / "daemon.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *given], stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if "listens on" in line), None)
        if line is None:
            raise SystemExit(f"the daemon did not start:\n{(root / 'daemon.log').read_text()[-3000:]}")
        url = line.split()[-1]
        asyncio.run(_ready(url))
        process.send_signal(signal.SIGUSR1)  # measure from now on
        yield url
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


async def _ready(url: str) -> None:
    from coserve.client import AsyncClient

    async with AsyncClient(url, api_key=KEY) as client:
        await client.wait_ready(timeout=600)


def operations(url: str) -> int:
    request = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        paths: dict[str, dict[str, object]] = json.load(answer)["paths"]
    verbs = {"get", "post", "put", "patch", "delete"}
    return sum(len(verbs & set(path)) for path in paths.values())


def wrong_answers(report: dict[str, Any], statuses: Mapping[int, int]) -> int:
    """Answers that the OpenAPI file does not allow, and every 5xx but 503."""
    undocumented = sum(number for status, number in statuses.items() if status >= 500 and status != 503)
    return undocumented + sum(int(one["count"]) for one in report["failures"])


def run(
    url: str, each: int, seconds: int, root: Path, phases: str = "coverage,fuzzing"
) -> tuple[dict[str, Any], Counter[int]]:
    """Send `each` random cases to every operation, and more until `seconds` have gone (0: no more). Returns
    Schemathesis' report, and the number of answers by status."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--phases", phases]
    command += ["-n", str(each), "--seed", str(SEED), "--no-shrink", "--continue-on-failure", "--checks", CHECKS]
    command += ["-H", f"Authorization: Bearer {KEY}", "--suppress-health-check", "all", "--warnings", "off"]
    command += ["--request-timeout", "120", "--generation-database", "none", "--no-color", "--report", "json,ndjson"]
    command += ["--max-time", str(seconds)] if seconds else []
    root = root.resolve()  # its folder, since it keeps what it found there
    command += ["--report-json-path", str(root / "report.json"), "--report-ndjson-path", str(root / "events.ndjson")]
    with (root / "schemathesis.log").open("w") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, cwd=root)
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
    parser.add_argument("--seconds", type=int, default=0, help="at most; begin again until then")
    parser.add_argument("--keep", type=Path, help="keep the logs and reports of the run in this folder")
    parser.add_argument("--serve", help="(internal) run the daemon, and write its event loop's longest block here")
    parser.add_argument("arguments", nargs="*", help="(internal) of the daemon")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.arguments)
        return
    check_tiny(parser, options)
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        with daemon(root) as url:
            count = operations(url)
            report, statuses = run(url, -(-options.cases // count), options.seconds, root)
        block = float((root / "block").read_text())
        print((root / "schemathesis.log").read_text()[-6000:])
    results = Results.of(
        options,
        FILE,
        script="benchmarks.clients.openapi_cases",
        hardware=cpu_name(),
        seed=SEED,
        settings={"cases": options.cases},
    )
    about = {
        "cases": report["test_cases"]["generated"],
        "operations": report["operations"]["tested"],
        "statuses": {str(status): statuses[status] for status in sorted(statuses)},
        "failures": [{key: one[key] for key in ("title", "count", "operations")} for one in report["failures"]],
    }
    results.put("clients.openapi_cases", wrong_answers(report, statuses), "answers", Target(0, most=True), about=about)
    results.put("clients.openapi_loop_block", round(block, 1), "ms of CPU", Target(MOST_MS, most=True))
    if not options.tiny and options.out.resolve() == Path("benchmarks/results").resolve():
        summarize(FILE, options.out)


if __name__ == "__main__":
    main()
