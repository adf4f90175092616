"""QuALITY's files, by two invented articles in its format, and how their choices count."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.documents.arms import Arms, Row, choices, right
from benchmarks.documents.facts import Question
from benchmarks.documents.learned import shown
from benchmarks.documents.quality import articles
from coserve.client import AsyncClient
from tests.support.real_server import serve_real

LAMP = (
    "The lamp of Orvane went out on the night of the ferry.\u2028Tilda had trimmed it at six, as she did each evening, "
    "and had gone down to the boats. Nobody but her brother had a key."
)
WELL = (
    "Nobody in Sundby drank from the well before the frost. Old Harm said that it was bitter; his daughter said that "
    "Harm had dropped the parish silver in it and did not want it found."
)


def line(id: str, title: str, article: str, *questions: dict[str, Any], writer: str = "1") -> dict[str, Any]:
    """A line as version 1.0.1 has it, of one writer."""
    return {
        "article_id": id,
        "set_unique_id": f"{id}_{writer}",
        "batch_num": "23",
        "writer_id": writer,
        "source": "Gutenberg",
        "title": title,
        "year": 1957,
        "author": "Nobody",
        "topic": "Short stories",
        "article": article,
        "questions": list(questions),
        "url": "",
        "license": "invented",
    }


def question(text: str, options: str, gold: int | None) -> dict[str, Any]:
    labels = {} if gold is None else {"writer_label": gold, "gold_label": gold}
    asked = {"question": text, "question_unique_id": text, "options": options.split("|"), "difficult": 1}
    return asked | labels | {"validation": [], "speed_validation": []}


WHO = question("Who could have put out the lamp?", "Harm|Her brother|The ferryman|A storm", 2)
WHEN = question("When was the lamp trimmed?", "At noon|At six|Never|In the frost", 2)
WHY = question("Why does Harm call the well bitter?", "It is|He jokes|He hides something|He is ill", 3)
LINES = [
    line("1001", "The Light", LAMP, WHO),
    line("1001", "The Light", LAMP, WHEN, writer="2"),
    line("1002", "The Light", WELL, WHY),
    line("1003", "Unlabelled", WELL, question("Why?", "a|b|c|d", None)),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "QuALITY.v1.0.1.htmlstripped.dev"
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in LINES))
    return path


def test_articles_are_documents_of_choices(file: Path) -> None:
    """By their ids: two have one title, and one has two writers. Those without labels are left out."""
    found = {each.text: each for each in articles(file, 5, 9, seed=0)}
    assert sorted(found) == sorted(f"The Light\n\n{text}" for text in (LAMP, WELL))
    lamp = found[f"The Light\n\n{LAMP}"].questions
    assert [each.answers for each in lamp] == [("B",), ("B",)]
    assert "B. Her brother" in lamp[0].text
    assert [right(lamp[0], text) for text in ("B. Her brother", " (B)", "Her brother", "A", "Because")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    article = Question("choice", "?", ("A",))
    assert [right(article, text) for text in ("A", "A.", "A is right", "A man sang")] == [True, True, True, False]
    assert len(next(articles(file, 1, 1, seed=3)).questions) == 1


@pytest.mark.slow
async def test_a_base_chooses_among_the_letters(file: Path, tmp_path: Path) -> None:
    """By the letter that it writes, which of the bundled base is none, and by the likeliest one."""
    rows = list[Row]()
    async with serve_real(tmp_path / "data") as api, AsyncClient(api.url) as client:
        for document in articles(file, 2, 9, seed=0):
            arms = Arms(client, 0, document, rows)
            await arms.ask("floor")
            await arms.ask("context", context=document.text)
            for asked, answer in zip(document.questions, await arms.answers(None, None), strict=True):
                scores = dict[str, float]()
                for letter in "ABCD":
                    said = [{"role": "user", "content": asked.text}, {"role": "assistant", "content": letter}]
                    scored = await client.generate(messages=said, max_tokens=0, prompt_logprobs=0)
                    assert scored.prompt_logprobs is not None
                    (found,) = [each.logprob for each in scored.prompt_logprobs[-3:] if each.token == letter]
                    assert found is not None
                    scores[letter] = found
                assert answer.likeliest == (max(scores, key=lambda each: scores[each]) == asked.answers[0])
    assert [(row.arm, row.kind, row.asked) for row in rows if row.asked == 2] == [
        (arm, kind, 2) for arm in ("floor", "context") for kind in ("choice", "likeliest")
    ]
    share, unit, about = choices(rows, "floor")
    assert 0 <= share <= 1 and unit == "fraction"
    assert about["documents"] == 2
    assert "likeliest_over_context" in about


def test_a_result_names_its_file(file: Path) -> None:
    options = Namespace(quality=file, people=3, out=file.parent, commit="", began=1.0, cache=None)
    assert json.loads(json.dumps(shown(options))) == {"quality": file.name, "people": 3}


def test_arms_are_compared_by_document() -> None:
    """In pairs: what every arm finds easy in one document does not widen the interval."""
    rows = [
        Row(0, document, arm, kind, count, 10, 5.0)
        for document, counts in {"easy": (7, 9), "hard": (1, 3), "other": (4, 6)}.items()
        for arm, count in zip(("floor", "topk_kd"), counts, strict=True)
        for kind in ("choice", "likeliest")
    ]
    rows.append(Row(0, "alone", "topk_kd", "choice", 10, 10, 5.0))
    _, _, about = choices(rows, "topk_kd")
    assert about["likeliest_over_floor"] == {"gained": 0.2, "bootstrap_95": (0.2, 0.2)}
    assert about["generated_over_floor"] == {"gained": 0.2, "bootstrap_95": (0.2, 0.2)}, (
        "not of that it alone was asked"
    )
    assert "likeliest_over_context" not in about
