"""docs/guide/data.md is true: each row that it shows renders, and is learned, as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from coserve.cli.finetuning.settings import FLAGS
from coserve.core.types import LoraRequest
from coserve.data.corpus import rows
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.rows import CompletionRow, parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.pretrained.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guide" / "data.md").read_text()
EXAMPLES = re.findall(
    r"^```jsonl (\S+)\n(.*?\n)```\n```text rendered\n(.*?)\n```\n```text learned\n(.*?)\n```",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("format", "row", "rendered", "learned"), EXAMPLES)
def test_a_row_is_rendered_and_learned_as_shown(format: str, row: str, rendered: str, learned: str) -> None:
    tokenizer = Tokenizer.load("bundled")
    losses = {"pairs": format == "preference", "labelled": format == "label"}
    corpus = tokenize_rows(parse_jsonl(row.encode()), tokenizer, Tokenization(1000, **losses))
    assert corpus.rows == 1
    sequences = corpus.sequences(0)
    texts = [tokenizer.decode(tokens.tolist(), skip_special=False) for tokens, _ in sequences]
    targets = [tokens[target.astype(np.bool_)].tolist() for tokens, target in sequences]
    assert "\n".join(texts) == rendered
    assert "\n".join(tokenizer.decode(own, skip_special=False) for own in targets) == learned


def test_every_format_has_an_example() -> None:
    shown = {type(parse_row(json.loads(row), 1)) for _, row, _, _ in EXAMPLES}
    assert shown == set(get_args(rows.Row))
    assert {format for format, *_ in EXAMPLES} == {
        *("text", "prompt/completion", "chat", "alpaca", "sharegpt", "preference", "label", "tokens"),
    }


def test_the_prompt_for_an_alpaca_adapter_is_what_its_rows_begin_with() -> None:
    typed = re.search(r'^\$ coserve generate [^"]*"(.*?)"\n```', PAGE, re.MULTILINE | re.DOTALL)
    row = parse_row({"instruction": "Greet.", "output": "Ahoy!"}, 1)
    assert typed is not None and isinstance(row, CompletionRow) and typed[1] == row.prompt


def test_the_table_of_lora_names_is_complete() -> None:
    section = PAGE.partition("## Names of the adapter's settings")[2]
    ours = {
        name for line in section.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`, `")
    }
    named = {name.strip(" `") for name in ours}
    assert named == {field.name for field in msgspec.structs.fields(LoraRequest)}
    for line in filter(lambda line: line.startswith("| `"), section.splitlines()):
        names, _, options = (re.findall(r"`([\w-]+)`", cell) for cell in line.split("|")[1:4])
        assert options == list(dict.fromkeys(FLAGS.get(f"lora.{name}", "--set") for name in names)), line
    peft = pytest.importorskip("peft")
    theirs = set(re.findall(r"^\| .*? \| `(\w+)`", section, re.MULTILINE))
    assert theirs <= set(peft.LoraConfig.__dataclass_fields__)


def test_readme_and_the_help_lead_here() -> None:
    assert "docs/guide/data.md" in (ROOT / "README.md").read_text()
    assert "docs/guide/data.md" in (ROOT / "coserve" / "cli" / "finetuning" / "command.py").read_text()
