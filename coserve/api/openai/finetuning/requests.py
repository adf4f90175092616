"""Translates `POST /v1/fine_tuning/jobs` into a `FinetuneRequest`."""

from __future__ import annotations

import hashlib
import secrets

from coserve.api.http.body_types import refuse_unsupported
from coserve.api.openai.finetuning.schemas import CreateJob, DpoHyperparameters, Hyperparameters, Method
from coserve.api.openai.names import ID_LENGTH, adapter_name
from coserve.api.openai.requests import adapter_of
from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_SEED
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.training.settings import Auto, DpoLoss, PreferenceLoss, TrainingRequest
from coserve.core.types import BaseSpec
from coserve.data.corpus.defaults import choose_training


def job_request(body: CreateJob, spec: BaseSpec, key: str | None) -> FinetuneRequest:
    """Return the native request without its rows. Random values are derived
    from `key`, the request's `Idempotency-Key`, so that a repeated request is the same.

    Raises `InvalidRequest`, `AdapterNotFound`.
    """
    refuse_unsupported(body)
    found = _hyperparameters(body)
    loss = None
    if isinstance(found, DpoHyperparameters):
        beta = _given(found.beta)
        loss = DpoLoss() if beta is None else DpoLoss(beta=beta)
    random = hashlib.sha256(secrets.token_bytes(16) if key is None else key.encode()).hexdigest()
    multiplier, epochs, batch_rows = map(_given, (found.learning_rate_multiplier, found.n_epochs, found.batch_size))
    training = TrainingRequest(
        epochs=epochs,
        batch_rows=None if batch_rows is None else int(batch_rows),
        learning_rate="auto" if multiplier is None else default_rate(loss, spec) * multiplier,
        loss=loss,
        seed=int(random[ID_LENGTH : ID_LENGTH + 8], 16) & MAX_SEED if body.seed is None else body.seed,
    )
    return FinetuneRequest(
        adapter=adapter_name(body.suffix or "", random[:ID_LENGTH]),
        continue_from=adapter_of(body.model, spec.name),
        lora=body.lora,
        training=training,
        metadata=body.metadata or {},
    )


def _given(value: float | Auto | None) -> float | None:
    return None if value is None or value == "auto" else float(value)


def default_rate(loss: PreferenceLoss | None, spec: BaseSpec) -> float:
    """Return the learning rate that `learning_rate_multiplier` multiplies."""
    return choose_training(TrainingRequest(loss=loss), rows=1, tokens=1, hidden=spec.hidden)[0].learning_rate


def _hyperparameters(body: CreateJob) -> Hyperparameters:
    """Return the method's settings; `DpoHyperparameters` for dpo alone."""
    method = body.method or Method(type="supervised")
    other = "dpo" if method.type == "supervised" else "supervised"
    if getattr(method, other) is not None:
        raise InvalidRequest(f"expected no settings of {other}, got some for {method.type}", field=f"method.{other}")
    if method.type == "dpo":
        if body.hyperparameters is not None:
            raise InvalidRequest("expected them in method.dpo", field="hyperparameters")
        return (method.dpo and method.dpo.hyperparameters) or DpoHyperparameters()
    own = method.supervised and method.supervised.hyperparameters
    if own is not None and body.hyperparameters is not None:
        raise InvalidRequest("expected them in method.supervised alone", field="hyperparameters")
    return own or body.hyperparameters or Hyperparameters()
