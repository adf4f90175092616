"""The small corpora in the package: every row parses, and the two for the demo differ in voice."""

import json
from collections import Counter
from pathlib import Path

import pytest

import coserve
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.pretrained.tokenizer import Tokenizer

ASSETS = Path(coserve.__file__).parent / "assets"
CORPORA = sorted((ASSETS / "corpora").glob("*.jsonl"))
FORMS = {
    "errands": {"instruction", "input", "output"},
    "gardener": {"messages"},
    "lost_property": {"conversations"},
    "pirate": {"prompt", "completion"},
    "recipes": {"text"},
}


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / "corpora" / f"{name}.jsonl").read_text().splitlines()]


def test_one_corpus_for_every_form() -> None:
    assert {path.stem: set(json.loads(path.read_text().splitlines()[0])) for path in CORPORA} == FORMS


@pytest.mark.parametrize("path", CORPORA, ids=lambda path: path.stem)
def test_every_row_parses_and_has_something_to_learn(path: Path) -> None:
    parsed = list(parse_jsonl(path))
    assert len(parsed) == len(path.read_text().splitlines()) >= 8
    corpus = tokenize_rows(parsed, Tokenizer.from_folder(ASSETS / "tiny"), Tokenization(1024))
    assert corpus.rows == len(parsed) and corpus.rows_cut == 0


@pytest.mark.parametrize("name", ["pirate", "recipes"])
def test_demo_rows_are_short_paragraphs_without_repeats(name: str) -> None:
    texts = [" ".join(row.values()) for row in rows(name)]
    assert len(set(texts)) == len(texts) >= 40
    assert all(20 <= len(text.split()) <= 80 for text in texts)


def test_demo_voices_differ() -> None:
    """Few of the content words of one corpus occur in the other."""
    words = [
        {
            w
            for w, n in Counter(" ".join(" ".join(r.values()) for r in rows(name)).lower().split()).items()
            if len(w) > 4
        }
        for name in ("pirate", "recipes")
    ]
    assert len(words[0] & words[1]) < 0.2 * min(map(len, words))
