"""Start-up time of the daemon until it answers, and until full speed: first start and second start.

    python -m benchmarks.serving_startup --out benchmarks/results
    python -m benchmarks.serving_startup --tiny --out /tmp/tried

`coserve serve` on the Llama-3.1-8B shape with random weights, twice, with the compilers' caches in a folder that is empty
at first; all settings but `--compile` are the defaults. Seconds from the process's start: until it answers, until a
request's first token, until no note says that compilation is under way, until everything is compiled (`/health` says
`ready`), and until a request runs at full speed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.http_case import FULL, SEED, SMALL, Size, model_folder
from benchmarks.http_daemon import daemon
from benchmarks.options import check_tiny, make_parser
from benchmarks.serving_http import hardware
from benchmarks.serving_results import Results, Target, summarize
from coserve.client import Client
from coserve.generate.execution.start import COMPILING

TARGETS = {"cold": None, "second": Target(60.0, most=True)}
PATIENCE = 240.0
TOKENS = 32


def start(size: Size, model: Path, root: Path, *, when: str) -> dict[str, float]:
    """Seconds since the start of the daemon's process, by what had happened by then."""
    settings = {
        "model": model,
        "data_dir": root / "data",
        "load_format": "dummy",
        "device": size.device,
        "compile": when,
    }
    caches = {name: str(root / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    began = time.monotonic()
    found = dict[str, float]()

    def note(what: str) -> None:
        found[what] = round(time.monotonic() - began, 2)

    with daemon(settings, root / "daemon.log", **caches) as url, Client(url) as client:
        note("ready_s")
        stream = client.stream("The first words of all", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        next(iter(stream))
        note("first_token_s")
        for _ in stream:
            pass
        note("first_request_s")
        while COMPILING in client.health().notes:
            if time.monotonic() - began > PATIENCE:
                raise SystemExit(f"still compiling after {PATIENCE:.0f} s: {client.health().notes}")
            time.sleep(0.1)
        note("compiled_s")
        client.wait_ready(timeout=PATIENCE)
        note("warm_s")
        for what in ("next_request_s", "full_speed_s"):
            sent = time.monotonic()
            client.generate("The words that come after", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            note(what)
        found["ms_a_token"] = round((time.monotonic() - sent) / TOKENS * 1e3, 2)
    return found


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    parser.add_argument("--compile", default="background", choices=("background", "before", "off"))
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the base, the data and the caches")
    options = parser.parse_args()
    check_tiny(parser, options)
    size = SMALL if options.tiny else FULL
    results = Results(
        options.out,
        "serving.json",
        script="benchmarks.serving_startup",
        hardware=hardware(options.tiny),
        seed=SEED,
        revision=options.commit,
        settings={"compile": options.compile},
    )
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        model = model_folder(root / "model", size)
        for which, target in TARGETS.items():
            found = start(size, model, root, when=options.compile)
            print(which, found, flush=True)
            results.put(f"serving.startup_s.{which}", found["compiled_s"], "s", target, about=found)
    summarize(options.out)


if __name__ == "__main__":
    main()
