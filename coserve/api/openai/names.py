"""Names of fine-tuned models, `ft:<base>:coserve:<suffix>:<id>`, and of their adapters, `ft-<suffix>-<id>`.

Each is computed from the other, so a model's name stays valid after the job's record is deleted. A fine-tuned model is
the adapter's version 1: a later job that trains the adapter further does not change it.
"""

from __future__ import annotations

import re

from coserve.core.names import NAME_LENGTH
from coserve.core.types import AdapterRef

ORGANIZATION = "coserve"
PREFIX = "ft:"
ID_LENGTH = 8
"""Hexadecimal digits of a fine-tuned model's id."""
MAX_SUFFIX = NAME_LENGTH - len("ft--") - ID_LENGTH
"""Characters kept of a suffix; the rest is cut off."""
_ADAPTER = re.compile(rf"ft-(?:([A-Za-z0-9._-]{{1,{MAX_SUFFIX}}})-)?([0-9a-f]{{{ID_LENGTH}}})")


def adapter_name(suffix: str, id: str) -> str:
    """Return the name of the adapter that a job trains; characters that no name may have become `-`."""
    kept = re.sub(r"[^A-Za-z0-9._-]", "-", suffix)[:MAX_SUFFIX]
    return f"ft-{kept}-{id}" if kept else f"ft-{id}"


def model_name(ref: AdapterRef, base: str) -> str:
    """Return an adapter version's name as a model: that of a fine-tuned model, or `name@version`."""
    found = _ADAPTER.fullmatch(ref.id)
    if found is None or ref.version != 1:
        return str(ref)
    return f"{PREFIX}{base}:{ORGANIZATION}:{found[1] or ''}:{found[2]}"


def ref_of(model: str, base: str) -> str | None:
    """Return the adapter version, as `name@version`, that a name with `PREFIX` means; None: it is no fine-tuned model
    of this base."""
    start = f"{PREFIX}{base}:{ORGANIZATION}:"
    suffix, colon, id = model.removeprefix(start).partition(":")
    name = f"ft-{suffix}-{id}" if suffix else f"ft-{id}"
    if not model.startswith(start) or not colon or _ADAPTER.fullmatch(name) is None:
        return None
    return str(AdapterRef(name, 1))
