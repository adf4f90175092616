"""The comparison of offline generation, with a stand-in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import Results
from benchmarks.peers import offline
from benchmarks.peers.vllm_engine import prompts_of
from benchmarks.serving.case import SEED
from benchmarks.serving.case import Load as CoserveLoad
from benchmarks.serving.http_case import TINY

VLLM = """
import json, os, pathlib
from types import SimpleNamespace as Named

SEEN = pathlib.Path(__file__).parents[1] / "seen.jsonl"

def saw(**about):
    with SEEN.open("a") as file:
        print(json.dumps(about), file=file)

class SamplingParams(Named):
    pass

class LLM:
    def __init__(self, **given):
        print("INFO a line of vLLM's")
        assert pathlib.Path(given.pop("model"), "config.json").exists()
        saw(engine=given, dual=os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM"), path=os.environ["PYTHONPATH"])
        if (SEEN.parent / "fails").exists():
            raise MemoryError("no room")
        config = Named(get_vocab_size=lambda: 100)
        self.llm_engine = Named(model_config=config, add_lora=lambda one: saw(registered=one.name))

    def generate(self, prompts, sampling, lora_request, use_tqdm):
        names = [each.name for each in lora_request or ()]
        saw(prompts=len(prompts), output=sampling.max_tokens, used=sorted(set(names)))
        return [Named(outputs=[Named(token_ids=[0] * sampling.max_tokens)]) for _ in prompts]
"""
REQUEST = """
class LoRARequest:
    def __init__(self, name, number, folder):
        self.name = name
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-in."""
    found = tmp_path / "site"
    (found / "vllm" / "lora").mkdir(parents=True)
    (found / "vllm" / "__init__.py").write_text(VLLM)
    (found / "vllm" / "lora" / "request.py").write_text(REQUEST)
    (found / "vllm-0.26.0.dist-info").mkdir()
    (found / "vllm-0.26.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.26.0\n")
    monkeypatch.setattr(offline, "LLAMA_8B", TINY)
    return found


def run(site: Path, out: Path, *more: str) -> dict[str, Any]:
    """The rows of the result."""
    offline.main(["--vllm-site", str(site), "--out", str(out), "--commit", "abc", *more])
    found: dict[str, Any] = json.loads((out / offline.FILE).read_text())
    return found


def test_ratios_are_to_the_better_of_vllms_two_settings(site: Path, tmp_path: Path) -> None:
    results = Results(tmp_path, offline.FILE, script="here", hardware="x", seed=0, revision="abc", settings={})
    names = [load.name for load in offline.loads()]
    for name in names:
        results.put(f"serving.tok_s.coserve.{name}", 300.0, "output tok/s")
        results.put(f"serving.tok_s.vllm.{name}", 200.0, "output tok/s")
        results.put(f"serving.tok_s.vllm_strong.{name}", 250.0 if name == "decode.b1.a32" else 150.0, "output tok/s")
    run(site, tmp_path, "--only", "")
    rows = json.loads((tmp_path / offline.FILE).read_text())["rows"]
    ratios = {key.removeprefix("serving.vs_vllm26."): row["value"] for key, row in rows.items() if "vs_vllm" in key}
    assert ratios.keys() == set(names)
    assert {name for name, ratio in ratios.items() if ratio == 1.2} == {"decode.b1.a1", "decode.b1.a32"}
    assert rows["serving.vs_vllm26.512x128.a0"]["better"] == "serving.tok_s.vllm.512x128.a0"


def test_sides_go_on_in_one_file(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "--only", "vllm")
    record = run(site, tmp_path, "--only", "vllm-strong")
    sides = ("vllm", "vllm_strong")
    expected = {f"serving.tok_s.{side}.{load.name}" for side in sides for load in offline.loads()}
    assert set(record["rows"]) == expected | {f"serving.start_s.{side}" for side in sides}
    runs = record["runs"].values()
    (strong,) = (each["settings"]["vllm-strong"] for each in runs if "vllm-strong" in each["settings"])
    assert strong["versions"] == {"vllm": "0.26.0"} and strong["environment"]["VLLM_LORA_ENABLE_DUAL_STREAM"] == "1"
    seen = [json.loads(line) for line in (site / "seen.jsonl").read_text().splitlines()]
    engines = [each for each in seen if "engine" in each]
    assert [each["dual"] for each in engines] == [None, "1"]
    assert [each["engine"].get("specialize_active_lora") for each in engines] == [None, True]
    assert str(offline.ENGINE.parents[2]) not in engines[0]["path"].split(":"), "vLLM sees none of our folders"


def test_one_adapter_is_measured_while_it_is_the_only_one(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "--only", "vllm")
    seen = [json.loads(line) for line in (site / "seen.jsonl").read_text().splitlines()]
    registered = [i for i, each in enumerate(seen) if "registered" in each]
    assert len(registered) == 32
    between = [each["used"] for each in seen[registered[0] + 1 : registered[1]]]
    assert between and all(used == ["a0"] for used in between)
    after = [each["used"] for each in seen[registered[-1] + 1 :]]
    assert after[0] == ["a0"] and len(after[-1]) == 32


def test_a_side_that_fails_leaves_the_others(site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (site / "fails").touch()
    with pytest.raises(SystemExit):
        run(site, tmp_path, "--only", "vllm,vllm-strong")
    printed = capfd.readouterr().out
    assert printed.count("MemoryError: no room") == 2 and "vllm-strong: it ended with 1" in printed


def test_nothing_is_begun_after_the_budget(site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert set(run(site, tmp_path, "--only", "vllm", "--budget", "0")["rows"]) == {"serving.start_s.vllm"}
    assert "no time was left for decode.b1.a0" in capfd.readouterr().out


def test_another_vllm_is_refused(site: Path, tmp_path: Path) -> None:
    (site / "vllm-0.26.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.27.0\n")
    with pytest.raises(SystemExit, match=r"expected vLLM 0\.26, got 0\.27\.0"):
        run(site, tmp_path, "--only", "vllm")


def test_all_sides_get_the_same_token_ids() -> None:
    load = {"name": "decode.b32.a1", "requests": 3, "prompt": 16}
    ours = CoserveLoad(3, 16, 8, 1).make_requests("decode.b32.a1/0", 1000)
    assert prompts_of(load, "0", 1000, SEED) == [list(each.prompt) for each in ours]
