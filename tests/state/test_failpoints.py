from __future__ import annotations

import ast
import errno
from pathlib import Path

import pytest

import coserve
from coserve.core.errors import ConfigError
from coserve.state.failpoints import DURABLE_POINTS, FAILPOINTS, FILE_STEPS, armed, failpoint, parse

PACKAGE = Path(coserve.__file__).parent


def calls() -> list[ast.Call]:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "failpoint(" in text or "point=" in text]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


def used_names() -> set[str]:
    """Every literal name in the code; a `point=` argument stands for all steps of its write."""
    used: set[str] = set()
    for call in calls():
        name = getattr(call.func, "id", getattr(call.func, "attr", None))
        if name == "failpoint" and isinstance(call.args[0], ast.Constant):
            used.add(str(call.args[0].value))
        for keyword in call.keywords:
            if keyword.arg == "point" and isinstance(keyword.value, ast.Constant):
                used |= {f"{keyword.value.value}.{step}" for step in FILE_STEPS}
    return used


def test_the_declared_failpoints_are_those_in_the_code() -> None:
    assert used_names() == FAILPOINTS


def test_durable_writes_hit_all_their_steps() -> None:
    source = (PACKAGE / "state/durable.py").read_text()
    for number, step in enumerate(FILE_STEPS):  # write_file and replace_dir; a file made elsewhere is only renamed
        assert source.count(f'failpoint(f"{{point}}.{step}")') == (
            3 if number >= FILE_STEPS.index("before_rename") else 2
        )
    assert sorted(DURABLE_POINTS) == ["adapter", "batch", "checkpoint", "corpus", "file", "import"]


def test_an_error_at_the_nth_hit() -> None:
    with armed("shutdown=ENOSPC@3") as state:
        for _ in range(2):
            failpoint("shutdown")
        with pytest.raises(OSError) as caught:
            failpoint("shutdown")
        failpoint("shutdown")
    assert caught.value.errno == errno.ENOSPC
    assert state.hits == {"shutdown": 4}
    failpoint("shutdown")


def test_star_counts_all_hits() -> None:
    with armed("*=EIO@2"):
        failpoint("shutdown")
        with pytest.raises(OSError):
            failpoint("registry.before_commit")
        failpoint("registry.before_commit")


def test_an_undeclared_name_is_refused_when_armed() -> None:
    with armed(), pytest.raises(AssertionError):
        failpoint("nowhere")


def test_rules() -> None:
    assert parse("shutdown=delay:0.5s@2; adapter.publish=kill; shutdown=EIO@3") == (
        ("shutdown", "delay:0.5s", 2),
        ("adapter.publish", "kill", None),
        ("shutdown", "EIO", 3),
    )
    assert parse("") == ()


@pytest.mark.parametrize("text", ["shutdown", "shutdown=die", "nowhere=kill", "shutdown=kill@0", "shutdown=delay:2"])
def test_bad_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)
