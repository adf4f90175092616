"""Messages between an engine and a LoRA server, over a socket. Activations and terms go another way: see `transport`.

The socket keeps messages in order, and a server that is started again has a new one. Still each step names its start
and the version of the table of adapters that it knows, so that no transport can bring an older message.
"""

from __future__ import annotations

from msgspec import Struct

from coserve.core.logs import LogSettings
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec

SLOTS = 1024
"""Most adapters that an engine's servers hold at once."""


class ToServer(Struct, frozen=True, tag=True, kw_only=True):
    """Base of the engine's messages."""


class Mailbox(Struct, frozen=True, kw_only=True):
    """Memory on the engine's GPU through which it and a server exchange messages: see `ipc`."""

    handle: bytes
    """The driver's, of the memory."""
    there: int
    back: int
    """Bytes of its two parts."""
    page: int
    """File descriptor of the page with the numbers of messages: inherited, or sent before the settings."""
    device: str
    """Type of the device that it is on."""


class StartServer(ToServer, frozen=True, kw_only=True):
    """The first message: the settings of one server."""

    index: int
    """Number among the servers of the engine."""
    servers: int
    ep: int
    """Number of servers among which the experts of a layer are divided."""
    start: int
    """How many times the engine has started its servers, this time included."""
    rendezvous: str
    """Path of a file that does not exist yet, by which the processes find each other."""
    deadline: float
    """Timeout of a message in seconds."""
    spec: BaseSpec
    data_dir: str
    device: str
    """A server that several engines use has one of its own."""
    threads: int
    logs: LogSettings
    mailbox: Mailbox | None = None
    """None: messages go over gloo."""


class ConnectTransport(ToServer, frozen=True, kw_only=True):
    """All servers of the engine are ready: connect to it now."""


class LoadPairs(ToServer, frozen=True, kw_only=True):
    """Read an adapter's files, and put its experts' pairs into a slot: answered by `PairsLoaded` or `PairsRefused`."""

    number: int
    """Number of this load, unique within a start."""
    slot: int
    ref: AdapterRef
    digests: AdapterDigests | None


class DropPairs(ToServer, frozen=True, kw_only=True):
    """Empty a slot; a load into it that has not ended is void."""

    slot: int


class BeginStep(ToServer, frozen=True, kw_only=True):
    """The adapters of a step's T tokens, padding included. For each of its parameters of experts, in their order, the
    server receives inputs over the transport, and returns the LoRA terms. K experts of each token, S = T K choices.

    Gate and up, or up alone: inputs (T, D) and expert numbers int64 (T, K); terms (S, O) in the order of the tokens and
    of their choices. Down: inputs (S, I) and fp32 router weights (T, K); terms (T, D). The numbers count the server's
    own experts from 0; an expert of another server has the number one past the last, and no terms.
    """

    start: int
    version: int
    """Version of the server's table of adapters that the engine knows."""
    bounds: tuple[int, ...]
    slots: tuple[int, ...]
    """Tokens `bounds[i]` to `bounds[i + 1]` are of the adapter in `slots[i]`; -1: they need no terms."""


class FromServer(Struct, frozen=True, tag=True, kw_only=True):
    """Base of a server's messages."""


class ServerReady(FromServer, frozen=True, kw_only=True):
    """The server can connect, and load adapters then."""


class ServerConnected(FromServer, frozen=True, kw_only=True):
    """The server has connected, and does not need the rendezvous file any more."""

    refused: str = ""
    """Why it cannot use its mailbox; it ends then."""


class EnginesConnected(FromServer, frozen=True, kw_only=True):
    """How many engines a server that several may use has now, this one included."""

    engines: int


class PairsLoaded(FromServer, frozen=True, kw_only=True):
    """The pairs are in their slot. `bytes`: 0 if the adapter changes no experts of this server's layers."""

    number: int
    bytes: int
    version: int


class PairsRefused(FromServer, frozen=True, kw_only=True):
    """The pairs are not there: no memory, or unreadable files."""

    number: int
    message: str


AnyToServer = StartServer | ConnectTransport | LoadPairs | DropPairs | BeginStep
AnyFromServer = ServerReady | ServerConnected | EnginesConnected | PairsLoaded | PairsRefused
