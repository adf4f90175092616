"""QuALITY (Pang et al., NAACL 2022): long articles with questions of four options, for those who have its files.

Reads a file of version 1.0.1, such as `QuALITY.v1.0.1.htmlstripped.dev`: a JSON object a line, with `title`, `article`
and `questions`, each with `question`, `options` and `gold_label` (1 to 4; missing in the test set).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.documents.facts import Document, Question

LETTERS = "ABCD"


def articles(path: Path, count: int, questions: int, seed: int) -> Iterator[Document]:
    """Yield `count` articles, drawn by the seed, with at most so many questions each. Lines with the same article, of
    different writers, are one document."""
    texts, asked = dict[str, str](), defaultdict[str, list[Question]](list)
    for line in path.read_text().rstrip("\n").split("\n"):  # `splitlines` cuts at more, inside of texts
        row = json.loads(line)
        texts[row["title"]] = row["article"]
        asked[row["title"]] += [_question(each) for each in row["questions"] if "gold_label" in each]
    titles = [title for title in texts if asked[title]]
    for number, title in enumerate(Random(seed).sample(titles, min(count, len(titles)))):
        yield Document(f"article-{seed}-{number}", texts[title], tuple(asked[title][:questions]))


def _question(row: dict[str, Any]) -> Question:
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row["options"], strict=True))
    text = f"{row['question']}\n{options}\nAnswer with the letter of the right option."
    return Question("choice", text, (LETTERS[int(row["gold_label"]) - 1],))
