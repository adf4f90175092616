from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from coserve.core.errors import InvalidRequest, UnsupportedBase
from coserve.data.pretrained.tokenizer import Detokenizer, Tokenizer
from tests.support.tokenizers import byte_level, sentencepiece_like, write_folder

ROLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
BYTE_LEVEL = Tokenizer(byte_level(), special_tokens=ROLES)
SENTENCEPIECE = Tokenizer(sentencepiece_like(), special_tokens=ROLES)
BYTE_TOKENS = {id for token, id in sentencepiece_like().get_vocab().items() if token.startswith("<0x")}
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)


def pushed(tokenizer: Tokenizer, ids: list[int], prompt: list[int], *, skip_special: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=skip_special)
    return "".join([*(detokenizer.push([id]) for id in ids), detokenizer.flush()])


@given(TEXTS)
def test_byte_level_encode_and_decode_are_inverse(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


@BOTH
@given(text=TEXTS)
def test_pushes_together_are_the_full_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert pushed(tokenizer, ids, []) == tokenizer.decode(ids)
    assert Detokenizer(tokenizer).push(ids) == "" or not Detokenizer(tokenizer).push(ids[:1]).endswith("�")


@BOTH
@given(data=st.data(), skip_special=st.booleans())
def test_pushes_of_any_tokens_are_the_full_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    # Byte tokens of the second kind are left out: one bad byte turns the good ones before it, already given, into
    # U+FFFD.
    known = [id for id in range(tokenizer.vocab_size) if tokenizer is BYTE_LEVEL or id not in BYTE_TOKENS]
    ids = data.draw(st.lists(st.sampled_from(known), max_size=12))
    expected = tokenizer.decode(ids, skip_special=skip_special)
    assert pushed(tokenizer, ids, [], skip_special=skip_special) == expected


@BOTH
@given(prompt=TEXTS, text=TEXTS)
def test_a_continuation_keeps_its_leading_space(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before = tokenizer.encode("say: " + prompt + "x")
    ids = tokenizer.encode_continuation(text)
    assert pushed(tokenizer, ids, before) == tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :] == text


def test_no_push_ends_inside_a_character() -> None:
    ids = BYTE_LEVEL.encode("a🙂b")
    detokenizer = Detokenizer(BYTE_LEVEL)
    parts = [detokenizer.push([id]) for id in ids]
    assert "".join(parts) == "a🙂b"
    assert all("�" not in part for part in parts)


class Watched:
    """A tokenizer that knows the most tokens which it decoded together."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return BYTE_LEVEL.decode(ids, skip_special=skip_special)


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    bad, watched = BYTE_LEVEL.encode("🙂")[0], Watched()
    detokenizer = Detokenizer(cast("Tokenizer", watched))
    assert "�" in "".join(detokenizer.push([bad]) for _ in range(64))
    assert watched.longest < 64


def test_tokens_without_a_text_are_not_kept() -> None:
    bos, eos = BYTE_LEVEL.bos_token_id, BYTE_LEVEL.eos_token_id
    assert bos is not None
    assert eos is not None
    prompt, (first, *rest) = BYTE_LEVEL.encode("say"), BYTE_LEVEL.encode("🙂 and hi", add_special=False)
    watched, text = Watched(), ""
    detokenizer = Detokenizer(cast("Tokenizer", watched), prompt)
    for id in [*[eos] * 500, first, *rest, *[bos] * 500, *rest[-1:]]:
        text += detokenizer.push([id])
    assert text + detokenizer.flush() == "🙂 and hi" + BYTE_LEVEL.decode(rest[-1:])
    assert watched.longest < 64


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*BYTE_LEVEL.encode("hi"), BYTE_LEVEL.eos_token_id or 0]
    assert BYTE_LEVEL.decode(ids) == "hi"
    assert BYTE_LEVEL.decode(ids, skip_special=False) == "hi<eos>"
    assert BYTE_LEVEL.vocabulary.name(BYTE_LEVEL.eos_token_ids[0]) == "<eos>"


def test_bos_follows_the_post_processor() -> None:
    assert SENTENCEPIECE.encode("the")[0] == SENTENCEPIECE.bos_token_id
    assert SENTENCEPIECE.bos_token_id not in SENTENCEPIECE.encode("the", add_special=False)
    assert SENTENCEPIECE.encode("the", add_special=False) != SENTENCEPIECE.encode_continuation("the")


def test_folder_with_its_configs(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), add_bos_token=True, chat_template="{{ messages[0].content }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (0, 4)
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}])) == "hi"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert tokenizer.decode(Tokenizer.load(str(tmp_path)).chat([{"role": "user", "content": "hi"}])) == "other"


def test_a_template_from_a_file_replaces_the_bases_own(tmp_path: Path) -> None:
    base = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), chat_template="own"))
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}<eos>")
    given = base.with_chat_template(tmp_path / "given.jinja")
    assert given.decode(given.chat([{"role": "user", "content": "hi"}]), skip_special=False) == "hi<eos>"
    assert given.eos_token_ids == base.eos_token_ids and given.encode("hi") == base.encode("hi")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% if %}", "chat_template: .*given.jinja: Expected an expression"),
        (b"", "chat_template: .*given.jinja: expected a template that writes `messages`"),
        (b"a note", "chat_template: .*given.jinja: expected a template that writes `messages`"),
        (b"\xff", "chat_template: cannot read .*given.jinja: .*utf-8"),
        (None, "chat_template: cannot read .*given.jinja: No such file"),
    ],
)
def test_a_file_that_is_no_template_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "given.jinja").write_bytes(content)
    with pytest.raises(UnsupportedBase, match=message):
        BYTE_LEVEL.with_chat_template(tmp_path / "given.jinja")


def test_explicit_no_bos_wins_over_the_post_processor(tmp_path: Path) -> None:
    write_folder(tmp_path, sentencepiece_like(), add_bos_token=False)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id not in tokenizer.encode("the")


def test_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "bos_token": "<eos>", "unk_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello there") == BYTE_LEVEL.encode("hello there")
    assert tokenizer.eos_token_ids == (0,)


def test_a_base_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedBase, match="no such folder"):
        Tokenizer.load("no//such//model")
    with pytest.raises(UnsupportedBase, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_eos_behind_a_text_is_left_out(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
    )
    tokenizer = Tokenizer(backend, special_tokens=ROLES)
    assert tokenizer.encode("hi") == [1, *BYTE_LEVEL.encode("hi")]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\ud800"])
def test_broken_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UnsupportedBase):
        Tokenizer.from_folder(tmp_path)


def test_no_chat_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        BYTE_LEVEL.chat([{"role": "user", "content": "hi"}])


def test_bundled_tokenizer() -> None:
    tokenizer = Tokenizer.load("bundled")
    assert tokenizer.eos_token_ids == (0, 1)
    assert tokenizer.decode(tokenizer.encode("Once upon a time — 🙂")) == "Once upon a time — 🙂"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    ids, learn = tokenizer.encode_chat_for_training(messages)
    learned = [id for id, wanted in zip(ids, learn, strict=True) if wanted]
    assert tokenizer.decode(learned, skip_special=False) == "hello<|end|>"
    assert tokenizer.chat(messages[:1]) == ids[: learn.index(True)]


def test_importing_needs_no_torch() -> None:
    code = (
        "import sys, coserve.data.pretrained.tokenizer as t; t.Tokenizer.load('bundled').encode('x'); "
        "import coserve.data.corpus.tokenize, coserve.data.corpus.batch_plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "opt"])
def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path: Path, family: str) -> None:
    """For most families transformers makes an empty one, which turns every text into no tokens or unknown ones."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UnsupportedBase, match=r"put its tokenizer\.json beside config\.json"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("model", [models.BPE(), models.WordLevel({"<unk>": 0}, unk_token="<unk>"), models.Unigram()])
def test_an_empty_tokenizer_is_refused(tmp_path: Path, model: models.Model) -> None:
    backend = Backend(model)
    backend.add_special_tokens(["<unk>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedBase, match="knows no words"):
        Tokenizer.from_folder(tmp_path)
