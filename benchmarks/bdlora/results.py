"""Rows of `bdlora/measure.py`, what follows from them, and their keys in `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bdlora.loads import Measured, loads_of, speedups, table_2
from benchmarks.bdlora.plan import Item
from benchmarks.bdlora.plots import draw
from benchmarks.common.options import RESULTS
from benchmarks.common.results import Results, Target, merge_results
from benchmarks.common.summary import update_summary

FILE, LOADS_FILE, TABLE = "bdlora.json", "bdlora_loads.json", "bdlora_table.md"
RETAINED = 128
"""Rank of the retention."""
LEAST_RANK = 64
"""Of the speedups."""
TARGETS = {
    "speedup_vs_slora": {2: 1.15, 4: 1.5},
    "speedup_vs_nfs": {2: 1.05, 4: 1.1},
    "speedup_vs_slora.8b": {8: 1.63},
    "speedup_vs_slora.70b": {8: 1.79},
}
DOUBLED = {
    "tp.decode_speedup.tp{}_{}.8b": ("8b.tp{tp}.decode_ms.base.b1.c272", {}),
    "tp.decode_speedup.tp{}_{}.70b": ("70b.tp{tp}.decode_ms.base.b1.c272", {2: 1.6, 4: 1.45}),
    "tp.finetune_speedup.tp{}_{}": ("8b.tp{tp}.train_s", {4: 1.6}),
}
"""Keys of twice as many GPUs over 2 or 4: the row, and targets."""


def prefix(model: str, size: int) -> str:
    """Return the start of the keys of a base's rows. That of a whole base on one GPU names the run's GPUs too: a run on
    another number of them measures its own."""
    shape, _, alone = model.partition("@")
    return f"bdlora.{shape}.tp{f'{alone}of' if alone else ''}{size}"


def key_of(item: Item, size: int) -> str:
    """The row's key."""
    start, variant, load = prefix(item.model, size), item.variant.name, item.load
    match item.what:
        case "generate":
            return f"{start}.tok_s.{variant}.{load.name}"
        case "decode":
            several = f".a{item.adapters}" if item.adapters > 1 else ""
            return f"{start}.decode_ms.{variant}.b{load.batch}.c{load.context}{several}"
        case "prefill":
            return f"{start}.prefill_ms.{variant}.{load.prompt}"
        case "profile":
            return f"{start}.profile_ms.{variant}.b{load.batch}.c{load.context}"
        case "messages":
            return f"bdlora.all_reduce_us.tp{size}"
    return f"{start}.{item.what}_s"


def put(results: Results, item: Item, size: int, found: dict[str, Any], wall_s: float) -> None:
    """Writes the row of what was found."""
    variant, load = item.variant, item.load
    about: dict[str, Any] = {
        "what": item.what,
        "shape": variant.shape,
        "tp": 1 if item.model.endswith("@1") else size,
        "strategy": variant.strategy or "base",
        "lora_rank": variant.rank,
        "wall_s": wall_s,
    }
    if item.what not in ("train", "messages"):
        about |= {"batch": load.batch, "prompt": load.prompt}
    match item.what:
        case "generate":
            tokens = load.batch * load.output
            speeds = sorted(tokens / seconds for seconds in found["e2e_s"])
            value, unit, values = speeds[len(speeds) // 2], "output tok/s", speeds
            about |= {"output": load.output}
        case "decode":
            spread = found["decode_ms"]
            value, unit, values = spread["median"], "ms", [spread["low"], spread["high"]]
            about |= {"context": load.context, "tok_s": round(load.batch * 1e3 / value, 1)}
        case "prefill":
            spread = found["prefill_ms"]
            value, unit, values = spread["median"], "ms", [spread["low"], spread["high"]]
        case "messages":
            times = found["us"]
            value, unit, values = times.get("mesh.8", 0.0), "us", []
        case "profile":
            value, unit, values = found["step_ms"], "ms", [found["step_ms"]]
            about |= {"context": load.context}
        case _:
            spread = found["step_s"]
            value, unit, values = spread["median"], "s", [spread["low"], spread["high"]]
            about |= {"tok_s": round(found["tokens"] / value)}
    results.put(key_of(item, size), round(value, 4), unit, None, [round(one, 4) for one in values], about | found)


def summarize(out: Path, files: Sequence[Path]) -> None:
    """Takes in the rows of other machines' files, then writes loads, the table, the figures and the keys."""
    for file in files:
        merge_results(file, out)
    content = json.loads((out / FILE).read_text())
    rows = content["rows"]
    loads = loads_of(rows)
    (out / LOADS_FILE).write_text(json.dumps([one.record() for one in loads], indent=1) + "\n")
    (out / TABLE).write_text(table_2(loads))
    found = {key: (FILE, what) for key, what in keys(rows, loads, _cards(content["runs"])).items()}
    for key, (name, (value, target, row, unit)) in (_runs_with_one_gpu(out, rows) | found).items():
        update_summary(out, "bdlora/measure.py", name, {key: (round(value, 4), unit, target, row)})
    if loads:
        draw(loads, Path("docs/figures") if out == RESULTS else out)


Key = tuple[float, Target | None, dict[str, Any], str]
"""Value, target, the row that gives date and note, unit."""


def _cards(runs: dict[str, Any]) -> dict[str, str]:
    """Return the kind of GPU of each run."""
    return {run: about["hardware"].partition(" x ")[2] for run, about in runs.items()}


def keys(rows: dict[str, dict[str, Any]], loads: Sequence[Measured], cards: dict[str, str]) -> dict[str, Key]:
    """Return the keys for which there are rows. `cards`: the kind of GPU of each run; rows of different kinds are not
    compared."""
    found = dict[str, Key]()
    for tp in sorted({row["tp"] for row in rows.values() if row.get("tp", 1) > 1}):
        found |= _speedup_keys(tp, [one for one in loads if one.tp == tp])
        found |= _retention(rows, tp) | _over_one_gpu(rows, tp)
    for few in (2, 4):
        for key, (name, target) in DOUBLED.items():
            some, more = (rows.get(f"bdlora.{name.format(tp=tp)}") for tp in (few, 2 * few))
            if some is not None and more is not None and cards.get(some["run"]) == cards.get(more["run"]):
                least, ratio = target.get(few), some["value"] / more["value"]
                found[key.format(few, 2 * few)] = ratio, None if least is None else Target(least), more, "ratio"
    return found


def _speedup_keys(tp: int, loads: Sequence[Measured]) -> dict[str, Key]:
    """Of `bd` over the other strategies, by throughput of a load."""
    found = dict[str, Key]()
    for shape in ("8b", "70b"):
        own = [one for one in speedups(loads) if one.of.shape == shape]
        for other in ("slora", "nfs"):
            name = f"speedup_vs_{other}"
            target_load = [
                one
                for one in own
                if one.over.strategy == other
                and (one.of.load.batch, one.of.load.prompt, one.of.load.output) == (1, 16, 512)
                and one.of.lora_rank >= LEAST_RANK
            ]
            if target_load:
                least = min(target_load, key=lambda one: one.ratio)
                key = f"bd.{name}.tp{tp}"
                if shape == "8b":
                    target = TARGETS.get(name, {}).get(tp)
                    found[key] = least.ratio, None if target is None else Target(target), least.of.row, "ratio"
                most = max(target_load, key=lambda one: one.ratio) if tp == 8 else least
                target = TARGETS.get(f"{name}.{shape}", {}).get(tp)
                found[f"{key}.{shape}"] = most.ratio, None if target is None else Target(target), most.of.row, "ratio"
        if own:
            least = min(own, key=lambda one: one.ratio)
            suffix = "" if shape == "8b" else f".{shape}"
            found[f"bd.min_speedup.tp{tp}{suffix}"] = least.ratio, Target(0.98), least.of.row, "ratio"
    return found


def _retention(rows: dict[str, dict[str, Any]], tp: int) -> dict[str, Key]:
    """Decode speed of `bd` over the base's, the smaller of batch 1 and 64."""
    found = dict[str, Key]()
    for shape in ("8b", "70b"):
        ratios = list[tuple[float, dict[str, Any]]]()
        for batch in (1, 64):
            start, end = f"bdlora.{shape}.tp{tp}.decode_ms", f"b{batch}.c272"
            base, bd = rows.get(f"{start}.base.{end}"), rows.get(f"{start}.bd.r{RETAINED}.{end}")
            if base is not None and bd is not None:
                ratios.append((base["value"] / bd["value"], bd))
                found[f"bd.retention.tp{tp}.{shape}.b{batch}"] = base["value"] / bd["value"], None, bd, "fraction"
                if (shape, batch) == ("8b", 1):
                    found[f"bd.step_over_base.tp{tp}"] = (
                        bd["value"] / base["value"],
                        Target(1.12, most=True),
                        bd,
                        "ratio",
                    )
        if len(ratios) == 2 and shape == "8b":
            value, row = min(ratios, key=lambda pair: pair[0])
            found[f"bd.retention.tp{tp}"] = value, Target(0.9), row, "fraction"
    return found


def _runs_with_one_gpu(out: Path, rows: dict[str, dict[str, Any]]) -> dict[str, tuple[str, Key]]:
    """Keys of the last runs on one GPU and on all, of earlier results too, as a later run may have measured one of the
    two alone; with the file's name."""
    found = dict[str, tuple[str, Key]]()
    for path in sorted(out.glob("bdlora_*.json")):
        content = json.loads(path.read_text())
        for tp in {row["tp"] for row in rows.values() if row.get("tp", 1) > 1} if "rows" in content else ():
            for key, what in _over_one_gpu(content["rows"], tp).items():
                if key.endswith(f"_speedup.tp{tp}") and (
                    key not in found or found[key][1][2]["date"] < what[2]["date"]
                ):
                    found[key] = path.name, what
    return found


def _over_one_gpu(rows: dict[str, dict[str, Any]], tp: int) -> dict[str, Key]:
    """The base on all GPUs over the base on one, 8B, of one run; of the prompts the smaller speedup."""
    found = dict[str, Key]()
    kinds = {
        "decode": (("decode_ms.base.b1.c272",), {2: 1.6}),
        "prefill": (("prefill_ms.base.1024", "prefill_ms.base.4096"), {2: 1.75}),
        "finetune": (("train_s",), {2: 1.7, 4: 2.4}),
    }
    for kind, (names, targets) in kinds.items():
        ratios = list[tuple[float, dict[str, Any]]]()
        for name in names:
            one, all_ = rows.get(f"bdlora.8b.tp1of{tp}.{name}"), rows.get(f"bdlora.8b.tp{tp}.{name}")
            if one is not None and all_ is not None and one["run"] == all_["run"]:
                ratios.append((one["value"] / all_["value"], all_))
        if len(ratios) == len(names):
            value, row = min(ratios, key=lambda pair: pair[0])
            least = targets.get(tp)
            found[f"tp.{kind}_speedup.tp{tp}"] = value, None if least is None else Target(least), row, "ratio"
    decode = rows.get(f"bdlora.8b.tp{tp}.decode_ms.base.b1.c272")
    if decode is not None:
        speed = 1e3 / decode["value"]
        found[f"tp.decode_tok_s.tp{tp}"] = speed, Target(370.0) if tp == 2 else None, decode, "tok/s"
    return found
