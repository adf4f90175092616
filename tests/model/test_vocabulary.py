"""What a token stands for: its bytes and its name, with the decoders that bases come with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from coserve.data.pretrained.vocabulary import Vocabulary
from tests.support.tokenizers import byte_level, sentencepiece_like

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)


def metaspace() -> Backend:
    """Pieces that begin with a space, byte fallback, and no normalizer, as newer conversions of sentencepiece have
    it."""
    backend = sentencepiece_like()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return backend


def word_pieces() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "sun": 1, "##ny": 2, "day": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend


KINDS = {"byte_level": byte_level(), "sentencepiece": sentencepiece_like(), "metaspace": metaspace()}


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_text(kind: str, text: str) -> None:
    vocabulary = Vocabulary(KINDS[kind])
    ids = KINDS[kind].encode(text, add_special_tokens=False).ids
    joined = b"".join(map(vocabulary.utf8, ids)).decode()
    assert joined in (text, " " + text)  # the space that sentencepiece puts before a text belongs to its first token


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_distinct_and_show_parts_of_characters_as_bytes(kind: str) -> None:
    backend, vocabulary = KINDS[kind], Vocabulary(KINDS[kind])
    named = {vocabulary.name(id): token for token, id in backend.get_vocab().items() if not token.startswith("<0x")}
    assert len(named) == sum(not token.startswith("<0x") for token in backend.get_vocab())
    parts = [vocabulary.name(id) for id in backend.encode("x🐈", add_special_tokens=False).ids]
    assert parts[-1].startswith(r"bytes:\x") and all(ord(character) < 128 for character in parts[-1])
    hexes = "".join(part.removeprefix("bytes:").replace(r"\x", "") for part in parts if part.startswith("bytes:"))
    assert bytes.fromhex(hexes).decode().strip() == "🐈"


def test_a_piece_that_begins_a_word_has_its_space() -> None:
    backend = sentencepiece_like()
    vocabulary = Vocabulary(backend)
    assert [vocabulary.name(backend.token_to_id(piece)) for piece in ("▁the", "▁t", "t", "<0x0A>", "<eos>")] == [
        " the",
        " t",
        "t",
        "\n",
        "<eos>",
    ]
    assert [Vocabulary(word_pieces()).name(id) for id in (1, 2, 3)] == [" sun", "ny", " day"]
    assert Vocabulary(backend).name(1 << 20) == ""
