"""Chooses the columns of a corpus that are read. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coserve.core.errors import MalformedRow
from coserve.core.hints import near_miss

MAX_UNUSED = 16
"""Most ignored columns that are remembered for the note to the user."""
MAX_NAME = 64
"""Most characters shown of an ignored column's name."""
_AS_MESSAGE = "write it into messages"
_TEXT_ALONE = "coserve learns text alone"
TELLING = {
    "system": _AS_MESSAGE,
    "history": _AS_MESSAGE,
    "tools": "write messages, with tools beside them",
    "label": "training.loss kto reads it beside prompt and completion alone",
    **dict.fromkeys(("position_ids", "seq_lengths"), "a row is one sequence; coserve packs rows itself"),
    "weight": "coserve weighs rows alike, and has weight 0 for messages",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ALONE),
}
"""Columns that change what other trainers learn from a row, and what to do instead."""


class Columns:
    """Column names of a corpus. `names`: maps fields of a row's format to the columns they are read from; a field
    without an entry is read from the column of its own name. `unused`: columns that were found and not read, in
    order."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = dict(names or {})
        self.unused: dict[str, None] = {}

    def present(self, columns: Collection[object]) -> list[str]:
        """Return the fields whose named columns are present."""
        return [field for field, column in self.names.items() if column in columns]

    def have_label(self, columns: Collection[object]) -> bool:
        """Return whether a row with these columns has a `label` that is read: if columns are named, it must be among
        them; otherwise a bool is, if `columns` is a mapping."""
        if self.names:
            return "label" in self.names
        return "label" in columns and (not isinstance(columns, Mapping) or isinstance(columns["label"], bool))

    def read(
        self, columns: Collection[object], fields: Collection[str], required: Iterable[str], line: int
    ) -> dict[str, str]:
        """Return the column to read for each field of a format, for a row with these columns.

        Raises `MalformedRow` for a named column that is missing, for a column whose name is nearly that of a missing
        field, and, unless columns are named, for a value of `TELLING` (the row's values, if `columns` is a mapping).
        """
        found = {field: self.names.get(field, field) for field in fields}
        for field in required:
            if found[field] not in columns and field in self.names:
                raise MalformedRow(
                    f"expected a column {found[field]!r:.80} (for {field}), got {listed(columns)}",
                    line=line,
                    field=field,
                )
        found = {field: column for field, column in found.items() if column in columns}
        used, missing = set(found.values()), [field for field in fields if field not in found]
        for column in columns:
            if column not in used:
                if isinstance(columns, Mapping) and not self.names and "text" not in fields:
                    _refuse_telling(str(column), columns[column], line)
                self._add_unused(str(column), missing, line)
        return found

    def _add_unused(self, column: str, missing: list[str], line: int) -> None:
        if column in self.unused:
            return
        if meant := near_miss(column[:80].lower(), missing):
            raise MalformedRow(f"unknown field {column[:80]!r}{meant}", line=line, field=column[:80])
        self.add_unused([column])

    def add_unused(self, columns: Iterable[str]) -> None:
        for column in columns:
            if len(self.unused) < MAX_UNUSED:
                self.unused[column[:MAX_NAME]] = None


def _refuse_telling(column: str, value: object, line: int) -> None:
    """Raise `MalformedRow` for a value that would change what is learned."""
    neutral = {"label": not isinstance(value, bool), "weight": value == 1}
    if column in TELLING and not neutral.get(column, value in ("", [], {})):
        raise MalformedRow(
            f"{column} is not used: {TELLING[column]}; or name the columns to read", line=line, field=column
        )


def listed(columns: Iterable[object]) -> str:
    """List the first columns, for a message."""
    return ", ".join(sorted(repr(column)[:40] for column in list(columns)[:8])) or "none"


def unused_notes(unused: Collection[str]) -> tuple[str, ...]:
    """Return a note about ignored columns, for the job's record."""
    if not unused:
        return ()
    more = " and others" if len(unused) == MAX_UNUSED else ""
    return (f"columns that are not used: {', '.join(map(repr, unused))}{more}",)
