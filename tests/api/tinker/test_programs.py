"""Programs over Tinker's SDK as they are: the cookbook's loops, and our examples."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tinker
from transformers import AutoTokenizer

import coserve
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import marks_on_days

pytestmark = [
    *marks_on_days(3),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(coserve.__file__).resolve().parent.parent
TINY = ROOT / "coserve" / "assets" / "tiny"
MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows; the daemon's base is of a folder with its second part."""
KEY = "tml-of-a-daemon-without-keys"
LAUNCH = """
import sys
import datasets
from transformers import AutoTokenizer
from tinker_cookbook import tokenizer_utils
which, url, folder, log, model = sys.argv[1:]
chats = [[("user", f"What is {n} plus {n}?"), ("assistant", f"It is {2 * n}.")] for n in range(8)]
rows = {
    "sl_loop": [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats],
    "rl_loop": [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(4)],
}
datasets.load_dataset = lambda *_: datasets.DatasetDict({"train": datasets.Dataset.from_list(rows[which])})
tokenizer_utils.get_tokenizer = lambda _: AutoTokenizer.from_pretrained(folder)
config = {"base_url": url, "log_path": log, "model_name": model, "lora_rank": 4, "save_every": 1}
if which == "sl_loop":
    from tinker_cookbook.recipes import sl_loop as loop
    config |= {"batch_size": 4, "max_length": 256}
else:
    from tinker_cookbook.recipes import rl_loop as loop
    loop.get_reward = lambda text, answer: float(len(text) % 3)  # a random base is never right
    config |= {"batch_size": 2, "group_size": 4, "max_tokens": 8, "loss_fn": "importance_sampling"}
loop.main(loop.Config(**config))
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("programs")
    shutil.copytree(TINY, folder / "Qwen3-8B-Base")
    with DaemonProcess(folder / "Qwen3-8B-Base", folder / "data") as found:
        found.wait_ready()
        yield found


@pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="tests/harness.txt is not installed")
@pytest.mark.parametrize("loop", ["sl_loop", "rl_loop"])
def test_the_cookbook_runs(daemon: DaemonProcess, tmp_path: Path, loop: str) -> None:
    command = [sys.executable, "-c", LAUNCH, loop, daemon.url, str(TINY), str(tmp_path), MODEL]
    environ = os.environ | {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = (tmp_path / "checkpoints.jsonl").read_text()
    assert "sampler_weights/final" in saved


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_learn(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with tinker.ServiceClient(base_url=daemon.url, api_key=KEY) as service:
        losses = example("dpo").train(service, tokenizer, MODEL, steps=4, learning_rate=1e-2)
        assert losses[0] == pytest.approx(0.6931, abs=1e-4), "ln 2 at the reference"
        assert losses[-1] < 0.5
        rewards = example("grpo").train(service, tokenizer, MODEL, steps=2, prompts=2, group=4)
        assert len(rewards) == 2
