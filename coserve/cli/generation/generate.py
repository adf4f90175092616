"""The command `coserve generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from coserve.cli.common import DEFAULT_URL, Key, Url, Wait, connected
from coserve.cli.generation.options import AdapterName, with_generation_options
from coserve.client import GenerateOptions
from coserve.core.errors import InvalidRequest


def _generate(
    prompt: Annotated[
        str, typer.Argument(help="text to continue; '-' reads standard input, without its last line's end")
    ],
    adapter: AdapterName = None,
    chat: Annotated[bool, typer.Option(help="send the prompt as a user's message, through the chat template")] = False,
    system: Annotated[str | None, typer.Option(help="system message before the prompt; implies --chat")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="file with a JSON schema that the text follows", show_default="any text")
    ] = None,
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    *,
    options: GenerateOptions,
) -> None:
    """Stream one generation to standard output.

    POST /generate has further settings (logprobs, n, logit bias, token ids, whole conversations, ...).
    """
    # `echo` and editors append a line end, which is not part of the prompt
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    source: dict[str, Any] = {"prompt": text}
    if chat or system is not None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        source = {"messages": [*messages, {"role": "user", "content": text}]}
    if schema is not None:
        options["schema"] = _read_schema(schema)
    with connected(url, key, wait) as client:
        for chunk in client.stream(adapter=adapter, **source, **options):
            print(chunk.text, end="", flush=True)
    print()


generate = with_generation_options(_generate)


def _read_schema(path: Path) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"expected a file with a JSON schema, got {path}: {error}", field="schema") from error
