"""The command `coserve chat`: a conversation at the terminal."""

from __future__ import annotations

import importlib
import sys
from contextlib import closing, suppress
from typing import Annotated

import typer

from coserve.cli.common import DEFAULT_URL, Key, Url, Wait, connected
from coserve.cli.failures import explain
from coserve.cli.generation.options import AdapterName, with_generation_options
from coserve.client import Client, GenerateOptions
from coserve.core.errors import CoserveError

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
