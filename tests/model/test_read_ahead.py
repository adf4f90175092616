"""Weights are read while torch is imported; whatever goes wrong then is the loader's to tell."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from coserve.data.pretrained.read_ahead import READERS, read_ahead, weight_files


def save_weights(folder: Path, sizes: tuple[int, ...] = (10, 20, 30)) -> list[Path]:
    paths = [folder / f"model-{number}.safetensors" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    (folder / "config.json").write_text("{}")
    return paths


def test_the_files_are_those_of_a_folder_whose_weights_are_loaded(tmp_path: Path) -> None:
    paths = save_weights(tmp_path)
    assert weight_files(str(tmp_path)) == paths
    assert weight_files(str(tmp_path), memory=120) == paths
    assert not weight_files(str(tmp_path), memory=119), "they would not stay in memory"
    assert not weight_files("owner/name")


@pytest.mark.parametrize("files", [1, READERS, 3 * READERS])
def test_every_file_is_read_to_its_end(tmp_path: Path, files: int) -> None:
    """Pipes: whoever writes to one is done when it was read."""
    pipes = [tmp_path / f"{number}" for number in range(files)]
    for pipe in pipes:
        os.mkfifo(pipe)
    written = threading.Barrier(files + 1)

    def write(pipe: Path) -> None:
        pipe.write_bytes(bytes(1 << 20))
        written.wait(60)

    for pipe in pipes:
        threading.Thread(target=write, args=(pipe,), daemon=True).start()
    readers = read_ahead(pipes)
    written.wait(60)
    for reader in readers:
        reader.join(60)
    assert 0 < len(readers) <= READERS
    assert all(reader.daemon and not reader.is_alive() for reader in readers)


def test_a_file_that_cannot_be_read_stops_nobody(tmp_path: Path) -> None:
    for reader in read_ahead([tmp_path / "gone", *save_weights(tmp_path)]):
        reader.join(60)
        assert not reader.is_alive()
    assert not read_ahead([])
