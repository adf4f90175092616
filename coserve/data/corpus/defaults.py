"""Default epochs, batch size and learning rate, chosen from the corpus and the base. Pure; no torch.

The rules and their sources (docs/LOG.md, Corpora, has the measurements):

- `learning_rate`: the best rate for LoRA is about ten times that of full fine-tuning, depends little on the LoRA rank,
  and falls with the base's width (Thinking Machines, "LoRA Without Regret", 2025): `5e-4 * 2048 / hidden`. A DPO loss
  gets a twentieth of it, as in TRL, whose defaults are 1e-6 for DPO and 2e-5 for fine-tuning. Lion gets a third: its
  authors advise rates 3 to 10 times lower than AdamW's (Chen et al. 2023, section 5). An adapter that is trained
  further toward a teacher gets a quarter: it is near the teacher already, and the full rate moves it away first.
  A cartridge gets 0.05, whatever the base: 2.5 times the rate of its paper (Cartridges, arXiv 2506.06266, appendix A),
  where it is trained for ten times as many steps.
- `beta2`: 0.999, and 0.99 with Lion (the same section).
- `batch_tokens`: large batches hurt LoRA more than full fine-tuning (same source), and a small corpus in large batches
  has too few steps. So an epoch has about 16 steps, and a batch 64 to 8192 tokens. If less than a quarter of the tokens
  are targets (long prompts, short answers), the lower bound counts four tokens for each target: the same answers then
  get as many epochs after a long template as after a short one.
- `epochs`: at least 3; for a small corpus more, up to about 200 steps or 30 epochs. A corpus that would need more than
  20,000 steps in three epochs gets fewer, down to 1.
"""

from __future__ import annotations

import math

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import TrainingRequest, TrainingSettings

STEPS_PER_EPOCH = 16
MIN_BATCH_TOKENS = 64
MAX_BATCH_TOKENS = 8192
MIN_STEPS = 200
MAX_STEPS = 20_000
USUAL_EPOCHS = 3
MAX_EPOCHS = 30
MAX_CONTEXT_SHARE = 4
"""Most tokens counted per target token."""
RATE_AT_2048 = 5e-4
RATE_BOUNDS = (1e-4, 4e-3)
CARTRIDGE_RATE = 0.05
DPO_SHARE = 20
"""Divisor of the default learning rate for a DPO loss."""
LION_SHARE = 3
"""Divisor of the default learning rate for Lion."""
DISTILLATION_SHARE = 4
"""Divisor of the default learning rate for an adapter that is trained further toward a teacher."""
BETA2, LION_BETA2 = 0.999, 0.99


def choose_training(
    request: TrainingRequest,
    *,
    rows: int,
    tokens: int,
    hidden: int,
    targets: int | None = None,
    distills: bool = False,
    cartridge: bool = False,
) -> tuple[TrainingSettings, tuple[str, ...]]:
    """Replace every "auto"; return the settings and the names of the fields that were chosen.

    `rows`, `tokens` and `targets` (target tokens; None: all) count the corpus once; `hidden` is the base's hidden size;
    `distills`: an already trained adapter is trained further toward a teacher; `cartridge`: a KV prefix is trained.
    Explicit values stay, and the chosen ones follow from them: with an explicit batch size, the number of epochs
    depends on its steps. Raises `InvalidRequest` for `lora_plus_ratio` without a learning rate, because the default
    rate assumes one rate for A and B, and for a batch size in rows that is none, or
    beside one in tokens.
    """
    chosen: list[str] = []
    batch, rate, epochs = request.batch_tokens, request.learning_rate, request.epochs
    if rate == "auto":
        if request.lora_plus_ratio is not None:
            raise InvalidRequest(
                "expected a learning_rate (A's): the one that is chosen is for A and B alike",
                field="training.lora_plus_ratio",
            )
        share = (1 if request.loss is None else DPO_SHARE) * (LION_SHARE if request.optimizer.lion else 1)
        share *= DISTILLATION_SHARE if distills else 1
        rate = CARTRIDGE_RATE if cartridge else float(f"{choose_learning_rate(hidden) / share:.1e}")
        chosen.append("learning_rate")
    if request.batch_rows is not None:
        if batch != "auto":
            raise InvalidRequest("expected batch_rows or batch_tokens, got both", field="training.batch_rows")
        if not 1 <= request.batch_rows < 1 << 32:
            raise InvalidRequest(
                f"expected at least 1 and less than 2^32, got {request.batch_rows}", field="training.batch_rows"
            )
        batch = math.ceil(request.batch_rows * tokens / max(1, rows))
    if batch == "auto":
        batch = choose_batch_tokens(tokens, targets)
        chosen.append("batch_tokens")
    if epochs == "auto" or epochs is None:
        epochs = None
        if request.steps is None:
            epochs = choose_epochs(min(rows, math.ceil(tokens / max(1, batch))))
            chosen.append("epochs")
    beta2 = request.beta2 if request.beta2 is not None else LION_BETA2 if request.optimizer.lion else BETA2
    fields = msgspec.structs.asdict(request)
    fields |= {"epochs": epochs, "batch_tokens": batch, "batch_rows": None, "learning_rate": rate, "beta2": beta2}
    return TrainingSettings(**fields), tuple(sorted(chosen))


def choose_learning_rate(hidden: int) -> float:
    """Return the default rate for LoRA, rounded to two digits because users see it."""
    low, high = RATE_BOUNDS
    return float(f"{min(high, max(low, RATE_AT_2048 * 2048 / max(1, hidden))):.1e}")


def choose_batch_tokens(tokens: int, targets: int | None = None) -> int:
    """Return a sixteenth of the corpus's tokens, within bounds. The lower bound counts at most `MAX_CONTEXT_SHARE`
    tokens per target."""
    counted = tokens if targets is None else min(tokens, MAX_CONTEXT_SHARE * max(1, targets))
    batch = max(MIN_BATCH_TOKENS, math.ceil(counted / STEPS_PER_EPOCH)) * tokens / max(1, counted)
    return min(MAX_BATCH_TOKENS, math.ceil(batch))


def choose_epochs(steps_per_epoch: int) -> float:
    """Return a whole number of epochs."""
    steps = max(1, steps_per_epoch)
    wanted = max(USUAL_EPOCHS, math.ceil(MIN_STEPS / steps))
    return float(max(1, min(wanted, MAX_EPOCHS, MAX_STEPS // steps)))
