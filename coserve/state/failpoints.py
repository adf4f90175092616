"""Named places where a test can inject a failure: `failpoint("adapter.before_rename")`.

They cost nothing when off. Armed by `COSERVE_FAILPOINTS="NAME=ACTION[@N][;...]"`, or by `armed(...)` inside one
process:

- NAME is one of `FAILPOINTS`, or `*` for all of them;
- ACTION is `kill` (this process dies as if by kill -9), `kill-group` (its whole process group does), the name of an
  `errno` such as `ENOSPC` (an `OSError`), or `delay:2s`;
- N: only at the N-th hit; without it, at every hit. A name may have several rules.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from coserve.core.errors import ConfigError

VARIABLE = "COSERVE_FAILPOINTS"

FILE_STEPS = ("temp_write", "before_file_fsync", "after_file_fsync", "before_rename", "after_rename", "after_dir_fsync")
"""The steps of one durable write; their failpoints are named `<point>.<step>`."""

DURABLE_POINTS = frozenset({"adapter", "batch", "checkpoint", "corpus", "file", "import"})
"""Durable writes of a published adapter, a batch's record, a checkpoint, a job's corpus, an uploaded file and an
imported adapter."""

FAILPOINTS = frozenset(f"{point}.{step}" for point in DURABLE_POINTS for step in FILE_STEPS) | {
    "remove.before_rename",
    "remove.after_rename",
    "registry.before_commit",
    "registry.after_commit",
    "document.questions",  # a question about a document was generated, and is not yet durable
    "document.answers",  # an answer was generated, and is not yet durable
    "document.evaluation",  # a held-out question was scored; the score is not yet durable
    "api.before_reply",  # a job or an import is committed, its response is not sent
    "generate.mid_stream",  # the engine is about to send tokens of a running request
    "finetune.mid_step",  # gradients are computed, the optimizer has not stepped
    "adapter.publish",  # the adapter's files are durable, but not registered
    "adapter.open",  # a file of an adapter is about to be opened
    "adapter.read",  # some of an adapter's weights are about to be read for their check
    "job.open",  # a job's corpus or a file of its checkpoint is about to be opened
    "daemon.start",  # the tokenizer is about to be loaded, which may download it
    "engine.start",  # the engine process runs, its base is not loaded
    "shutdown",  # the daemon stops and saves checkpoints
}

_RULE = re.compile(
    r"(?P<name>\*|[a-z_.]+)=(?P<action>kill-group|kill|E[A-Z0-9]+|delay:\d+(\.\d+)?s)(@(?P<at>[1-9]\d*))?"
)


class Rule(NamedTuple):
    name: str
    action: str
    at: int | None
    """Number of the hit that it acts on; None: every hit."""


@dataclass
class Armed:
    """Active rules, and how often each failpoint was hit since they were armed."""

    rules: tuple[Rule, ...]
    hits: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self, name: str) -> None:
        assert name in FAILPOINTS, f"undeclared failpoint {name}"
        with self._lock:
            self.hits[name] += 1
            counts = {name: self.hits[name], "*": self.hits.total()}
            due = [rule.action for rule in self.rules if rule.name in counts and rule.at in (None, counts[rule.name])]
        for action in due:
            _act(action)


def _act(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        case _ if action.startswith("delay:"):
            time.sleep(float(action.removeprefix("delay:").removesuffix("s")))
        case _:
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))


def parse(text: str) -> tuple[Rule, ...]:
    """Parse the rules of a `COSERVE_FAILPOINTS` text. Raises `ConfigError`."""
    rules: list[Rule] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        rule = _RULE.fullmatch(part)
        if rule is None or (rule["action"].startswith("E") and not hasattr(errno, rule["action"])):
            raise ConfigError(f"{VARIABLE}: expected name=kill|kill-group|ERRNO|delay:2s[@n], got {part!r}")
        if rule["name"] != "*" and rule["name"] not in FAILPOINTS:
            raise ConfigError(f"{VARIABLE}: unknown failpoint {rule['name']!r}")
        rules.append(Rule(rule["name"], rule["action"], int(rule["at"]) if rule["at"] else None))
    return tuple(rules)


def _from_environment() -> Armed | None:
    text = os.environ.get(VARIABLE)
    return Armed(parse(text)) if text else None


class _Switch:
    """The process's armed failpoints. Global, so that the code under test need not pass them as arguments."""

    armed: Armed | None = _from_environment()


def failpoint(name: str) -> None:
    """Fail here if `name` is armed. Raises `OSError` for an `errno`."""
    if _Switch.armed is not None:
        _Switch.armed.hit(name)


@contextmanager
def armed(text: str = "") -> Iterator[Armed]:
    """Arm `text` in this process (with no text: only count hits) until the block ends."""
    before = _Switch.armed
    _Switch.armed = state = Armed(parse(text))
    try:
        yield state
    finally:
        _Switch.armed = before
