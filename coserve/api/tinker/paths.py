"""Names of Tinker's API: models `<session>:train:<n>`, paths `tinker://<model>/weights/<name>` and
`.../sampler_weights/<name>`. A model's states are in a folder, and its sampler weights are adapters, of a name that
follows from it."""

from __future__ import annotations

from typing import NamedTuple

from coserve.core.errors import InvalidRequest
from coserve.core.types import BaseSpec

SCHEME = "tinker://"


def run_of(model: str) -> str:
    """Return a model's name in the data folder and in the engine."""
    return model.replace(":", ".")


class SavedPath(NamedTuple):
    """A path of saved weights."""

    model: str
    sampler: bool
    """Whether they are for a sampler: an adapter."""
    name: str

    @property
    def state(self) -> tuple[str, str]:
        """Run and name of a state in the data folder."""
        return run_of(self.model), self.name

    @property
    def adapter(self) -> str:
        return f"{run_of(self.model)}-{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{'sampler_weights' if self.sampler else 'weights'}/{self.name}"


def parse_path(text: str, *, sampler: bool) -> SavedPath:
    """Parse a path of weights for a `sampler`, or of a state. Raises `InvalidRequest`."""
    kind = "sampler_weights" if sampler else "weights"
    parts = text.removeprefix(SCHEME).split("/")
    if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind or not all(parts):
        raise InvalidRequest(f"expected {SCHEME}<model>/{kind}/<name>, got {text[:200]!r}", field="path")
    return SavedPath(parts[0], sampler, parts[2])


def check_base(name: str, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for the name of another base. A base that was read from a folder NAME is also
    OWNER/NAME."""
    known = [own for own in (base.name, base.hub_name) if own is not None]
    _, owner, folder = name.casefold().rpartition("/")
    of_folder = bool(owner) and base.hub_name is None and folder == base.name.casefold()
    if not of_folder and name.casefold() not in map(str.casefold, known):
        raise InvalidRequest(f"expected {' or '.join(map(repr, known))}, got {name[:200]!r}", field="base_model")


def targets(base: BaseSpec, *, attention: bool, mlp: bool) -> tuple[str, ...]:
    """Return the target modules, as suffixes of their names: the projections of attention if `attention`, the other
    linear layers if `mlp`. Raises `InvalidRequest` if there are none."""
    found = []
    for suffix in base.default_targets:
        of_attention = any("attn" in site for site in base.sites if site.endswith(f".{suffix}"))
        if attention if of_attention else mlp:
            found.append(suffix)
    if not found:
        raise InvalidRequest("expected train_attn or train_mlp: the unembedding alone cannot be trained")
    return tuple(found)
