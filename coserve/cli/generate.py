"""`coserve generate`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from coserve.cli.common import DEFAULT_URL, Key, Url, connect
from coserve.client import GenerateOptions


def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue; '-' reads standard input")],
    adapter: Annotated[str | None, typer.Option(help="NAME or NAME@VERSION; default: the base")] = None,
    chat: Annotated[bool, typer.Option(help="send the prompt as a user's message, through the chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Stream one generation to standard output."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with connect(url, key) as client:
        for chunk in client.stream(adapter=adapter, **source, **options):
            print(chunk.text, end="", flush=True)
    print()
