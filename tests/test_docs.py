"""Every path, link and name of ours that the documents mention exists."""

from __future__ import annotations

import builtins
import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import below, names_of, tree_of

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
PLACES = (ROOT, ROOT / "coserve", ROOT / "docs", ROOT / "benchmarks", ROOT / "benchmarks/results", ROOT / "tests")
OTHERS = {
    *("AttentionInterface", "GraphModule", "InferenceClient", "JITFunction", "LoraConfig", "MultiheadAttention"),
    *("AdamW", "PyTorch", "TrainingArguments"),
}
"""Names of other projects."""


def quoted(document: str) -> set[str]:
    """What stands between backticks, outside of blocks of code."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@cache
def defined() -> set[str]:
    """Every name that the code defines."""
    names: set[str] = set()
    for folder in ("coserve", "benchmarks", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for statement in below(tree_of(path)):
                names.update(names_of(statement))
    return names


def modules() -> set[str]:
    """`generate`, `generate.execution.graphs.decode`, ...: the package's modules and folders, seen from inside it."""
    found = {path.relative_to(ROOT / "coserve").with_suffix("") for path in (ROOT / "coserve").rglob("*.py")}
    return {".".join(path.parts) for each in found for path in (each, *each.parents) if path.parts}


def anchors(document: Path) -> set[str]:
    """Where a link may point within a page: its headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    broken = set[str]()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.add(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document: str) -> None:
    paths = {text for text in quoted(document) if re.fullmatch(r"[\w./-]+(\.(py|md|json|toml|jsonl)|/)", text)}
    paths = {path for path in paths if not path.startswith("/")}  # routes, and folders of a user's
    missing = {path for path in paths if not any((place / path).exists() for place in PLACES)}
    missing = {path for path in missing if "/" in path.rstrip("/") or path.endswith(".py")}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_exist(document: str) -> None:
    known, missing = modules(), set[str]()
    keys = set(json.loads((ROOT / "benchmarks/results/summary.json").read_text()))
    for text in quoted(document) - keys:
        if text.endswith(".py") or any(key.startswith(f"{text}.") for key in keys):
            continue
        name = text.removesuffix("()").split("(")[0]
        if re.fullmatch(r"[A-Z][a-z0-9]+([A-Z][a-z0-9]*)+", name) and name not in defined() | OTHERS | set(
            dir(builtins)
        ):
            missing.add(text)
        parts = name.split(".")
        if len(parts) > 1 and parts[0] in known and all(part.isidentifier() for part in parts):
            inside = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in known)
            if not set(parts[inside:]) <= defined():
                missing.add(text)
    assert not missing
