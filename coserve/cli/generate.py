"""`coserve generate`."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer

from coserve.cli.common import DEFAULT_URL, Key, Url, connect
from coserve.client import GenerateOptions
from coserve.types import SloClass

CLASSES: dict[str, SloClass] = {name: name for name in get_args(SloClass)}


def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue; '-' reads standard input")],
    adapter: Annotated[str | None, typer.Option(help="NAME or NAME@VERSION; default: the base")] = None,
    chat: Annotated[bool, typer.Option(help="send the prompt as a user's message, through the chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 1.0,
    top_p: Annotated[
        float | None, typer.Option(help="choose among the likeliest tokens of this total probability")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="choose among so many of the likeliest tokens; 0: all")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    slo_class: Annotated[
        str | None, typer.Option(help="latency targets and order: interactive or batch; default: interactive")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Stream one generation to standard output.

    POST /generate has further settings (penalties, min-p, logprobs, n, logit bias, token ids, whole conversations, ...).
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = top_k
    if stop:
        options["stop"] = stop
    if seed is not None:
        options["seed"] = seed
    if slo_class is not None:
        if slo_class not in CLASSES:
            raise typer.BadParameter(f"--slo-class: expected {' or '.join(CLASSES)}, got {slo_class!r}")
        options["slo_class"] = CLASSES[slo_class]
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with connect(url, key) as client:
        for chunk in client.stream(adapter=adapter, **source, **options):
            print(chunk.text, end="", flush=True)
    print()
