"""The exchanges of a step with LoRA servers: in each layer one for gate and up, and one for down.

Sizes depend on the step's tokens alone, not on the router: each server of a layer gets the inputs of all of them, and
returns zeros for experts that it has not. So a CUDA graph can record the exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from coserve.engine.lora_server.placement import ServerPart
from coserve.engine.lora_server.transport import EngineTransport, TensorSpec
from coserve.kernels.lora.experts.interface import Pending
from coserve.kernels.lora.segments import Segments
from coserve.model.experts.shards import local_experts


@dataclass(frozen=True)
class ServerConnection:
    """A server's part, and the connection to it."""

    index: int
    part: ServerPart
    transport: EngineTransport


class RemoteStep:
    """Implements `RemoteTerms`. T tokens, K experts of each, S = T K choices of experts."""

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        lost: Callable[[int, ConnectionError], NoReturn],
        received: Callable[[str], None] = lambda _: None,
        sends: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        """`lost` is called with a server's index and an error of its connection, and raises another one; `received`
        with a parameter whose terms have come. `sends` is called with inputs; False: they are not sent, and terms are
        zeros."""
        self._connections, self._lost, self._received, self._sends = connections, lost, received, sends

    def gate_up(self, site: str, x_TD: Tensor, chosen_TK: Tensor) -> Pending:
        chosen_TK, alone = chosen_TK.long(), len(self._of(site)) == 1
        inputs = lambda part: (x_TD, chosen_TK if alone else local_experts(chosen_TK, part.first, part.experts))
        return self._exchange(site, chosen_TK.numel(), inputs)

    def down(self, site: str, h_SI: Tensor, weights_TK: Tensor) -> Pending:
        weights_TK = weights_TK.float()
        return self._exchange(site, len(weights_TK), lambda _: (h_SI, weights_TK))

    def _exchange(self, site: str, rows: int, inputs: Callable[[ServerPart], tuple[Tensor, Tensor]]) -> Pending:
        """Send a parameter's inputs to the servers that have experts of it; the terms have `rows` rows."""
        connections = self._of(site)
        sent = [inputs(connection.part) for connection in connections]
        x_ND = sent[0][0]
        found = TensorSpec((rows, connections[0].part.sites[site].out_features), x_ND.dtype)
        if not self._sends(x_ND):
            return lambda: x_ND.new_zeros(found.shape)
        for connection, tensors in zip(connections, sent, strict=True):
            try:
                connection.transport.send(connection.part.numbers[site], tensors)
            except ConnectionError as error:
                self._lost(connection.index, error)

        def wait() -> Tensor:
            y_NO, *others = [self._receive(connection, site, found) for connection in connections]
            for terms_NO in others:
                y_NO = y_NO + terms_NO
            self._received(site)
            return y_NO

        return wait

    def _of(self, site: str) -> list[ServerConnection]:
        return [connection for connection in self._connections if site in connection.part.sites]

    def _receive(self, connection: ServerConnection, site: str, found: TensorSpec) -> Tensor:
        try:
            return connection.transport.receive(connection.part.numbers[site], [found])[0]
        except ConnectionError as error:
            self._lost(connection.index, error)


def step_slots(segments: Segments, slots: Sequence[int], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return bounds and servers' slots (-1: none) of a step that is padded to `tokens` tokens; None: no token needs
    the servers. `slots`: by adapter."""
    own = [slots[adapter] if adapter >= 0 else -1 for adapter in segments.adapters]
    if max(own, default=-1) < 0:
        return None
    more = tokens - segments.tokens
    return (*segments.bounds, *[tokens] * (more > 0)), (*own, *[-1] * (more > 0))
