"""Options that `coserve generate` and `coserve chat` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, get_type_hints

import typer
from msgspec import structs

from coserve.api.http.field_docs import field_docs
from coserve.cli.common import connect, field_option, say_if_starting, with_options
from coserve.client import Client, GenerateOptions
from coserve.core.errors import EngineUnavailable
from coserve.core.sampling import SamplingFields
from coserve.core.schemas import GenerateRequest

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
Wait = Annotated[bool, typer.Option("--wait", help="wait until the daemon is ready")]


def with_generation_options(command: Callable[..., None], **defaults: object) -> Callable[..., None]:
    """Return the command with an option for each of `OPTIONS`. It gets their values as `options`
    (`GenerateOptions`). `defaults`: replace the fields' own."""
    hints, texts = get_type_hints(GenerateOptions), field_docs(GenerateRequest)
    values = {field.name: field.default for field in structs.fields(GenerateRequest)} | defaults
    return with_options(
        command, (field_option(name, TYPES.get(name, hints[name]), values[name], texts[name]) for name in OPTIONS)
    )


@contextmanager
def connected(url: str, key: str | None, wait: bool) -> Iterator[Client]:
    """Yield a client of the daemon. `wait`: wait until it is ready; otherwise the error of a starting daemon names
    --wait."""
    with connect(url, key) as client:
        if wait:
            say_if_starting(client)
            client.wait_ready(timeout=None)
        try:
            yield client
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{error}; --wait waits for it") from error
