"""Write the table of served families in docs/guide/families.md from the tests' list of families.

python -m tools.families
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING

from coserve.model.parallel.families import PLANS
from tests.support.families import ATTENTION_ONLY, LIMITS, SERVED
from tests.support.tiny_models import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "families.md"
TABLE = re.compile(r"(?<=## Served\n\n)(\|.*\n)+")
HEAD = "| Family | Adapters tested on | Several GPUs | Limits | Tests |\n|---|---|---|---|---|\n"
EXPERTS = "PEFT saves targets of its feed-forward modules as parameters of experts"


def table() -> str:
    """The table in Markdown."""
    return HEAD + "".join(f"| {' | '.join(_row(family))} |\n" for family in sorted(SERVED))


def _row(family: str) -> Iterator[str]:
    yield f"`{family}`"
    yield "attention" if family in ATTENTION_ONLY else "every linear module of a layer"
    yield "yes" if family in PLANS else ""
    text_alone = "text_config" in CONFIG_MAPPING[family].sub_configs
    limits = ["text alone"] if text_alone else []
    limits += [EXPERTS] if family in ATTENTION_ONLY else []
    yield "; ".join([*limits, *LIMITS.get(family, ())])
    yield "families, and all tests over `tests/support/tiny_models.py`" if family in FAMILIES else "families"


def written(page: str) -> str:
    """The page with the table of today."""
    found, count = TABLE.subn(lambda _: table(), page, count=1)
    assert count == 1, "expected a table after '## Served'"
    return found


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
