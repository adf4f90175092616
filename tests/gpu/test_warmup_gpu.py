"""What a warm-up has compiled, an engine need not compile. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coserve.config import Config, config_to_json
from coserve.warmup.launch import compile_ahead
from tests.support.model_folder import make_model_folder

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent


def test_an_engine_over_filled_caches_compiles_nothing(tmp_path: Path) -> None:
    config = Config(
        model=str(make_model_folder(tmp_path / "model")),
        data_dir=tmp_path / "data",
        device="cuda",
        dtype="bfloat16",
        inference_batch_size=4,
        step_tokens=64,
        micro_batch_tokens=64,
        kv_tokens=4096,
    )
    told: list[tuple[int, int]] = []
    compile_ahead(config, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    settings = config_to_json(config).decode()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.warm_start", settings],
            cwd=ROOT, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == {"notes": [], "kernels": [], "graphs": 0}
