"""Small tokenizers of the kinds that bases come with."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<eos>", "<bos>", "<|user|>", "<|assistant|>", "<|end|>"]
TEXT = ["the quick brown fox jumps over the lazy dog", "hello there, how are you?", "naïve café — 你好 🙂 done"] * 4


def byte_level() -> Backend:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def sentencepiece_like() -> Backend:
    """A space before the text, byte fallback and a BOS token, as Llama 2 has it."""
    pieces = sorted({char for text in TEXT for char in text.replace(" ", "▁") if ord(char) < 128 or char == "▁"})
    vocab = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "▁t", "▁th", "▁the", "lo"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "o")]
    backend = Backend(
        models.BPE({token: id for id, token in enumerate(vocab)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    return backend


def write_folder(folder: Path, backend: Backend, **config: object) -> Path:
    """A base's folder with this tokenizer; `config` goes to tokenizer_config.json."""
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
