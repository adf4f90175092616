"""Makes a fast tokenizer of one that is Python code of the checkpoint, as Kimi's is, by running that code once.
Imports torch, through transformers."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from coserve.core.errors import UnsupportedBase

_SAMPLES = (
    "Hello, it's 2024 and  I'M here:\n\n don't!\t\r\n  x1234567 caféAu lait… camelCaseHTTPServer  \n ",
    "漢字テストabc 한국어 مرحبا e\u0301\u0302x 🙂\ufffd",
    "def f(x_1):\n\treturn x[-1] ** 2  # 3.14159 \\d+\n\n\n    </a>",
)
"""Texts that the fast tokenizer must cut as the code does: contractions, case, digits, scripts, marks, spaces."""


def backend_of_code(folder: Path, reference: str) -> tokenizers.Tokenizer:
    """Run a checkpoint's tokenizer class and return its fast form: its own, or one made from its tiktoken encoding.

    `reference`: MODULE.CLASS, as `auto_map` names it. Raises `UnsupportedBase`: the code fails, is of another kind, or
    gives other tokens than the fast form.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        loaded = get_class_from_dynamic_module(reference, str(folder)).from_pretrained(str(folder))
    except Exception as error:  # the code may raise anything
        raise UnsupportedBase(f"the base's tokenizer, its own code {reference}, fails: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return backend
    encoding = next((one for one in vars(loaded).values() if hasattr(one, "_mergeable_ranks")), None)
    if encoding is None:
        raise UnsupportedBase(f"the base's tokenizer, its own code {reference}, has no fast form and is not tiktoken's")
    special: dict[str, int] = encoding._special_tokens
    backend = _byte_pairs(encoding._mergeable_ranks, encoding._pat_str)
    skipped, known = set(loaded.all_special_ids), loaded.added_tokens_decoder
    backend.add_tokens(
        [
            known.get(id, tokenizers.AddedToken(token, special=id in skipped, normalized=False))
            for token, id in sorted(special.items(), key=lambda one: one[1])
        ]
    )
    for text in (*_SAMPLES, "".join(special)):
        if backend.encode(text).ids != loaded.encode(text, add_special_tokens=False):
            raise UnsupportedBase(f"the base's tokenizer, its own code {reference}, cuts texts as no fast one does")
    return backend


def _byte_pairs(ranks: dict[bytes, int], pattern: str) -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):  # type: ignore[misc]
        def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    made: tokenizers.Tokenizer = Converter(pattern=pattern).converted()
    return made
