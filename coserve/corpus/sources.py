"""Rows of a file or folder in any of the formats that users keep corpora in: JSONL, parquet, a folder of `datasets`. No torch.

Parquet files and folders are read a few rows at a time, with pyarrow, which is optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec

from coserve.corpus.jsonl import parse_jsonl
from coserve.corpus.rows import LIMITS, CorpusLimits, Row, parse_row
from coserve.errors import EmptyCorpus, InvalidRequest, MalformedRow
from coserve.state.durable import disk_errors

STATE = "state.json"
"""The file of a folder of `Dataset.save_to_disk` that names its data files."""
PARQUET = b"PAR1"
"""The first bytes of a parquet file."""
BATCH_ROWS = 64


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct, rename={"data_files": "_data_files"}):
    data_files: list[_DataFile]


def is_jsonl(source: Path) -> bool:
    """Whether `source` is read as JSONL: it is a file, and none of parquet. Raises `EmptyCorpus` if it cannot be opened."""
    if source.is_dir():
        return False
    with _source_errors(), disk_errors(), source.open("rb") as file:
        return file.read(len(PARQUET)) != PARQUET


def is_dataset(folder: Path) -> bool:
    return (folder / STATE).is_file()


def read_rows(source: Path, limits: CorpusLimits = LIMITS) -> Iterator[Row]:
    """The rows of a JSONL file, a parquet file, or a folder of `Dataset.save_to_disk`; the first row of the latter two is line 1.

    Fields that are null count as absent: columns of Arrow have a value in every row. Raises what `parse_jsonl` raises, and `InvalidRequest`
    if pyarrow is missing.
    """
    if is_jsonl(source):
        yield from parse_jsonl(source, limits)
        return
    if find_spec("pyarrow") is None:
        kind = "a folder of datasets" if source.is_dir() else "a parquet file"
        raise InvalidRequest(
            f"{kind} needs pyarrow, which is not installed: pip install 'coserve[datasets]'", field="path"
        )
    size = 0
    for line, found in enumerate(_arrow_rows(source), start=1):
        limits.check_line(line)
        try:
            length = len(msgspec.json.encode(found))
        except (TypeError, ValueError) as error:
            raise MalformedRow("expected texts, numbers, lists and objects", line=line) from error
        size += length
        if length > limits.row_bytes:
            raise MalformedRow(f"expected at most {limits.row_bytes} bytes a row", line=line)
        if size > limits.total_bytes:
            raise MalformedRow(f"expected a corpus of at most {limits.total_bytes} bytes", line=line)
        yield parse_row(found, line)


def _arrow_rows(source: Path) -> Iterator[object]:
    with _source_errors(), disk_errors():
        if source.is_dir():
            for path in _data_files(source):
                yield from _ipc_rows(path)
        else:
            yield from _parquet_rows(source)


def _parquet_rows(path: Path) -> Iterator[object]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _refuse_twins(file.schema_arrow.names)
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            yield from map(_without_nulls, batch.to_pylist())


def _ipc_rows(path: Path) -> Iterator[object]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
        _refuse_twins(batches.schema.names)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from map(_without_nulls, batch.slice(start, BATCH_ROWS).to_pylist())


def _refuse_twins(columns: list[str]) -> None:
    """Raises `MalformedRow` if two columns have one name: a row would have the last one's value."""
    if len(set(columns)) < len(columns):
        twin = next(name for name in columns if columns.count(name) > 1)
        raise MalformedRow(f"expected one column {twin!r:.80}, got {columns.count(twin)}", line=1)


def _data_files(folder: Path) -> list[Path]:
    """Raises `EmptyCorpus` if the state cannot be read, or names what is outside of the folder or no file."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except msgspec.MsgspecError as error:
        raise EmptyCorpus(
            f"the corpus cannot be read: {STATE} is none of Dataset.save_to_disk", field="path"
        ) from error
    paths = [(folder / file.filename).resolve() for file in state.data_files]
    if any(path.parent != folder.resolve() for path in paths):
        raise EmptyCorpus(f"the corpus cannot be read: {STATE} names a file outside of the folder", field="path")
    if absent := [path.name for path in paths if not path.is_file()]:  # a pipe would be waited for
        raise EmptyCorpus(f"the corpus cannot be read: the folder has no file {absent[0]!r:.80}", field="path")
    return paths


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _source_errors() -> Iterator[None]:
    """Raise what the disk or pyarrow says of a source as `EmptyCorpus`."""
    try:
        yield
    except OSError as error:
        raise EmptyCorpus(f"the corpus cannot be read: {error.strerror or 'it is damaged'}", field="path") from error
    except MemoryError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and not type(error).__module__.startswith("pyarrow"):
            raise
        raise EmptyCorpus(f"the corpus cannot be read: {str(error)[:200]}", field="path") from error
