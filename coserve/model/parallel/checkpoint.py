"""Reads weights from safetensors files slice by slice: only the slices that a rank keeps are copied."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import safe_open

from coserve.core.errors import UnsupportedBase
from coserve.model.parallel.partition import Lazy


class Checkpoint:
    """The tensors of a model folder, by the names of the model's parameters; a context manager."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """`prefix`: name of the decoder in the model (`base_model_prefix`), which names in the files may lack.

        Raises `UnsupportedBase` without readable safetensors files.
        """
        self._folder, self._prefix = folder, f"{prefix}."
        self._open: dict[str, safe_open] = {}
        self._files = self._listed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._open.values():
            file.__exit__(kind, error, at)  # type: ignore[no-untyped-call]
        self._open.clear()

    def get(self, name: str, shape: torch.Size) -> Lazy:
        """Return a parameter; a slice of it reads only that slice. Raises `UnsupportedBase` if it is missing or has
        another shape."""
        stored = next((own for own in (name, name.removeprefix(self._prefix)) if own in self._files), None)
        if stored is None:
            raise UnsupportedBase(f"{self._folder.name}: its files have no {name}")
        found = self._file(self._files[stored]).get_slice(stored)  # type: ignore[no-untyped-call]
        if list(shape) != found.get_shape():
            raise UnsupportedBase(
                f"{self._folder.name}: expected {name} of shape {list(shape)}, got {found.get_shape()}"
            )
        lazy: Lazy = found
        return lazy

    def _listed(self) -> dict[str, str]:
        """Return the file of each tensor."""
        index, single = self._folder / "model.safetensors.index.json", "model.safetensors"
        if (self._folder / single).is_file():
            return dict.fromkeys(self._file(single).keys(), single)  # type: ignore[no-untyped-call]
        if not index.is_file():
            raise UnsupportedBase(f"{self._folder.name}: expected weights in safetensors files")
        try:
            files = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedBase(f"{self._folder.name}: its index of files is damaged") from error
        if not isinstance(files, dict) or any(not isinstance(f, str) or Path(f).name != f for f in files.values()):
            raise UnsupportedBase(f"{self._folder.name}: its index names files outside of the folder")
        return files

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]
