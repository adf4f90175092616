"""Options that `coserve generate` and `coserve chat` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, get_type_hints

import typer
from msgspec import NODEFAULT, structs

from coserve.api.http.field_docs import field_docs
from coserve.cli.common import field_option, with_options
from coserve.client import GenerateOptions
from coserve.core.sampling import SamplingFields
from coserve.core.schemas.generation import GenerateRequest

OPTIONS = (
    "max_tokens",
    *(name for name in SamplingFields.__struct_fields__ if name != "logit_bias"),
    "stop",
    "bad_words",
    "seed",
    "slo_class",
)
"""Fields of a request that are options of the commands."""
TYPES = {"max_tokens": int, "stop": list[str], "slo_class": str}
"""Types of options that differ from their fields'."""

AdapterName = Annotated[str | None, typer.Option(help="NAME or NAME@VERSION", show_default="the base")]


def with_generation_options(command: Callable[..., None], **defaults: object) -> Callable[..., None]:
    """Return the command with an option for each of `OPTIONS`. It gets their values as `options`
    (`GenerateOptions`). `defaults`: replace the fields' own."""
    hints, texts = get_type_hints(GenerateOptions), field_docs(GenerateRequest)
    fields = structs.fields(GenerateRequest)
    values = {field.name: None if field.default is NODEFAULT else field.default for field in fields} | defaults
    return with_options(
        command, (field_option(name, TYPES.get(name, hints[name]), values[name], texts[name]) for name in OPTIONS)
    )
