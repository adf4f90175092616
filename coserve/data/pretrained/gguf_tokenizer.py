"""Makes a tokenizer from the vocabulary in a GGUF file, as llama.cpp reads it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import GgufHeader, read_header

CONTROL, USER_DEFINED = 3, 4
"""GGUF types of added tokens, which merges never produce: control tokens are special, user-defined ones are not."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_MARKED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGITS_APART = (r"\p{N}", _GPT2)
_LLAMA3, _QWEN2, _QWEN35 = (_WORDS % "{1,3}",), (_WORDS % "",), (_MARKED,)
_O200K = (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),)
_LIKE_LLAMA3 = ("llama-bpe", "llama-v3", "llama3", "lfm2", "falcon-h1", "pixtral", "midm-2.0")
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "gpt-neox", "dolly-v2", "exaone4"), (_GPT2,)),
    **dict.fromkeys((*_LIKE_LLAMA3, "dbrx", "smaug-bpe", "falcon3", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    "seed-coder": (_SEED,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_APART),
    "tekken": (_CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
}
"""Pre-tokenizer patterns by `tokenizer.ggml.pre`; each one splits the pieces that the one before it made."""
_BOS_BY_DEFAULT = (*_LIKE_LLAMA3, "tekken")
_MERGED_FIRST = (*_BOS_BY_DEFAULT, "falcon3")
"""Pre-tokenizers whose words become one token if the vocabulary has them, without merges (`ignore_merges`)."""
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


class GgufTokenizer(NamedTuple):
    """The arguments of a `Tokenizer`, in order."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def read_tokenizer(path: Path) -> GgufTokenizer:
    """Read the tokenizer and the chat template of a GGUF file. Raises `UnsupportedBase` for kinds of vocabularies that
    are not known here."""
    header = read_header(path)
    metadata, kind = header.metadata, header.metadata.get("tokenizer.ggml.model")
    tokens = cast("list[str]", metadata.get("tokenizer.ggml.tokens") or [])
    if kind == "gpt2":
        backend = _byte_pairs(header, tokens)
    elif kind in ("llama", "gemma4"):
        backend = _pieces(header, tokens)
    else:
        raise UnsupportedBase(
            f"model: {path.name}: its vocabulary is of kind {kind!r}; coserve reads gpt2, llama and gemma4"
        )
    types = cast("list[int]", metadata.get("tokenizer.ggml.token_type") or [])
    added = {CONTROL: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=added[type], normalized=False)
            for token, type in zip(tokens, types, strict=False)
            if type in added
        ]
    )
    ids = {role: header.number(f"tokenizer.ggml.{name}_token_id") for name, role in _ROLES.items()}
    special = {f"{role}_token": tokens[id] for role, id in ids.items() if id is not None and id < len(tokens)}
    _add_bos(backend, header, special.get("bos_token"), spm=kind == "llama")
    ends = (header.number(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        backend, special, tuple(end for end in ends if end is not None), template if isinstance(template, str) else None
    )


def _byte_pairs(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer."""
    pre = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise UnsupportedBase(f"model: its vocabulary cuts texts as {pre!r}, which is not known here; known: {known}")
    vocabulary, pairs = {token: id for id, token in enumerate(tokens)}, _merges(header)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in _MERGED_FIRST))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, whole])
    backend.decoder = decoders.ByteLevel()
    if SPLITS[pre] in (_QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    return backend


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges = cast("list[str]", header.metadata.get("tokenizer.ggml.merges") or [])
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _pieces(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    """Make a SentencePiece BPE tokenizer: without a list of merges, the pair is merged first whose piece has the best
    score."""
    scores = cast("list[float]", header.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens))
    types = cast("list[int]", header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    vocabulary = {token: id for id, token in enumerate(tokens)}
    found = [
        (-scores[id], vocabulary[token[:cut]], vocabulary[token[cut:]])
        for token, id in vocabulary.items()
        if types[id] not in (CONTROL, USER_DEFINED)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    pairs = _merges(header) or [(tokens[left], tokens[right]) for _, left, right in sorted(found)]
    unknown = header.number("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, pairs, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    prefixed = header.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _add_bos(backend: tokenizers.Tokenizer, header: GgufHeader, bos: str | None, *, spm: bool) -> None:
    default = spm or header.metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    id = None if bos is None else backend.token_to_id(bos)
    if header.metadata.get("tokenizer.ggml.add_bos_token", default) is True and bos is not None and id is not None:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, id)])
        backend.post_processor = template
