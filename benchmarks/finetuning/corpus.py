"""How fast corpora are tokenised, by how many processes or threads, and in how much memory. No GPU.

    python -m benchmarks.finetuning.corpus [--rows 100000] [--workers 1 2 4]

Each case is a JSONL file of random words, with the bundled base's tokenizer; `--workers` processes tokenise it as for a
job. Beside it: the tokenizer's own threads (`encode_batch`), and what a training process holds of a corpus. Wall time,
and CPU time of all processes: where other programs run, only the latter compares.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from coserve.api.jobs.preparation import CorpusPreparation, Tokenization
from coserve.core.processes import usable_cores
from coserve.data.offload.pool import HelperPool
from coserve.data.pretrained.tokenizer import Tokenizer

FILE = "corpus.json"
WORDS = Path(__file__).resolve().parents[2] / "coserve" / "assets" / "prompts.txt"
TURNS = 4
LONG_WORDS = 3000
BATCH = 1000
"""Texts that the tokenizer's threads share at once."""
CASES: dict[str, float] = {"short": 1.0, "chat": 0.1, "long": 0.005}
"""Rows of each case, as a share of `--rows`."""

Text = Callable[[int], str]


def rows(case: str, count: int, text: Text) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        if case == "short":
            yield {"prompt": text(12), "completion": " " + text(12)}
        elif case == "chat":
            roles = ("user", "assistant") * (TURNS // 2)
            yield {"messages": [{"role": role, "content": text(10)} for role in roles]}
        else:
            yield {"text": text(LONG_WORDS)}


def write(path: Path, case: str, count: int, seed: int) -> None:
    generator, words = random.Random(seed), WORDS.read_text().split()
    with path.open("w") as file:
        for row in rows(case, count, lambda length: " ".join(generator.choices(words, k=length))):
            file.write(json.dumps(row) + "\n")


def peaks() -> list[int]:
    """Peak resident bytes of each child process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            status = Path("/proc", child, "status").read_text()
            found.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
    return found


def cpu_seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


async def tokenized(source: Path, workers: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Tokenise a file as for a job."""
    pool = HelperPool(tokenizer.state, workers)
    began, cpu = time.perf_counter(), cpu_seconds()
    corpus = await CorpusPreparation(pool, source.parent / "staging", workers).tokenize(source, Tokenization(4096))
    seconds, memory = time.perf_counter() - began, peaks()
    await pool.close()
    corpus.discard()
    return {
        "rows": corpus.rows,
        "tokens": corpus.token_count,
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_seconds() - cpu, 2),
        "tokens_s": round(corpus.token_count / seconds),
        "worker_peak_bytes": max(memory),
        "daemon_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def encoded(path: Path, threads: int) -> None:
    """Tokenise the texts of a file of long or short rows, and nothing more; for a process of its own. Prints the
    seconds."""
    backend = Tokenizer.load("bundled")._backend
    texts = ["".join(map(str, json.loads(line).values())) for line in path.read_text().splitlines()]
    began, cpu = time.perf_counter(), time.process_time()
    if threads:
        for start in range(0, len(texts), BATCH):
            backend.encode_batch(texts[start : start + BATCH])
    else:
        for text in texts:
            backend.encode(text)
    print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "texts": len(texts)}))


def thread_rates(path: Path, threads: int) -> dict[str, float]:
    """As `encoded`, in a process whose tokenizer has so many threads; 0: texts are encoded one by one."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(max(1, threads))}
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.finetuning.corpus",
        "--encode",
        str(path),
        "--threads",
        str(threads),
    ]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment | {"PYTHONPATH": str(root)}, capture_output=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {key: round(value, 2) for key, value in found.items()}


def measure(results: Results, folder: Path, counts: dict[str, int], workers: Sequence[int], seed: int) -> None:
    tokenizer = Tokenizer.load("bundled")
    for case, count in counts.items():
        source = folder / f"{case}.jsonl"
        write(source, case, count, seed)
        about: dict[str, float] = {"file_bytes": source.stat().st_size}
        for number in workers:
            found = asyncio.run(tokenized(source, number, tokenizer))
            key = f"corpus.rows_s.{case}.{count}.workers{number}"
            results.put(key, round(found["rows"] / found["seconds"]), "rows/s", about=about | found)
        for threads in (0, *workers) if case != "chat" else ():
            rates = thread_rates(source, threads)
            name = f"threads{threads}" if threads else "one_by_one"
            key = f"corpus.encode_rows_s.{case}.{count}.{name}"
            results.put(key, round(rates["texts"] / rates["seconds"]), "rows/s", about=rates)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--encode", type=Path, help="of a process that this one starts")
    parser.add_argument("--threads", type=int, default=0, help="likewise")
    options = parser.parse_args()
    if options.encode is not None:
        encoded(options.encode, options.threads)
        return
    results = Results.of(
        options,
        FILE,
        script="benchmarks.finetuning.corpus",
        hardware=cpu_name(),
        seed=0,
        settings={"rows": options.rows, "cores": usable_cores()},
    )
    counts = {case: max(1, round(options.rows * CASES[case])) for case in options.cases}
    with tempfile.TemporaryDirectory() as folder:
        measure(results, Path(folder), counts, options.workers, seed=0)


if __name__ == "__main__":
    main()
