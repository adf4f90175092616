"""Prompts and fine-tuning rows that come with the package."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

CORPORA = ("pirate", "recipes")
"""Bundled corpora that workloads train on."""
CHARACTERS = 8
"""Maximum characters per token, roughly. A text of this many times the wanted tokens is long enough to be cut to
length."""


def bundled_prompts() -> list[str]:
    """Return prompts in the style of the ETS paper's "act as a ..." collection."""
    text = resources.files("coserve").joinpath("assets/prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def bundled_rows(row_tokens: int | None = None) -> list[dict[str, Any]]:
    """Return rows to fine-tune on. `row_tokens`: make texts of at least about that many tokens, as overlapping pieces
    of the corpora."""
    folder = resources.files("coserve").joinpath("assets/corpora")
    texts = [folder.joinpath(f"{name}.jsonl").read_text(encoding="utf-8") for name in CORPORA]
    if row_tokens is None:
        return [json.loads(line) for text in texts for line in text.splitlines()]
    size = row_tokens * CHARACTERS
    joined = "".join(texts)
    joined *= 2 + size // len(joined)
    return [{"text": joined[start : start + size]} for start in range(0, len("".join(texts)), 37)][:128]
