"""Documents are read and split: nothing of the text is lost, and what is no text is refused by name."""

from __future__ import annotations

import os
import re
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.document_files import decoded_text, read_document
from coserve.core.errors import EmptyCorpus, UnreadableCorpus
from coserve.core.schemas.generation import GenerateRequest
from coserve.data.documents.prompts import Prompts, asked_sentence, clean_question, different, grounded, nearest_chunks
from coserve.data.documents.reading import PIECE, split_text
from tests.support.api_server import tokenizer

WORDS = ["the", "bridge", "of", "orvane", "was", "opened", "in", "may", "by", "a", "man", "who", "could", "not", "swim"]


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=120), st.integers(2, 24), st.integers(0, 12))
def test_chunks_overlap_and_hold_the_whole_text(words: list[str], size: int, overlap: int) -> None:
    text = " ".join(words)
    overlap = min(overlap, size - 1)
    found = split_text(text, tokenizer(), size, overlap)
    assert found.tokens == len(tokenizer().encode(text, add_special=False))
    assert all(len(tokenizer().encode(chunk, add_special=False)) <= size + 2 for chunk in found.texts)
    assert found.tokens > size or found.texts == [text]
    assert len(" ".join(found.texts)) >= len(text)


def test_a_long_text_has_the_same_tokens_as_a_short_one() -> None:
    text = " ".join(f"{word}{number}\n" for number in range(1200) for word in WORDS) * 3
    assert len(text) > PIECE
    found = split_text(text, tokenizer(), 512, 0)
    assert "".join("".join(found.texts).split()) == "".join(text.split())
    assert found.tokens == len(tokenizer().encode(text, add_special=False))


def pdf(text: str, x: str = "0078") -> bytes:
    """A PDF of one page, written by hand. `x`: UTF-16 of the letter x (hex)."""
    cmap = f"begincmap 1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <78> <{x}> endbfchar endcmap"
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/ToUnicode 6 0 R>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(cmap), cmap.encode()),
    ]
    out, places = BytesIO(b"%PDF-1.4\n"), []
    out.seek(0, 2)
    for number, content in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj%s endobj\n" % (number, content))
    table = out.tell()
    out.write(b"xref\n0 7\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer<</Size 7/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % table)
    return out.getvalue()


def test_a_folder_is_its_documents_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Second")
    (tmp_path / "a.txt").write_text("First", encoding="utf-8-sig")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.pdf").write_bytes(pdf("Third of all"))
    for hidden in (".draft.md", "deep/.git/notes.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("not meant")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "prices.csv").write_text("name,price\nbridge,3\n")
    assert read_document(tmp_path) == "First\n\n# Second\n\nThird of all"
    assert read_document(tmp_path / "prices.csv") == "name,price\nbridge,3\n", "named, it is text as it stands"


def test_a_pdf_with_half_a_letter_is_text() -> None:
    """Half of a surrogate pair, which UTF-8 may not have, is replaced; halves that belong together are joined."""
    assert decoded_text(pdf("axa", x="D835")) == "a\ufffda"
    assert decoded_text(pdf("axa", x="D835DC00")) == "a\U0001d400a"


def test_what_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCorpus, match="UTF-8"):
        decoded_text(b"\xff\xfe\x00")
    with pytest.raises(UnreadableCorpus, match="PDF cannot be read"):
        decoded_text(b"%PDF-1.4 and nothing more")
    with pytest.raises(UnreadableCorpus, match="PDF cannot be read"):
        decoded_text(pdf("x").replace(b"<</Length", b"<</Filter/Unknown/Length"))
    for name, content in (("a.txt", b"\xff\xfe\x00"), ("b.pdf", b"%PDF-1.4 and nothing more")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableCorpus, match=rf"^{name}: "):
            read_document(tmp_path)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UnreadableCorpus, match="regular file"):
        read_document(tmp_path / "pipe.txt")
    with pytest.raises(UnreadableCorpus, match=r"^rows\.jsonl: .*, got rows: coserve finetune NAME rows\.jsonl trains"):
        read_document(tmp_path / "rows.jsonl")
    with pytest.raises(EmptyCorpus, match="endings"):
        read_document(tmp_path)
    with pytest.raises(EmptyCorpus, match="no text"):
        split_text(" \n", tokenizer(), 8, 0)


@pytest.mark.parametrize(
    ("generated", "question"),
    [
        ("1. Who built the Orvane Bridge?\nAnswer: Prast", "Who built the Orvane Bridge?"),
        ('Question: "When was it opened to carts?"', "When was it opened to carts?"),
        ("What does the text say about the bridge?", None),
        ("Why?", None),
        ("", None),
    ],
)
def test_questions_stand_alone(generated: str, question: str | None) -> None:
    assert clean_question(generated) == question


def test_questions_are_about_their_chunk() -> None:
    chunk = "The Orvane Bridge was opened in 1911 by Ludo Prast."
    assert grounded("Who opened the Orvane Bridge?", chunk)
    assert grounded("What happened in 1911?", chunk)
    assert not grounded("What is known about the tank of Jupiter?", chunk)
    assert not grounded("What is known about this?", chunk)


def test_equal_questions_are_one_and_find_their_chunk() -> None:
    assert different(["Who was it?", "who was it", "Who is it?"]) == ["Who was it?", "Who is it?"]
    chunks = ["The bridge is green.", "The toll was four pennies.", "The bridge was opened by Prast."]
    assert nearest_chunks(["Who opened the bridge?", "How many pennies was the toll?"], chunks) == [2, 1]


def test_other_scripts_have_sentences_and_words() -> None:
    chunk = "オルベーン橋はテルマークの町にある。番人は小さな家に住む。長さは412メートルか！"
    assert {asked_sentence(chunk, attempt, 7) for attempt in range(3)} == {
        "オルベーン橋はテルマークの町にある。",
        "番人は小さな家に住む。",
        "長さは412メートルか！",
    }
    assert clean_question("番人はどこに住むか？") == "番人はどこに住むか？"
    assert grounded("オルベーン橋の長さは？", chunk)
    assert not grounded("人口はいくらですか？", chunk)
    assert grounded("मैरी क्यूरी का जन्म कहाँ हुआ था?", "मैरी क्यूरी का जन्म वारसॉ में हुआ था।")
    assert not grounded("भारत की राजधानी क्या है?", "मैरी क्यूरी का जन्म वारसॉ में हुआ था।")
    assert nearest_chunks(
        ["番人はどこに？", "다리는 어디에?"], ["橋は緑色だ。", "番人は家に住む。", "그 다리는 길다."]
    ) == [1, 2]


def test_no_part_of_a_long_sentence_is_left_out() -> None:
    words = [f"word{number}" for number in range(200)]
    asked = {asked_sentence(" ".join(words), attempt, 7) for attempt in range(200)}
    assert sorted(word for sentence in asked for word in sentence.split()) == sorted(words)


def test_attempts_ask_about_every_sentence_and_are_repeatable() -> None:
    chunk = "The bridge is green and old. The toll was four pennies. The river freezes in winter."
    for chat in (True, False):
        asked = [Prompts(chat).question(chunk, attempt, 7, 0.8, None) for attempt in range(3)]
        texts = [msgspec.json.encode(each).decode() for each in asked]
        for sentence in ("The bridge is green and old.", "The toll was four pennies.", "The river freezes in winter."):
            assert sum(f"Sentence: {sentence}" in text for text in texts) == 1
        assert asked[1] == Prompts(chat).question(chunk, 1, 7, 0.8, None)
        answers = [Prompts(chat).answer("?", chunk, 8, None, asked_sentence(chunk, n, 7)) for n in range(3)]
        for asking, answering in zip(asked, answers, strict=True):
            about = re.search(r"Sentence: ([^\n]+)\n[^\n]+\Z", _last_turn(asking))
            assert about is not None
            assert f"this: {about[1]}\n\nQuestion: ?" in _last_turn(answering), "it is shown what it asked about"


def _last_turn(request: GenerateRequest) -> str:
    if request.messages:
        return str(request.messages[-1].content)
    return str(request.prompt).removesuffix("\nAnswer:")
