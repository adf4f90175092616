"""Checkpoints whose tokenizer is Python code, as Kimi's: refused with what to do, and with the flag the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.kimi import PATTERN, RANKS, SPECIAL, write_tokenizer

TEXTS = (
    "hello world",
    "I'M  here:\n\n it's 12345 漢字 漢字テスト XMLHttp",
    "<|im_user|>Hi<think> é x<|im_end|>[EOS]",
    " \n\t ",
)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(write_tokenizer(tmp_path_factory.mktemp("kimi"))), trust_remote_code=True)


@pytest.mark.parametrize("family", ["kimi_k2", "kimi_k25", "deepseek_v3"])
def test_without_the_flag_no_other_tokenizer_takes_its_place(family: str, tmp_path: Path) -> None:
    """transformers guesses one from `tiktoken.model` for families that it knows, which cuts texts in another way."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UnsupportedBase, match=r"Python code \(tokenization_kimi.*pass --trust-remote-code.*tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_its_tokens_are_those_of_its_code(kimi: Tokenizer) -> None:
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL)
    for text in TEXTS:
        ids = kimi.encode(text)
        assert ids == encoding.encode(text, allowed_special="all")
        assert kimi.decode(ids, skip_special=False) == text
    assert kimi.vocab_size == encoding.n_vocab
    assert (kimi.bos_token_id, kimi.eos_token_ids) == (SPECIAL["[BOS]"], (SPECIAL["[EOS]"],))
    assert kimi.decode(kimi.encode(TEXTS[2])) == "Hi<think> é x"
    assert kimi.chat([{"role": "user", "content": "hello"}]) == encoding.encode(
        "<|im_user|>hello<|im_end|>", allowed_special="all"
    )
    assert Tokenizer.from_state(kimi.state()).encode(TEXTS[1]) == kimi.encode(TEXTS[1])


@given(st.text(max_size=40))
def test_any_text_is_cut_as_its_code_cuts_it(kimi: Tokenizer, text: str) -> None:
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL)
    assert kimi.encode(text) == encoding.encode(text, disallowed_special=())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pattern": PATTERN.replace("{1,3}", "{1,3}+")}, "cuts texts as no fast one does"),
        ({"pattern": r"\p{L}+|\s+"}, "cuts texts as no fast one does"),
        ({"code": "import no_such_package\n"}, "no_such_package"),
        ({"code": "raise RuntimeError('broken')"}, "broken"),
        (
            {"code": "class TikTokenTokenizer:\n    from_pretrained = classmethod(lambda cls, _: cls())\n"},
            "not tiktoken's",
        ),
    ],
    ids=["possessive", "drops", "missing", "raises", "other"],
)
def test_code_without_a_fast_form_is_refused(changed: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, **changed)
    with pytest.raises(UnsupportedBase, match=f"its own code tokenization_kimi.TikTokenTokenizer.*{reason}"):
        Tokenizer.load(str(tmp_path), trust_remote_code=True)
