"""The rules of the house: layers, no torch in the API process, no pickles, safe names at the top of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import below, tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "coserve"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    {"core"},
    {"queues", "kernels", "state", "client"},
    {"config", "memory"},
    {"data"},
    {"model", "workloads"},
    {"lora"},
    {"admission"},
    {"api", "generate"},
    {"finetune"},
    {"engine"},
    {"cli"},
    {"__main__"},
)
"""Rooms import those of earlier layers only."""
ENGINE_SIDE = {"kernels", "model", "memory", "lora", "generate", "finetune", "engine"}
"""What only the engine process imports. No other room imports one of these, or torch, when it is imported."""
API_SIDE = {"lora.files", "engine.warmup"}
"""Their folders that other processes import, too: no torch in them."""


def package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def on_engine_side(module: str) -> bool:
    """Whether only the engine process imports `module`, a name without `coserve.`"""
    room, *rest = module.split(".")
    return room in ENGINE_SIDE and ".".join((room, *rest[:1])) not in API_SIDE


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def imported(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """The modules that these statements import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The file's syntax tree, its root first, without expressions."""
    root = tree_of(path)
    return (root, *below(root))


@cache
def imported_modules(path: Path) -> set[str]:
    """Names without `coserve.`"""
    every = (node for node in nodes(path) if isinstance(node, ast.stmt))
    return {name.removeprefix("coserve.") for name in imported(every) if name.startswith("coserve.")}


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)} - {package(path)}


OWN = [path for path in FILES if package(path) != "__init__"]


def test_packages_import_those_below_them() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in OWN
        for other in imported_packages(path)
        if layer(other) >= layer(package(path))
    }
    assert not wrong


def test_the_api_process_imports_nothing_of_the_engine() -> None:
    heavy = {"torch", "triton", "transformers", "peft", "megablocks", "stk"}
    wrong = set()
    for path in OWN:
        own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not on_engine_side(own):
            root = nodes(path)[0]
            assert isinstance(root, ast.Module)
            at_import = {name.split(".")[0] for name in imported(root.body)}
            found = {name for name in imported_modules(path) if on_engine_side(name)} | (at_import & heavy)
            wrong |= {f"{path.relative_to(PACKAGE)} imports {other}" for other in found}
    assert not wrong


def test_no_folder_is_crowded_and_no_file_is_long() -> None:
    for folder in {path.parent for path in FILES}:
        files = [path for path in FILES if path.parent == folder]
        assert len(files) <= 20, folder
    long = {path for path in FILES if len(path.read_text().splitlines()) > 450}
    assert long <= {PACKAGE / "kernels/lora/segmented/prefill_kernel.py"}  # one kernel and its parts


def is_number(value: ast.expr) -> bool:
    """Whether it is a number, or a tuple or dict of numbers."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return not isinstance(number, bool)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.Tuple(elts=values) | ast.Dict(values=values):
            return bool(values) and all(map(is_number, values))
    return False


def constants(path: Path) -> Iterator[str]:
    """The numbers that a module binds to names in capitals."""
    root = nodes(path)[0]
    assert isinstance(root, ast.Module)
    for node in root.body:
        match node:
            case ast.Assign(targets=[target], value=value) if is_number(value):
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (name.id for name in names if isinstance(name, ast.Name) and name.id.isupper())


def test_constants_do_not_outgrow_the_code() -> None:
    """A number that an operator may want to change is a setting of `config.py`; one that follows from others is
    computed from them."""
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    assert sum(len(list(constants(path))) for path in FILES) <= 7 * lines / 1000


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of modules, classes, functions, attributes and constants."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text


def test_docstrings_begin_with_what_the_thing_is() -> None:
    words = ("Of", "Whose", "Where", "What", "Whom")
    found = [
        f"{path.relative_to(PACKAGE)}: {text[:60]}"
        for path in FILES
        for text in docstrings(path)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in words
    ]
    assert not found


def test_a_package_has_an_init_only_to_export_names() -> None:
    assert not [path for path in FILES if path.name == "__init__.py" and "__all__" not in path.read_text()]


def imported_files(path: Path) -> set[Path]:
    """The package's files that `path` imports, anywhere in it."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coserve"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return found & set(FILES)


def test_no_file_imports_itself_through_others() -> None:
    imports = {path: imported_files(path) for path in FILES}
    while leaves := {path for path, own in imports.items() if not own}:  # what is left in the end stands in a circle
        imports = {path: own - leaves for path, own in imports.items() if path not in leaves}
    assert not imports, sorted(str(path.relative_to(PACKAGE)) for path in imports)


def test_the_api_process_does_not_load_torch() -> None:
    code = (
        "import importlib, sys\nfor name in ('coserve.data.offload.main', 'coserve.cli.app', "
        "'coserve.cli.daemon.serve'):\n"
        "    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_the_engine_does_not_wait_for_the_imports_of_the_api_process() -> None:
    """Nor of other commands: `coserve serve` starts it with a few modules."""
    heavy = {"aiohttp", "jinja2", "matplotlib", "numpy", "prometheus_client", "re2", "rich", "sqlite3", "tokenizers"}
    code = (
        "import sys\nimport coserve.cli.daemon.serve as daemon\nfrom coserve.cli.app import app\n"
        "async def serve(config, *, report): print(config.model)\n"
        "daemon.serve = serve\napp(['serve', 'bundled'], standalone_mode=False)\n"
        f"found = {heavy!r} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (0, "bundled\n"), done.stderr


def test_nothing_is_unpickled_or_evaluated() -> None:
    words = re.compile(r"import pickle|pickle[.(]|recv_pyobj|torch\.load|shell=True|(?<![.\w])eval\(")
    found = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path in FILES
        for line in path.read_text().splitlines()
        if words.search(line) and not line.lstrip().startswith(("#", '"'))
    ]
    assert not found


@pytest.mark.parametrize("name", ["kernels", "queues", "api", "workloads"])
def test_top_folders_are_links_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"coserve/{name}"
    assert not (link / "__init__.py").exists()


@pytest.mark.slow
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
