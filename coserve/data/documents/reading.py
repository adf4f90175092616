"""Splits documents into chunks. No torch."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

from coserve.core.document_files import decoded_text, read_document
from coserve.core.errors import EmptyCorpus, UnreadableCorpus
from coserve.core.processes import limited
from coserve.core.types import Wire
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.durable import storage_error

MEMORY = 2 << 30
"""Most bytes of memory of a process that reads a document: a small PDF may hold streams of any size."""
MAX_DOCUMENT_TOKENS = 1 << 22
PIECE = 1 << 18
"""Characters that are tokenised at once: the tokenizer takes some hundred bytes of memory a token, and ends the process
where it gets none."""


class Chunks(Wire, frozen=True):
    """A document as overlapping texts, and its tokens in all."""

    texts: list[str]
    tokens: int
    digest: str = ""
    """SHA-256 of the whole text."""


def split_document(context: TaskContext, path: str | None, text: bytes, size: int, overlap: int) -> Chunks:
    """Helper task: split the document at `path` into chunks of `size` tokens that share `overlap` tokens. None: the
    document is `text`, in UTF-8. Raises `UnreadableCorpus`, `EmptyCorpus`, `StorageError`."""
    try:
        with limited(resource.RLIMIT_DATA, MEMORY):
            read = decoded_text(text) if path is None else read_document(Path(path))
            return split_text(read, context.tokenizer, size, overlap)
    except UnreadableCorpus as error:
        failed = storage_error(error.__cause__.errno) if isinstance(error.__cause__, OSError) else None
        raise failed or error from error.__cause__
    except MemoryError:
        raise UnreadableCorpus(f"the document takes more than {MEMORY >> 20} MiB of memory to read") from None


def split_text(text: str, tokenizer: Tokenizer, size: int, overlap: int) -> Chunks:
    """Split a text into chunks of at most `size` tokens, each of which repeats the last `overlap` tokens of the one
    before it. Raises `EmptyCorpus`, `UnreadableCorpus`."""
    ids = list[int]()
    for piece in _pieces(text) if text.strip() else ():
        ids += tokenizer.encode(piece, add_special=False)
        if len(ids) > MAX_DOCUMENT_TOKENS:
            raise UnreadableCorpus(f"expected a document of at most {MAX_DOCUMENT_TOKENS} tokens, got more")
    if not ids:
        raise EmptyCorpus("the document has no text (scanned pages of a PDF have none)")
    step = max(1, size - overlap)
    starts = range(0, max(1, len(ids) - overlap), step)
    texts = [
        tokenizer.decode(ids[start : start + size], skip_special=False).strip("\ufffd").strip() for start in starts
    ]
    return Chunks([chunk for chunk in texts if chunk], len(ids), hashlib.sha256(text.encode()).hexdigest())


def _pieces(text: str) -> Iterator[str]:
    """Cut a text before spaces or line ends, where tokens of most vocabularies begin."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            found = max(text.rfind(space, start + 1, end) for space in " \n")
            end = found if found > 0 else end
        yield text[start:end]
        start = end


def first_tokens(chunks: Chunks, count: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the document's first `count` tokens, or all if it has fewer. The overlap of two chunks appears twice."""
    found = list[int]()
    for text in chunks.texts:
        found += tokenizer.encode(text, add_special=not found)
        if len(found) >= count:
            break
    return tuple(found[:count])
