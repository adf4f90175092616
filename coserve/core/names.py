"""Names in files and messages: adapters and their versions, PEFT's files, and suffixes of files that are never
opened."""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta

NAME_LENGTH: Final = 64
NAME: Final = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH - 1}}}"
"""Regular expression for the name of a project, a tag or a saved state; job ids match it too."""
ADAPTER_NAME: Final = rf"{NAME}(/{NAME})?"
"""Regular expression for an adapter's name: one such name, or two as on the hub, `owner/name`."""
VERSIONED_NAME: Final = ADAPTER_NAME + r"(@[1-9][0-9]{0,8})?"
"""Regular expression for `name` or `name@version`."""
NAME_RULE: Final = (
    f"a name of at most {NAME_LENGTH} letters, digits, '.', '_' and '-', that starts with a letter or digit"
)
ADAPTER_RULE: Final = f"{NAME_RULE}, or two of them with a '/' between"
MAX_VERSION: Final = 999_999_999

Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
AdapterName = Annotated[str, Meta(pattern=rf"\A{ADAPTER_NAME}\Z")]
AdapterRefText = Annotated[str, Meta(pattern=rf"\A{VERSIONED_NAME}\Z")]
"""`name@version`, or `name` for its current version (the newest, or the one rolled back to)."""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_FILES: Final = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""The two files of a PEFT adapter folder."""
PEFT_PREFIX: Final = "base_model.model."
"""Begins the names of all tensors in PEFT's files."""

TOKEN_ROWS, WHOLE_COPY = ".token_adapter", ".modules_to_save"
"""Suffixes of names under which an adapter's replaced rows of an embedding or head are stored: `lm_head.token_adapter`
holds the rows of some tokens, `lm_head.modules_to_save` all rows."""

DECODER: Final = ".decoder"
"""Suffix of names under which a job that trains an encoder keeps the LoRA pairs of the decoder."""

ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".zip")
"""Suffixes of archives of these files. Other compressions are refused: decoding a few bytes may take gigabytes of
memory."""

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
"""Files that may hold pickled code: never opened."""


CHECKPOINT_TENSORS, CHECKPOINT_STATE = "state.safetensors", "state.json"
"""The files of a job's checkpoint."""
ADAPTER_SOURCES: Final = ("job", "import", "load", "convert")
"""How a version was made: the first part of `Adapter.source`."""


def is_name(text: str) -> bool:
    """Return whether `text` can be the name of a project, a tag or a saved state, or a job's id."""
    return re.fullmatch(NAME, text) is not None


def is_adapter_name(text: str) -> bool:
    """Return whether `text` can be an adapter's name."""
    return re.fullmatch(ADAPTER_NAME, text) is not None


def file_name(adapter: AdapterName) -> str:
    """Return an adapter's name as part of a file's or folder's name. No two adapters have the same: no name has a
    '+'."""
    return adapter.replace("/", "+")


def adapter_of_file(name: str) -> AdapterName:
    """Return the adapter of a `file_name`."""
    return name.replace("+", "/")


def is_adapter_ref(text: str) -> bool:
    """Return whether `text` is `name` or `name@version`."""
    return re.fullmatch(VERSIONED_NAME, text) is not None


def split_ref(text: AdapterRefText) -> tuple[str, int | None]:
    """Split `name@version` into name and version; without `@version` the version is None."""
    name, _, version = text.partition("@")
    return name, int(version) if version else None


def end_of(site: str) -> str:
    """Return the embedding or head whose rows are replaced under the name `site`; other names as they are."""
    return site.removesuffix(TOKEN_ROWS).removesuffix(WHOLE_COPY)


def is_rows(site: str) -> bool:
    """Return whether an adapter's weights of this name replace rows of an embedding or head."""
    return site.endswith((TOKEN_ROWS, WHOLE_COPY))


def is_end(site: str) -> bool:
    """Return whether an adapter's weights of this name belong to the embedding or head: names of sites in layers have
    the layer's number."""
    return not any(part.isdigit() for part in site.split("."))


def is_prefix(site: str) -> bool:
    """Return whether an adapter's weights of this name are a layer's keys and values of a KV prefix."""
    return site.startswith("layers.") and site.endswith(".prefix")
