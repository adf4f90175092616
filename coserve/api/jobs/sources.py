"""The rows of a fine-tuning request: in its body, in uploaded files, or in files below the daemon's `data_root`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from coserve.api.http.parsing import local_path
from coserve.core.errors import CorpusError, InvalidRequest, RequestError
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.validation import check_one_given
from coserve.data.corpus.sources import is_dataset

Source = list[dict[str, Any]] | Path


class UploadedRows(NamedTuple):
    """Files that came with a request: the corpus or document, and rows for validation."""

    corpus: Path | None = None
    validation: Path | None = None


def corpus_source(request: FinetuneRequest, upload: Path | None, root: Path | None) -> Source:
    """Return the rows to learn. Raises `InvalidRequest`, `ForbiddenPath`."""
    check_one_given({"data": request.data, "path": request.path, "file": upload}, field="data")
    if request.data is not None:
        return request.data
    return local_rows(str(request.path), root) if upload is None else upload


def validation_source(request: FinetuneRequest, upload: Path | None, root: Path | None) -> Source | None:
    """Return the rows for validation; None: the request gives none. Raises `InvalidRequest`, `ForbiddenPath`."""
    asked, training = request.validation, request.training
    if asked is None and upload is None:
        return None
    data, path = (None, None) if asked is None else (asked.data, asked.path)
    check_one_given({"data": data, "path": path, "a part validation": upload}, field="validation")
    if request.document is not None:
        raise InvalidRequest("expected no rows for validation beside a document", field="validation")
    if training.validation_rows or training.validation_split:
        raise InvalidRequest("expected no validation_rows or validation_split beside validation", field="validation")
    if path is None:
        return upload if data is None else data
    with validation_errors():
        return local_rows(path, root)


def local_rows(text: str, root: Path | None) -> Path:
    """Return a file of rows, or a folder of datasets, below `root`. Raises `InvalidRequest`, `ForbiddenPath`."""
    path = local_path(text, root)
    if not path.is_file() and not is_dataset(path):
        splits = " (of a DatasetDict, one split's folder)" if (path / "dataset_dict.json").is_file() else ""
        raise InvalidRequest(f"expected a file, or a folder of Dataset.save_to_disk{splits}", field="path")
    return path


@contextmanager
def validation_errors() -> Iterator[None]:
    """Mark errors in the rows for validation as such; their line is counted in the file of these rows."""
    try:
        yield
    except (CorpusError, RequestError) as error:
        raise type(error)(f"validation: {error.message}", field="validation") from error
