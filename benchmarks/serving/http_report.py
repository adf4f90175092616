"""Rows of the HTTP benchmark from its samples, and their keys in the summary.

    python -m benchmarks.serving.http_report [FOLDER/serving_http.json ...]

merges the rows of the named files (results of another machine), then updates `summary.json`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import RESULTS
from benchmarks.common.results import Target, merge_results
from benchmarks.common.summary import Key, update_summary
from coserve.workloads.metrics import Limits, Spread, attains, itl, spread, tpot, ttft
from coserve.workloads.replay import Sample

TIGHT, LOOSE = Limits(ttft=1.0, tpot=0.02), Limits(ttft=5.0, tpot=0.045)
HTTP_TARGET = Target(0.05, most=True)
TTFT_TARGET = "serving.ttft_p99_ms.r20", Target(50.0, most=True)
"""The key and its limit: the first token of requests alone, at 20 a second."""
FILE = "serving_http.json"


def _ms(found: Spread | None) -> dict[str, float] | None:
    """Milliseconds."""
    return None if found is None else {"p50": round(found.p50 * 1e3, 2), "p99": round(found.p99 * 1e3, 2)}


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
    row: dict[str, Any] = {"tok_s": round(tok_s, 1), "offline_tok_s": offline}
    row["http_overhead"] = None if offline is None else round(1 - tok_s / offline, 4)
    return row | latencies(samples)


def online_row(rate: float, seconds: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """Poisson arrivals over `seconds`; goodput is the requests within both limits, per second of arrivals."""
    row: dict[str, Any] = {"rate": rate} | latencies(samples)
    for name, limits in (("1s_20ms", TIGHT), ("5s_45ms", LOOSE)):
        good = sum(attains(sample, limits) for sample in samples)
        row[f"in_slo_{name}"] = round(good / max(1, len(samples)), 4)
        row[f"goodput_{name}"] = round(good / seconds, 2)
    row["out_tok_s"] = round(sum(s.tokens for s in samples) / max(s.finished for s in samples), 1)
    row["lag_ms"] = _ms(spread([sample.sent - sample.due for sample in samples]))
    return row


def rows_of(record: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Rows by adapters or by rate."""
    return {key.split(".")[1]: row for key, row in record["rows"].items() if key.startswith(f"{kind}.")}


def summarize(out: Path = RESULTS) -> None:
    """The keys of `serving_http.json` in `summary.json`."""
    update_summary(out, "serving/over_http.py", FILE, keys(json.loads((out / FILE).read_text())))


def keys(record: dict[str, Any]) -> dict[str, Key]:
    """Those of the rows."""
    found = dict[str, Key]()
    closed = rows_of(record, "closed")
    for adapters, row in closed.items():
        found[f"serving.http.tok_s.b64.{adapters}"] = row["value"], "output tok/s", None, row
        if row["http_overhead"] is not None:
            found[f"serving.http_overhead.{adapters}"] = row["http_overhead"], "fraction", HTTP_TARGET, row
    known = [row for row in closed.values() if row["http_overhead"] is not None]
    if known:
        worst = max(known, key=lambda row: float(row["http_overhead"]))
        found["serving.http_overhead"] = worst["http_overhead"], "fraction", HTTP_TARGET, worst
    for kind in ("online", "beside"):
        for rate, row in rows_of(record, kind).items():
            at = f"serving.{kind}.{rate}"
            for name in ("ttft", "tpot", "itl"):
                for part in ("p50", "p99"):
                    if row[f"{name}_ms"] is not None:
                        found[f"{at}.{name}_{part}_ms"] = row[f"{name}_ms"][part], "ms", None, row
            for name in ("1s_20ms", "5s_45ms"):
                found[f"{at}.in_slo_{name}"] = row[f"in_slo_{name}"], "fraction of requests", None, row
                found[f"{at}.goodput_{name}"] = row[f"goodput_{name}"], "requests/s", None, row
            if "finetune_tok_s" in row:
                found[f"{at}.finetune_tok_s"] = row["finetune_tok_s"], "tok/s", None, row
    if first := found.pop("serving.online.r20.ttft_p99_ms", None):
        key, target = TTFT_TARGET
        found[key] = *first[:2], target, first[3]
    return found


def main() -> None:
    for name in sys.argv[1:]:
        merge_results(Path(name))
    summarize()


if __name__ == "__main__":
    main()
