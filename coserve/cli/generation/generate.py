"""The command `coserve generate`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from coserve.cli.common import DEFAULT_URL, Key, Url
from coserve.cli.generation.options import (
    AdapterName,
    MaxTokens,
    Seed,
    SloClassName,
    Stop,
    Temperature,
    TopK,
    TopP,
    Wait,
    connected,
    generate_options,
)


def generate(
    prompt: Annotated[
        str, typer.Argument(help="text to continue; '-' reads standard input, without its last line's end")
    ],
    adapter: AdapterName = None,
    chat: Annotated[bool, typer.Option(help="send the prompt as a user's message, through the chat template")] = False,
    system: Annotated[str | None, typer.Option(help="system message before the prompt; implies --chat")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    top_k: TopK = None,
    stop: Stop = None,
    seed: Seed = None,
    slo_class: SloClassName = None,
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Stream one generation to standard output.

    POST /generate has further settings (penalties, min-p, logprobs, n, logit bias, token ids, whole conversations,
    ...).
    """
    options = generate_options(max_tokens, temperature, top_p, top_k, stop, seed, slo_class)
    text = _without_line_end(sys.stdin.read()) if prompt == "-" else prompt
    source: dict[str, Any] = {"prompt": text}
    if chat or system is not None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        source = {"messages": [*messages, {"role": "user", "content": text}]}
    with connected(url, key, wait) as client:
        for chunk in client.stream(adapter=adapter, **source, **options):
            print(chunk.text, end="", flush=True)
    print()


def _without_line_end(text: str) -> str:
    """Remove one line end, which `echo` and editors append to a text and which is not part of the prompt."""
    return text.removesuffix("\n")
