"""Files of documents: text, Markdown, PDF, and folders of them."""

from __future__ import annotations

import io
from pathlib import Path

from coserve.core.errors import EmptyCorpus, UnreadableCorpus

SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".pdf")
"""Suffixes of the files that are read from a folder."""
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
"""Endings of files that hold rows to train on, not a document."""
MAX_BYTES = 256 << 20


def read_document(*paths: Path) -> str:
    """Return the text of files, and of the files of folders, by name. Errors name the file unless there is but one.
    Raises `UnreadableCorpus`, from the `OSError` if there is one, and `EmptyCorpus`."""
    alone = len(paths) == 1 and not paths[0].is_dir()
    return "\n\n".join(_text(file, "" if alone else f"{file.name}: ") for path in paths for file in files_of(path))


def refuse_rows(file: Path) -> None:
    """Raise `UnreadableCorpus` for a file of rows to train on, told by its name."""
    if file.name.lower().endswith(ROWS):
        instead = f"coserve finetune NAME {file.name} trains on them, as does finetune() in Python"
        raise UnreadableCorpus(f"{file.name}: expected a document of text, Markdown or PDF, got rows: {instead}")


def files_of(path: Path) -> list[Path]:
    """Return a file, or those of a folder that are read, by name: none that is hidden, or in a hidden folder. Raises
    `UnreadableCorpus` for rows, `EmptyCorpus`."""
    if not path.is_dir():
        refuse_rows(path)
        return [path]
    shown = (file for file in sorted(path.rglob("*")) if "/." not in f"/{file.relative_to(path)}")
    files = (file for file in shown if file.suffix.lower() in SUFFIXES and file.is_file())
    if not (found := [file for file in files if file.resolve().is_relative_to(path.resolve())]):
        raise EmptyCorpus(f"expected files with one of the endings {', '.join(SUFFIXES)} in the folder")
    return found


def _text(file: Path, name: str) -> str:
    try:
        return decoded_text(_content(file))
    except UnreadableCorpus as error:
        raise UnreadableCorpus(f"{name}{error}") from error.__cause__


def _content(file: Path) -> bytes:
    try:
        if not file.is_file():  # a pipe would be waited for
            raise UnreadableCorpus("expected a regular file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise UnreadableCorpus(f"expected a document of at most {MAX_BYTES} bytes, got {size}")
        return file.read_bytes()
    except OSError as error:
        raise UnreadableCorpus(f"the file cannot be read: {error.strerror}") from error


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
        text = "\n\n".join(page.extract_text() for page in PdfReader(io.BytesIO(content)).pages)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except MemoryError:
        raise
    except Exception as error:  # pypdf raises anything for a damaged file
        raise UnreadableCorpus(f"the PDF cannot be read: {type(error).__name__}") from error
