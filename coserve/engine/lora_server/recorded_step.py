"""The exchanges of a CUDA graph's steps with LoRA servers, whichever start of these runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from coserve.core.errors import LoraServerLost
from coserve.engine.lora_server.remote_step import RemoteStep, ServerConnection, step_slots
from coserve.engine.lora_server.running import RunningServers
from coserve.kernels.lora.segments import Segments


class RecordedStep(RemoteStep):
    """Implements `RecordedTerms`: a capture records the exchanges, and a run before it sends nothing. On a CPU, where
    nothing is captured, the exchanges are those of the step that was begun last. Only `launched` ends a step: a capture
    comes to the last exchange, too."""

    def __init__(self, connections: Sequence[ServerConnection], running: Callable[[], RunningServers | None]) -> None:
        """`connections`: of any start, as they stay the same."""
        self._running = running
        super().__init__(connections, self._fail, sends=_sends)

    def begin(self, segments: Segments, slots: Sequence[int], tokens: int) -> None:
        found, running = step_slots(segments, slots, tokens), self._running()
        assert found is not None, "expected a step that needs LoRA servers"
        if running is None:
            raise LoraServerLost("the LoRA servers are started again")
        running.begin(*found)

    def launched(self) -> None:
        if (running := self._running()) is not None:
            running.launched()

    def _fail(self, index: int, error: ConnectionError) -> NoReturn:
        if (running := self._running()) is None:
            raise LoraServerLost("the LoRA servers are started again") from error
        running.fail(index, error)


def _sends(x: Tensor) -> bool:
    return not x.is_cuda or torch.cuda.is_current_stream_capturing()
