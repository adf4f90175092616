"""The commands `coserve generate`, and `coserve chat`: a conversation at the terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from coserve.api.http.field_docs import field_docs
from coserve.cli.common import DEFAULT_URL, Key, Url, Wait, connected, field_option, with_options
from coserve.cli.failures import explain
from coserve.client import Client, GenerateOptions
from coserve.core.errors import CoserveError, InvalidRequest
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
    fields = msgspec.structs.fields(GenerateRequest)
    values = {field.name: None if field.default is msgspec.NODEFAULT else field.default for field in fields} | defaults
    return with_options(
        command, (field_option(name, TYPES.get(name, hints[name]), values[name], texts[name]) for name in OPTIONS)
    )


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


COMMANDS = "/system TEXT sets the system message (without a text: none), /reset forgets the conversation, Ctrl-D leaves"


def _chat(
    adapter: AdapterName = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    *,
    options: GenerateOptions,
) -> None:
    """Chat with the base or an adapter; each line is a message, and the conversation so far goes with it.

    /system TEXT sets the system message, /reset forgets the conversation. Ctrl-C ends an answer, whose beginning stays
    in the conversation; Ctrl-D leaves. Lines may come from a file or a pipe, too.
    """
    with connected(url, key, wait) as client:
        conversation = Conversation(client, adapter, system, options)
        if sys.stdin.isatty():
            _converse(conversation)
        else:
            for line in sys.stdin:
                conversation.take(line.rstrip("\n"))


chat = with_generation_options(_chat, max_tokens=1024)


class Conversation:
    """The messages so far, and the destination of the next one."""

    def __init__(self, client: Client, adapter: str | None, system: str | None, options: GenerateOptions) -> None:
        self._client, self._adapter, self._options = client, adapter, options
        self._system = system
        self._turns: list[dict[str, str]] = []

    def take(self, line: str) -> None:
        """Execute a command, or answer a message. Raises `CoserveError`; the message is then not kept in the
        conversation."""
        command, _, rest = line.strip().partition(" ")
        if command == "/system":
            self._system = rest.strip() or None
        elif command == "/reset":
            self._turns.clear()
        elif command.startswith("/"):
            print(f"unknown command {command}: {COMMANDS}", file=sys.stderr)
        elif command:
            self._answer(line)

    def _answer(self, text: str) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = ""
        chunks = self._client.stream(messages=[*system, *turns], adapter=self._adapter, **self._options)
        with suppress(KeyboardInterrupt), closing(chunks):
            for chunk in chunks:
                answer += chunk.text
                print(chunk.text, end="", flush=True)
        print()
        if answer:
            self._turns = [*turns, {"role": "assistant", "content": answer}]


def _converse(conversation: Conversation) -> None:
    """Read lines from the terminal until Ctrl-D. An error of the daemon ends only the current answer."""
    with suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing
    print(COMMANDS, file=sys.stderr)
    while True:
        try:
            conversation.take(input("> "))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except CoserveError as error:
            print(f"coserve: {explain(error)}", file=sys.stderr)
