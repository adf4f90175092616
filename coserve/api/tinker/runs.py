"""Sessions and models of Tinker's API, implemented with training sessions (`coserve.api.sessions`)."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

from coserve.api.service import Service
from coserve.api.sessions.session import ClientSession
from coserve.api.sessions.sessions import check_name
from coserve.api.tinker import schemas
from coserve.api.tinker.calls import NAMES, DecodedCall, output_of
from coserve.api.tinker.futures import Order, Result
from coserve.api.tinker.paths import SavedPath, check_base, parse_path, run_of, targets
from coserve.core.access.principal import principal
from coserve.core.errors import InvalidRequest, NotFound, SessionEnded
from coserve.core.training.schemas import Step
from coserve.core.types import AdapterRef, LoraSettings
from coserve.data.offload.protocol import error_of
from coserve.state.session_states import read_state

ALPHA = 32.0
"""`lora_alpha`, the same at every rank, as in Tinker."""


@dataclass
class Run:
    """One model in training. `session`: None until it was created."""

    model: str
    owner: TinkerOwner
    order: Order = field(default_factory=Order)
    session: ClientSession | None = None
    base: str = ""


@dataclass
class TinkerOwner:
    """One session of the SDK, which has models and samplers."""

    id: str
    project: str
    finished: bool = False


@dataclass(frozen=True)
class SamplerTarget:
    """The model of a sampling session: a published adapter (`path`), weights in the engine's memory alone
    (`snapshot`), or the base."""

    base: str
    path: SavedPath | None = None
    snapshot: AdapterRef | None = None


class Runs:
    """All sessions and models. They end with the engine or the daemon; saved states stay."""

    def __init__(self, service: Service) -> None:
        self._service, self._sessions = service, service.sessions
        self._owners: dict[str, TinkerOwner] = {}
        self._runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplerTarget] = {}
        """The source of each sampling session."""

    def sampler(self, id: str) -> SamplerTarget:
        """Return the source of a sampling session. Raises `NotFound`, `SessionEnded`."""
        self.owner(id.partition(":")[0])
        if (target := self.samplers.get(id)) is None:
            raise NotFound(f"no sampling session {id[:80]!r}", field="sampling_session_id")
        return target

    # ---- sessions of the SDK

    def new_owner(self) -> str:
        owner = TinkerOwner(f"s-{secrets.token_hex(6)}", principal().project)
        self._owners[owner.id] = owner
        return owner.id

    def owner(self, id: str) -> TinkerOwner:
        """Return a session that is not finished. Raises `SessionEnded`."""
        owner = self._owners.get(id)
        if owner is None or owner.finished or not principal().sees(owner.project):
            raise SessionEnded(f"no session {id[:80]!r}: it has finished, or the daemon was restarted")
        return owner

    def touch(self, id: str) -> None:
        """Restart the idle timeout of the session's models, since its client is alive. Raises `SessionEnded`."""
        for run in self._runs_of(self.owner(id)):
            if run.session is not None:
                self._sessions.touch(run.session)

    def finish(self, id: str) -> None:
        """End a session and free the memory of its models."""
        owner = self.owner(id)
        owner.finished = True
        for run in self._runs_of(owner):
            self.unload(run)
        for sampler in [own for own in self.samplers if own.startswith(f"{id}:")]:
            del self.samplers[sampler]

    # ---- models

    def _runs_of(self, owner: TinkerOwner) -> list[Run]:
        return [run for run in self._runs.values() if run.owner is owner]

    def add(self, session_id: str, number: int) -> Run:
        """Add a model that is to be created. Raises `SessionEnded`; `InvalidRequest` if it exists."""
        owner = self.owner(session_id)
        run = Run(f"{owner.id}:train:{number}", owner)
        if run.model in self._runs:
            raise InvalidRequest(f"model {run.model} exists", field="model_seq_id")
        self._runs[run.model] = run
        return run

    def run(self, model: str) -> Run:
        """Return a model. Raises `NotFound`."""
        found = self._runs.get(model)
        if found is None or not principal().sees(found.owner.project):
            raise NotFound(f"no model {model[:80]!r}: it was unloaded, or the daemon was restarted", field="model_id")
        return found

    async def create(self, run: Run, body: schemas.CreateModel) -> Result:
        spec, asked = self._service.engine.spec, body.lora_config or schemas.TinkerLora()
        check_base(body.base_model, spec)
        found = targets(spec, attention=asked.train_attn, mlp=asked.train_mlp)
        lora = LoraSettings(r=asked.rank, alpha=ALPHA, targets=found)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        await self._open(run, body.base_model, lora, seed, None, with_optimizer=False)
        return schemas.ModelResult(run.model, "create_model")

    async def create_from_state(self, run: Run, body: schemas.LoadWeights) -> Result:
        path = parse_path(body.path, sampler=False)
        if body.base_model is not None:
            check_base(body.base_model, self._service.engine.spec)
        saved = await asyncio.to_thread(read_state, self._service.folder, *path.state)
        base = body.base_model or saved.base
        await self._open(run, base, saved.lora, saved.seed, path.state, with_optimizer=body.optimizer)
        return schemas.PathResult(path=body.path, model_id=run.model)

    async def _open(
        self, run: Run, base: str, lora: LoraSettings, seed: int, state: tuple[str, str] | None, *, with_optimizer: bool
    ) -> None:
        run.base = base
        run.session = await self._sessions.open(
            run_of(run.model), run.model, lora, seed, state, with_optimizer=with_optimizer
        )
        await run.session.opened

    def unload(self, run: Run) -> None:
        if run.session is not None:
            self._sessions.close(run.session)
        run.order.end()
        self._runs.pop(run.model, None)

    def waits(self, request: str) -> str | None:
        """Return why a request's model waits to be opened; None: it does not."""
        run = self._runs.get(request.rpartition(":")[0])
        return None if run is None or run.session is None else run.session.waits

    # ---- calls

    async def forward_backward(self, run: Run, call: DecodedCall) -> Result:
        session = opened(run)
        if call.error is not None:
            if call.compute.learns:  # the next optim_step must know that gradients are missing
                with suppress(InvalidRequest):
                    await self._sessions.call(session, call.compute)
            raise error_of(call.error)
        try:
            done = await self._sessions.call(session, call.compute)
        except InvalidRequest as error:
            message = re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), error.message)
            raise InvalidRequest(message, field=error.field) from error
        return await asyncio.to_thread(output_of, call.shapes, done.values, done.metrics)

    async def optim_step(self, run: Run, body: schemas.OptimStep) -> Result:
        done = await self._sessions.call(opened(run), Step(body.adam_params))
        return schemas.StepResult(done.metrics)

    async def save(self, run: Run, body: schemas.SaveWeights) -> Result:
        path = SavedPath(run.model, False, body.path or f"state-{secrets.token_hex(4)}")
        await self._sessions.save_state(opened(run), path.name, str(path), overwrite=body.overwrite)
        return schemas.PathResult(path=str(path))

    async def load(self, run: Run, body: schemas.LoadWeights) -> Result:
        path = parse_path(body.path, sampler=False)
        await self._sessions.load(opened(run), path.state, with_optimizer=body.optimizer)
        return schemas.PathResult(path=body.path, model_id=run.model)

    async def save_for_sampler(self, run: Run, body: schemas.SaveForSampler) -> Result:
        if body.path is not None:
            path = SavedPath(run.model, True, body.path)
            check_name(path.adapter)
            await self._sessions.save_adapter(opened(run), path.adapter)
            return schemas.PathResult(path=str(path))
        ref = await self._sessions.sampler(opened(run))
        id = f"{run.owner.id}:sample:{body.sampling_session_seq_id}"
        self.samplers[id] = SamplerTarget(run.base, snapshot=ref)
        return schemas.PathResult(sampling_session_id=id)


def opened(run: Run) -> ClientSession:
    """Return the model's session. Raises `InvalidRequest`."""
    if run.session is None:
        raise InvalidRequest(f"model {run.model} could not be created", field="model_id")
    return run.session
