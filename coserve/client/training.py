"""A training session as an object: a program's own training loop, on the daemon's base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import msgspec

from coserve.client.caller import Caller
from coserve.client.options import as_struct
from coserve.core.training import schemas

T = TypeVar("T")
Examples = Iterable[schemas.SessionExample | Mapping[str, Any]]


class AsyncTrainingSession:
    """A training session, from `AsyncClient.training_session`. Close it, or use it as `async with`, so that its memory
    is free for others. Every call returns when the daemon has executed it, calls of several tasks in their order. A
    call that fails leaves the session as it was; if it had to add gradients, the next `optim_step` is refused."""

    def __init__(self, caller: Caller, info: schemas.Session) -> None:
        self._caller, self.info = caller, info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} r={self.info.rank}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        return self.info.id

    async def forward_backward(
        self, examples: Examples, loss: str = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> schemas.ComputeResult:
        """Add the gradients of a loss, summed over all targets, to those since the last `optim_step`. Returns the loss
        and the log-probability of each target.

        An example is a `coserve.core.training.schemas.SessionExample` or a mapping with its fields. `loss`:
        cross_entropy, importance_sampling, ppo, cispo, dro or gspo; `config`: its settings.
        """
        return await self._compute("forward_backward", examples, loss, config)

    async def forward(
        self, examples: Examples, loss: str = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> schemas.ComputeResult:
        """Return what `forward_backward` returns, without gradients."""
        return await self._compute("forward", examples, loss, config)

    async def optim_step(
        self,
        learning_rate: float = 1e-4,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> schemas.OptimStepResult:
        """Update the weights by AdamW with the gradients. `grad_clip_norm` 0: no clipping."""
        body = schemas.OptimStepRequest(
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        return await self._post("optim_step", body, schemas.OptimStepResult)

    async def save(self, name: str, *, overwrite: bool = False) -> str:
        """Save weights and moments durably. Returns the `state` with which another session begins."""
        return (
            await self._post("save", schemas.SaveStateRequest(name=name, overwrite=overwrite), schemas.SavedState)
        ).state

    async def publish(self, adapter: str) -> schemas.PublishedAdapter:
        """Make the weights the next version of `adapter`, which requests may use at once."""
        return await self._post("publish", schemas.PublishRequest(adapter=adapter), schemas.PublishedAdapter)

    async def close(self) -> None:
        """End the session and free its memory. Its saved states and published adapters stay. Raises `NotFound` if it
        has ended."""
        await self._caller.call("DELETE", f"/sessions/{self.id}", schemas.ClosedSession)

    async def _compute(
        self, verb: str, examples: Examples, loss: str, config: Mapping[str, float] | None
    ) -> schemas.ComputeResult:
        rows = [as_struct(one, schemas.SessionExample, f"examples[{number}]") for number, one in enumerate(examples)]
        return await self._post(
            verb, schemas.ComputeRequest(examples=rows, loss=loss, config=dict(config or {})), schemas.ComputeResult
        )

    async def _post(self, verb: str, body: msgspec.Struct, type: type[T]) -> T:
        return await self._caller.call("POST", f"/sessions/{self.id}/{verb}", type, body=body)
