"""From the samples of the HTTP benchmark to rows, the result's file and the summary's keys.

    python -m benchmarks.http_report FOLDER/serving_http.json

keeps a result that another machine made: in benchmarks/results, with its keys in the summary.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coserve.workloads.metrics import Limits, Spread, itl, keeps, spread, tpot, ttft
from coserve.workloads.replay import Sample

TIGHT, LOOSE = Limits(ttft=1.0, tpot=0.02), Limits(ttft=5.0, tpot=0.045)
HTTP_TARGET = 0.05


def _ms(found: Spread | None) -> dict[str, float] | None:
    """Milliseconds."""
    return found and {"p50": round(found.p50 * 1e3, 2), "p99": round(found.p99 * 1e3, 2)}


def latencies(samples: Sequence[Sample]) -> dict[str, Any]:
    good = [sample for sample in samples if sample.error is None]
    return {
        "requests": len(samples),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "ttft_ms": _ms(spread([value for sample in good if (value := ttft(sample)) is not None])),
        "tpot_ms": _ms(spread([value for sample in good if (value := tpot(sample)) is not None])),
        "itl_ms": _ms(spread([gap for sample in good for gap in itl(sample)])),
        "tokens_a_chunk": round(sum(s.tokens for s in good) / max(1, sum(len(s.times) for s in good)), 3),
    }


def closed_row(samples: Sequence[Sample], offline: float | None) -> dict[str, Any]:
    """A closed loop, from the first request's sending to the last token's arrival."""
    seconds = max(s.finished for s in samples) - min(s.sent for s in samples)
    tok_s = sum(s.tokens for s in samples) / seconds
    row = {"tok_s": round(tok_s, 1), "offline_tok_s": offline}
    row["http_overhead"] = None if offline is None else round(1 - tok_s / offline, 4)
    return row | latencies(samples)


def online_row(rate: float, seconds: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """Poisson arrivals over `seconds`; goodput counts the requests that kept both limits, a second of arrivals."""
    row: dict[str, Any] = {"rate": rate} | latencies(samples)
    for name, limits in (("1s_20ms", TIGHT), ("5s_45ms", LOOSE)):
        kept = sum(keeps(sample, limits) for sample in samples)
        row[f"in_slo_{name}"] = round(kept / max(1, len(samples)), 4)
        row[f"goodput_{name}"] = round(kept / seconds, 2)
    row["out_tok_s"] = round(sum(s.tokens for s in samples) / max(s.finished for s in samples), 1)
    row["lag_ms"] = _ms(spread([sample.sent - sample.due for sample in samples]))
    return row


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "aiohttp", "msgspec", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _hardware(tiny: bool) -> str:
    if tiny:
        return platform.processor() or platform.machine()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(out: Path, record: dict[str, Any], *, seed: int, revision: str, tiny: bool) -> None:
    """`serving_http.json`, and this benchmark's own keys of `summary.json`."""
    now = datetime.now(UTC)
    head = {
        "hardware": _hardware(tiny),
        "versions": versions(),
        "commit": revision or commit(),
        "command": " ".join(["python", "-m", "benchmarks.serving_http", *sys.argv[1:]]),
        "seed": seed,
        "date": now.isoformat(timespec="seconds"),
    }
    keep(out, head | record)


def keep(out: Path, record: dict[str, Any]) -> None:
    (out / "serving_http.json").write_text(json.dumps(record, indent=1) + "\n")
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    for key, (value, unit, target) in keys(record).items():
        summary[key] = {
            "value": value,
            "unit": unit,
            "target": target,
            "script": "benchmarks/serving_http.py",
            "result": "benchmarks/results/serving_http.json",
            "date": record["date"][:10],
        }
    path.write_text(json.dumps(dict(sorted(summary.items())), indent=1) + "\n")


def keys(record: dict[str, Any]) -> dict[str, tuple[float, str, str]]:
    """Key -> value, unit, target."""
    found: dict[str, tuple[float, str, str]] = {}
    closed = record.get("closed", {})
    for adapters, row in closed.items():
        found[f"serving.http.tok_s.b64.{adapters}"] = row["tok_s"], "output tok/s", "(not set)"
        if row["http_overhead"] is not None:
            found[f"serving.http_overhead.{adapters}"] = row["http_overhead"], "fraction", f"<= {HTTP_TARGET}"
    overheads = [row["http_overhead"] for row in closed.values() if row["http_overhead"] is not None]
    if overheads:
        found["serving.http_overhead"] = max(overheads), "fraction", f"<= {HTTP_TARGET}"
    for kind in ("online", "beside"):
        for row in record.get(kind, []):
            at = f"serving.{kind}.r{row['rate']:g}"
            for name in ("ttft", "tpot", "itl"):
                for part in ("p50", "p99"):
                    if row[f"{name}_ms"] is not None:
                        found[f"{at}.{name}_{part}_ms"] = row[f"{name}_ms"][part], "ms", "(not set)"
            for name in ("1s_20ms", "5s_45ms"):
                found[f"{at}.in_slo_{name}"] = row[f"in_slo_{name}"], "fraction of requests", "(not set)"
                found[f"{at}.goodput_{name}"] = row[f"goodput_{name}"], "requests/s", "(not set)"
            if "finetune_tok_s" in row:
                found[f"{at}.finetune_tok_s"] = row["finetune_tok_s"], "tok/s", "(not set)"
    return found


if __name__ == "__main__":
    keep(Path("benchmarks/results"), json.loads(Path(sys.argv[1]).read_text()))
