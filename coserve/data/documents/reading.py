"""Reads documents (text, Markdown, PDF, folders of them) and splits them into chunks. No torch."""

from __future__ import annotations

import hashlib
import io
import resource
from pathlib import Path

from coserve.core.errors import EmptyCorpus, UnreadableCorpus
from coserve.core.processes import limited
from coserve.core.types import Wire
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.durable import disk_errors

SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".pdf")
"""Suffixes of the files that are read from a folder."""
MAX_BYTES = 256 << 20
MEMORY = 2 << 30
"""Most bytes of memory of a process that reads a document: a small PDF may hold streams of any size."""
MAX_DOCUMENT_TOKENS = 1 << 22


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
    except MemoryError:
        raise UnreadableCorpus(f"the document takes more than {MEMORY >> 20} MiB of memory to read") from None


def read_document(*paths: Path) -> str:
    """Return the text of files, and of all files of folders, by name. Errors name the file unless there is but one.
    Raises `UnreadableCorpus`, `EmptyCorpus`, `StorageError`."""
    alone = len(paths) == 1 and not paths[0].is_dir()
    return "\n\n".join(_text(file, "" if alone else f"{file.name}: ") for path in paths for file in _files(path))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())
    if not (found := [file for file in files if file.resolve().is_relative_to(path.resolve())]):
        raise EmptyCorpus(f"expected files with one of the endings {', '.join(SUFFIXES)} in the folder")
    return found


def _text(file: Path, name: str) -> str:
    content = _content(file)
    try:
        return decoded_text(content)
    except UnreadableCorpus as error:
        raise UnreadableCorpus(f"{name}{error}") from error


def _content(file: Path) -> bytes:
    try:
        with disk_errors():
            if not file.is_file():  # a pipe would be waited for
                raise UnreadableCorpus(f"{file.name}: expected a regular file")
            if (size := file.stat().st_size) > MAX_BYTES:
                raise UnreadableCorpus(f"{file.name}: expected a document of at most {MAX_BYTES} bytes, got {size}")
            return file.read_bytes()
    except OSError as error:
        raise UnreadableCorpus(f"{file.name} cannot be read: {error.strerror}") from error


def decoded_text(content: bytes) -> str:
    """Return the text of a file's content: UTF-8, or PDF, told by its first bytes. Raises `UnreadableCorpus`."""
    if content[:5] == b"%PDF-":
        return _pdf_text(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableCorpus(f"expected text in UTF-8, or PDF: byte {error.start} is neither") from None


def _pdf_text(content: bytes) -> str:
    try:
        from pypdf import PdfReader
    except ImportError:
        raise UnreadableCorpus("PDF needs the package pypdf: pip install 'coserve[pdf]'") from None
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(io.BytesIO(content)).pages)
    except MemoryError:
        raise
    except Exception as error:  # pypdf raises anything for a damaged file
        raise UnreadableCorpus(f"the PDF cannot be read: {type(error).__name__}") from error


def split_text(text: str, tokenizer: Tokenizer, size: int, overlap: int) -> Chunks:
    """Split a text into chunks of at most `size` tokens, each of which repeats the last `overlap` tokens of the one
    before it. Raises `EmptyCorpus`, `UnreadableCorpus`."""
    ids = tokenizer.encode(text, add_special=False) if text.strip() else []
    if not ids:
        raise EmptyCorpus("the document has no text (scanned pages of a PDF have none)")
    if len(ids) > MAX_DOCUMENT_TOKENS:
        raise UnreadableCorpus(f"expected a document of at most {MAX_DOCUMENT_TOKENS} tokens, got {len(ids)}")
    step = max(1, size - overlap)
    starts = range(0, max(1, len(ids) - overlap), step)
    texts = [
        tokenizer.decode(ids[start : start + size], skip_special=False).strip("\ufffd").strip() for start in starts
    ]
    return Chunks([chunk for chunk in texts if chunk], len(ids), hashlib.sha256(text.encode()).hexdigest())


def first_tokens(chunks: Chunks, count: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the document's first `count` tokens, or all if it has fewer. The overlap of two chunks appears twice."""
    found = list[int]()
    for text in chunks.texts:
        found += tokenizer.encode(text, add_special=not found)
        if len(found) >= count:
            break
    return tuple(found[:count])
