"""QuALITY (Pang et al., NAACL 2022): long articles with questions of four options, for those who have its files.

    python -m benchmarks.documents.learned --quality QuALITY.v1.0.1.htmlstripped.dev --model FOLDER --label quality \\
        --documents 20 --questions 40 --seeds 1 --recipes topk_kd,cartridge --chunk-tokens 1024 --out R

Reads a file of version 1.0.1: a JSON object a line, with `article_id`, `title`, `article` and `questions`, each with
`question`, `options` and `gold_label` (1 to 4; missing in the test set). A choice is right by the letter that the
answer begins with (`choice`), and by the likeliest of the four letters (`likeliest`), as a base that does not keep to
the form still has one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.documents.facts import LETTERS, Document, Question


def articles(path: Path, count: int, questions: int, seed: int) -> Iterator[Document]:
    """Yield `count` articles, drawn by the seed, with at most so many questions each. Lines with the same article, of
    different writers, are one document."""
    texts, asked = dict[str, str](), defaultdict[str, list[Question]](list)
    for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):  # `splitlines` cuts at more, inside of texts
        row = json.loads(line)
        id = str(row["article_id"])
        texts[id] = f"{row['title']}\n\n{row['article']}"
        asked[id] += [_question(each) for each in row["questions"] if "gold_label" in each]
    known = [id for id in texts if asked[id]]
    for number, id in enumerate(Random(seed).sample(known, min(count, len(known)))):
        yield Document(f"article-{seed}-{number}", texts[id], tuple(asked[id][:questions]))


def _question(row: dict[str, Any]) -> Question:
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row["options"], strict=True))
    text = f"{row['question']}\n{options}\nAnswer with the letter of the right option."
    return Question("choice", text, (LETTERS[int(row["gold_label"]) - 1],))
