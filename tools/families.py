"""Write the table of served families in docs/guide/families.md from the tests' list of families.

python -m tools.families
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from benchmarks.models.families import FILE, key_of
from coserve.model.parallel.families.plans import PLANS
from tests.support.families import ATTENTION_ONLY, LIMITS, SERVED
from tests.support.tiny_models import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "families.md"
TABLE = re.compile(r"(?<=\n\n)\| Family \| Adapters.*\n(\|.*\n)+")
COLUMNS = ("Family", "Adapters tested on", "Several GPUs", "Quantised", "8k tokens", "Limits", "Tests")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
SIZES = json.loads((PAGE.parents[2] / "benchmarks" / "results" / FILE).read_text())["rows"]
EXPERTS = "PEFT saves targets of its feed-forward modules as parameters of experts"


def table() -> str:
    """The table in Markdown."""
    return HEAD + "".join(f"| {' | '.join(_row(family))} |\n" for family in sorted(SERVED))


def _row(family: str) -> Iterator[str]:
    yield f"`{family}`"
    yield "attention" if family in ATTENTION_ONLY else "every linear module of a layer"
    yield "yes" if family in PLANS else ""
    row = SIZES.get(key_of(family))
    yield "" if row is None else ", ".join(row["quantized"])
    yield "" if row is None else _memory(row)
    text_alone = "text_config" in CONFIG_MAPPING[family].sub_configs
    limits = ["text alone"] if text_alone else []
    limits += [EXPERTS] if family in ATTENTION_ONLY else []
    yield "; ".join([*limits, *LIMITS.get(family, ())])
    yield "families, and all tests over `tests/support/tiny_models.py`" if family in FAMILIES else "families"


def _memory(row: dict[str, Any]) -> str:
    mib = row["state_bytes"] >> 20
    states = f", {mib} of them states" if mib else ""
    return f"{row['value']:.0f} MiB{states} ({row['layers']} x {row['hidden']})"


def written(page: str) -> str:
    """The page with the table of today."""
    found, count = TABLE.subn(lambda _: table(), page, count=1)
    assert count == 1, "expected a table of families"
    return found


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
