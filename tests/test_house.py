"""The rules of the house: arrows downward, torch-free rooms, no pickles, safe names at the top of the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "coserve"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    "types": 1,
    "cancellation": 1,
    "errors": 1,
    "hints": 1,
    "logs": 2,
    "config": 2,
    "processes": 2,
    "schemas": 2,
    "link": 2,
    "client": 2,
    "queues": 2,
    "kernels": 2,
    "state": 2,
    "model": 4,
    "offload": 5,
    "memory": 5,
    "generate": 6,
    "adapters": 6,
    "finetune": 7,
    "ports": 7,
    "fetches": 8,
    "jobs": 8,
    "engine": 9,
    "api": 8,
    "workloads": 8,
    "worker": 10,
    "supervisor": 9,
    "daemon": 10,
    "demo": 10,
    "cli": 11,
}
TORCH_FREE = (
    "coserve",
    "coserve.cli",
    "coserve.client",
    "coserve.engine",
    "coserve.state.registry",
    "coserve.queues.policy",
    "coserve.adapters.peft",
    "coserve.finetune.data",
    "coserve.finetune.job",
    "coserve.model.chat",
    "coserve.offload.main",
    "coserve.api.app",
    "coserve.workloads.report",
)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("coserve.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_run_downward(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    for other in imported_rooms(path):
        if other != here:
            assert FLOORS[other] < FLOORS[here] or FLOORS[here] == FLOORS[other] == 2, f"{here} imports {other}"


def imported_files(path: Path) -> set[Path]:
    """The package's files that `path` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coserve"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return found & set(FILES)


def test_no_file_imports_itself_through_others() -> None:
    imports = {path: imported_files(path) for path in FILES}
    while leaves := {path for path, own in imports.items() if not own}:  # what is left in the end stands in a circle
        imports = {path: own - leaves for path, own in imports.items() if path not in leaves}
    assert not imports, sorted(str(path.relative_to(PACKAGE)) for path in imports)


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in FILES} - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_rooms_of_the_api_process_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_unpickled_and_keys_are_compared_in_constant_time(path: Path) -> None:
    text = path.read_text()
    for word in ("pickle", "recv_pyobj", "torch.load", "shell=True", "eval("):
        calls = [line for line in text.splitlines() if word in line and not line.lstrip().startswith(("#", '"'))]
        code = [line for line in calls if f"{word}." in line or f"import {word}" in line or f"{word}(" in line]
        if word == "eval(":
            code = [line for line in code if ".eval(" not in line]
        assert not code, f"{path}: {code}"


@pytest.mark.parametrize("name", ["kernels", "queues", "api", "workloads"])
def test_top_folders_are_links_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"coserve/{name}"
    assert not (link / "__init__.py").exists()


def test_transformers_is_not_fooled_by_our_kernels_folder() -> None:
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "is_kernels_available()\n"
        "LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,"
        " num_attention_heads=2, vocab_size=16))\n"
        "import sys; m = sys.modules.get('kernels'); assert m is None or 'coserve' not in str(m), m\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
