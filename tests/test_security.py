"""Rules of the source that defend against whole classes of mistakes; SECURITY.md says which class which test covers."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coserve.core.access.schemas import CreateKey, LogLevel, Quota
from coserve.core.errors import InvalidRequest, UnknownField
from coserve.core.schemas import adapters, documents, generation, jobs
from coserve.core.validation import decoder_of
from tests.support.syntax import tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "coserve"
FILES = sorted(PACKAGE.rglob("*.py"))
NETWORK = {"ftplib", "http", "httpx", "httpcore", "requests", "smtplib", "urllib3", "websockets"}
"""Libraries that connect to other machines."""
SERVING = ("api", "state", "core", "data/corpus", "data/offload", "lora/files")
"""Rooms whose code runs on what clients send. (A base is fetched by `data/pretrained`, from where the operator says; a
tracker's library by `api/tracking`, which the operator has chosen, sends to where its variables say.)"""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def named(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_serving_opens_no_connection() -> None:
    found = []
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix().startswith(SERVING) and "tracking" not in path.parts:
            text = path.read_text()
            names = re.findall(r"^\s*(?:from|import) ([a-z0-9_]+)", text, re.MULTILINE)
            found += [f"{path.name} imports {name}" for name in NETWORK & set(names)]
            found += [
                f"{path.name}: {word}"
                for word in ("aiohttp.ClientSession", "urlopen", "create_connection(")
                if word in text
            ]
    assert not found


def test_sql_is_constant() -> None:
    """Values are parameters; no text of a user is part of a statement."""
    found = [
        f"{path.name}:{call.lineno}"
        for path in (PACKAGE / "state").glob("*.py")
        for call in calls(path)
        if named(call) in ("execute", "executemany", "executescript")
        and call.args
        and not isinstance(call.args[0], ast.Constant | ast.Name)
    ]
    assert not found
    joined = re.compile(r"f[\"'](SELECT|INSERT|UPDATE|DELETE)\b")
    assert not [path.name for path in FILES if joined.search(path.read_text())]


def test_no_command_goes_through_a_shell() -> None:
    found = [
        f"{path.name}:{call.lineno}"
        for path in FILES
        for call in calls(path)
        if named(call) in ("system", "popen", "create_subprocess_shell", "getoutput", "getstatusoutput")
        or any(keyword.arg == "shell" for keyword in call.keywords)
    ]
    assert not found


def test_secrets_are_compared_in_constant_time() -> None:
    secret = re.compile(r"secret|sha256|_own\b|api_key|\bgiven\b")
    found = []
    for path in (*(PACKAGE / "api/access").glob("*.py"), PACKAGE / "api/http/security.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                text = ast.unparse(node)
                found += [f"{path.name}: {text}"] if secret.search(text) else []
    assert not found
    assert (PACKAGE / "api/access/keys.py").read_text().count("hmac.compare_digest") == 2


REQUESTS = [
    kind
    for module in (adapters, documents, generation, jobs)
    for name, kind in vars(module).items()
    if name.endswith("Request") and kind.__module__ == module.__name__
]


@pytest.mark.parametrize(
    "kind",
    [CreateKey, Quota, LogLevel, *REQUESTS],
    ids=lambda kind: kind.__name__,
)
def test_fields_that_nobody_knows_are_refused(kind: type[msgspec.Struct]) -> None:
    """A client cannot set what it is not offered, such as the routes of a key."""
    with pytest.raises((msgspec.ValidationError, UnknownField, InvalidRequest)):
        decoder_of(kind).decode(b'{"allowed_routes": ["/*"]}')
    assert kind.__struct_config__.forbid_unknown_fields


def test_caches_of_what_clients_send_are_bounded() -> None:
    """A function with parameters keeps its results for ever only if they are types, modules or tasks of the code
    (`body_types`, `field_docs`, `empty_fields`, `hints`, `offload`), or inside one call (`bdlora`)."""
    unbounded = re.compile(r"@(?:functools\.)?(?:cache|lru_cache\((?:None|maxsize=None)\))\n\s*def \w+\((\w+)")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if path.relative_to(PACKAGE).as_posix().startswith(SERVING) and unbounded.search(path.read_text())
    }
    types = {"api/http/body_types.py", "api/http/field_docs.py", "core/schemas/empty_fields.py", "core/hints.py"}
    assert found <= types | {"data/offload/protocol.py", "lora/files/bdlora.py"}


LINEAR = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
size, used = 100_000, json.load(sys.stdin)
seeds = [" ", "a", ".", "a.", "<|", "\\n", "[", "1", "_a", "``", "{", "a.1.", ". ", "<｜tool▁sep｜>", "[CALL_ID]"]
for source, flags, method in used:
    pattern = re.compile(source, flags)
    for seed in seeds:
        text = seed * (size // len(seed))
        for each in (text, text + "!", "!" + text):
            found = getattr(pattern, method)(*(("", each) if method == "sub" else (each,)))
            if method == "finditer":
                list(found)
"""
"""Uses each pattern on hostile texts of 100 KB, within seconds of processor time: a quadratic one takes minutes."""
METHODS = ("match", "fullmatch", "search", "sub", "split", "finditer", "findall")


def test_regular_expressions_take_linear_time() -> None:
    """Those that the source compiles, as they are used there. Patterns of users run in RE2."""
    used = set()
    for path in FILES:
        text = path.read_text()
        if "re.compile(" not in text or not path.relative_to(PACKAGE).as_posix().startswith((*SERVING, "data", "lora")):
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS:
                pattern = getattr(module, node.value.id, None)
                if isinstance(pattern, re.Pattern):
                    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
                    used.add((source, pattern.flags, node.attr))
    assert len(used) > 8
    done = subprocess.run(
        [sys.executable, "-P", "-c", LINEAR],
        input=json.dumps(sorted(used)),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_what_is_installed_is_not_older_than_its_known_holes() -> None:
    needed = dict(re.findall(r'"(aiohttp|transformers)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert tuple(map(int, needed["aiohttp"].split("."))) >= (3, 14, 1)  # zip bombs, trailers, line sizes
    assert tuple(map(int, needed["transformers"].split("."))) >= (5, 3)  # kernels from the hub by a config


def test_security_md_names_tests_that_there_are() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert all(Path(ROOT, name).is_file() for name in re.findall(r"`(tests/[^\s:`]+)", text))
    for name, function in re.findall(r"`(tests/[^\s:`]+)::(\w+)`", text):
        assert f"def {function}(" in Path(ROOT, name).read_text(), function
