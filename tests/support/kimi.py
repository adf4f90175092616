"""A checkpoint as Kimi K2 is published: DeepSeek V3's model under another name, and a tokenizer in Python over
tiktoken's byte pairs, without `tokenizer.json`."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tests.support.families import tiny_family

PAIRS = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b"12", b"34", b"123", "漢".encode(), "漢字".encode())
RANKS = {token: rank for rank, token in enumerate([*(bytes([one]) for one in range(256)), *PAIRS])}
ADDED = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<think>")
RESERVED = 8
SPECIAL = {
    (ADDED[place] if place < len(ADDED) else f"<|reserved_token_{len(RANKS) + place}|>"): len(RANKS) + place
    for place in range(RESERVED)
}
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
CODE = """
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        named = {{id: one.content for id, one in (added_tokens_decoder or {{}}).items()}}
        ids = range(len(ranks), len(ranks) + {reserved})
        special = {{named.get(id, f"<|reserved_token_{{id}}|>"): id for id in ids}}
        self.model = tiktoken.Encoding("kimi", pat_str={pattern!r}, mergeable_ranks=ranks, special_tokens=special)
        letters = bytes_to_unicode()
        every = range(self.model.n_vocab)
        self.names = {{id: "".join(letters[one] for one in self.model.decode_single_token_bytes(id)) for id in every}}
        self.ids = {{name: id for id, name in self.names.items()}}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.ids

    def _tokenize(self, text, **kwargs):
        return [self.names[id] for id in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.ids.get(token)

    def _convert_id_to_token(self, index):
        return self.names.get(index)
"""


def write_tokenizer(folder: Path, *, pattern: str = PATTERN, code: str = CODE) -> Path:
    """`pattern`: by which the code cuts texts."""
    (folder / "tokenization_kimi.py").write_text(code.format(pattern=pattern, reserved=RESERVED))
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(SPECIAL[token]): {"content": token, "special": token != "<think>", "normalized": False} for token in ADDED
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_user|>{{ message.content }}<|im_end|>{% endfor %}"
    )
    return folder


def write_checkpoint(folder: Path) -> Path:
    """With weights; the code of its model would end the process."""
    tiny_family("deepseek_v3", vocab_size=len(RANKS) + RESERVED).save_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "auto_map": classes}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    return write_tokenizer(folder)
