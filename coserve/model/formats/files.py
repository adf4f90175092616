"""The tensors that a model folder's safetensors files store, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Protocol, Self

from safetensors import safe_open
from torch import Tensor

from coserve.core.errors import UnsupportedBase


class Slices(Protocol):
    """A tensor in a file; a slice of it reads only that slice."""

    def __getitem__(self, index: slice | tuple[slice, ...] | EllipsisType, /) -> Tensor: ...

    def get_shape(self) -> list[int]: ...


class StoredTensors(Mapping[str, Slices]):
    """The tensors of a model folder, by their names in the files; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `UnsupportedBase` without readable safetensors files."""
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self._files = self._listed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._open.values():
            file.__exit__(kind, error, at)  # type: ignore[no-untyped-call]
        self._open.clear()

    def __getitem__(self, name: str) -> Slices:
        found: Slices = self._file(self._files[name]).get_slice(name)  # type: ignore[no-untyped-call]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _listed(self) -> dict[str, str]:
        """Return the file of each tensor."""
        index, single = self.folder / "model.safetensors.index.json", "model.safetensors"
        if (self.folder / single).is_file():
            return dict.fromkeys(self._file(single).keys(), single)  # type: ignore[no-untyped-call]
        if not index.is_file():
            raise UnsupportedBase(f"{self.folder.name}: expected weights in safetensors files")
        try:
            files = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedBase(f"{self.folder.name}: its index of files is damaged") from error
        if not isinstance(files, dict) or any(not isinstance(f, str) or Path(f).name != f for f in files.values()):
            raise UnsupportedBase(f"{self.folder.name}: its index names files outside of the folder")
        return files

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
