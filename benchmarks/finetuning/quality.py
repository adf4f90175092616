"""Losses of fine-tuning by coserve against PEFT and plain PyTorch, from the same weights on the same batches.

    OMP_NUM_THREADS=1 nice -n 10 python -m benchmarks.finetuning.quality --dtypes float32    (on a CPU, about 2 minutes
    of one core) python -m benchmarks.finetuning.quality --device cuda --dtypes bfloat16                  (which many
    CPUs compute slowly) python -m benchmarks.finetuning.quality --plot
    python -m benchmarks.finetuning.quality --tiny --out /tmp/tried

LoRA of rank 16 at all sites of the bundled base, its bundled corpora, AdamW, a linear schedule with a warm-up of 5%,
gradients clipped to a norm of 1. coserve trains by its own loop. The other side is a loop of plain PyTorch around a
PEFT model: the rows of each micro-batch padded to the longest, the losses of an optimizer step summed and divided by
the number of its targets. Both get the same batches, initial adapters, rates and held-out rows.

`float32`   everything in float32: what differs is the order of sums
`bfloat16`  the base in bfloat16. coserve computes LoRA terms in bfloat16 from float32 master weights, PEFT in float32
(its default)

Each row is written when its run is done; a run that has a row is not repeated. `--plot` draws the figure and puts the
keys into the summary.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.bdlora.quality import WARMUP, HeldOutPlan, read_corpus, run_job
from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS, add_names, make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from benchmarks.common.summary import Key, update_summary
from coserve.core.training.settings import TrainingSettings
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import LoraSettings
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.loop import learning_rate
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.lora import LoraWeights

NAME = "finetune_quality.json"
FIGURE = Path("docs/figures/finetune_quality.png")
SIDES = ("coserve", "peft")
DTYPES = ("float32", "bfloat16")
LORA = LoraSettings(r=16)


@dataclass(frozen=True)
class Scale:
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: float = 1
    batch_tokens: int = 512
    rate: float = 2e-3


FULL = Scale()
TRIED = Scale(seeds=(0,), epochs=0.2)


@dataclass(frozen=True)
class Curve:
    """Losses in nats per target token: of each step before its update, and of the held-out rows after the last."""

    training: list[float]
    validation: float


def training_of(scale: Scale, seed: int, corpus: Corpus, held: int) -> tuple[TrainingSettings, HeldOutPlan]:
    """How both sides train, and on which rows: evaluated after the last step."""
    training = TrainingSettings(
        epochs=scale.epochs, batch_tokens=scale.batch_tokens, learning_rate=scale.rate, seed=seed
    )
    plan = HeldOutPlan(corpus, held, training)
    steps = plan.total_steps
    return msgspec.structs.replace(training, warmup_steps=math.ceil(WARMUP * steps), eval_steps=steps), plan


def by_coserve(scale: Scale, seed: int, base: Base, corpus: Corpus, held: int) -> Curve:
    training, plan = training_of(scale, seed, corpus, held)
    found: Sequence[StepMetrics] = run_job(f"seed{seed}", training, plan, start_of(base, seed), base, corpus)
    validation = found[-1].valid_loss
    assert validation is not None, "the last step is evaluated"
    return Curve([step.loss for step in found], validation)


def start_of(base: Base, seed: int) -> LoraWeights:
    """float32, on the CPU."""
    return new_adapter(LORA, base.spec, seed=seed, dtype=torch.float32, device="cpu")


def peft_model(dtype: str, device: str, start: LoraWeights) -> Any:  # noqa: ANN401 - a PEFT model, whose members have no types
    """The bundled base with an adapter that begins as `start`."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = str(resources.files("coserve") / "assets" / "tiny")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    (scaling,) = {pair.scaling for pair in start.sites.values()}
    settings = peft.LoraConfig(r=LORA.r, lora_alpha=scaling * LORA.r, target_modules=list(start.sites))  # type: ignore[arg-type]
    found = peft.get_peft_model(base, settings)
    modules = dict(found.get_base_model().named_modules())
    with torch.no_grad():
        for site, pair in start.sites.items():
            modules[site].lora_A["default"].weight.copy_(pair.a_RD)
            modules[site].lora_B["default"].weight.copy_(pair.b_OR)
    return found.train()


def padded(corpus: Corpus, rows: Sequence[int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, their mask, and the label of each token's next one (-100: none): (B, L) each."""
    length = max(int(corpus.lengths[row]) for row in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    labels_BL, mask_BL = torch.full_like(ids_BL, -100), torch.zeros_like(ids_BL)
    for i, row in enumerate(rows):
        tokens, target = (torch.from_numpy(part).long() for part in corpus.row(row))
        ids_BL[i, : len(tokens)], mask_BL[i, : len(tokens)] = tokens, 1
        labels_BL[i, : len(tokens) - 1] = torch.where(target[1:] > 0, tokens[1:], -100)
    return ids_BL.to(device), mask_BL.to(device), labels_BL.to(device)


def summed_loss(model: Any, corpus: Corpus, rows: Sequence[int], device: str) -> tuple[Tensor, int]:  # noqa: ANN401 - as `peft_model` has it
    """The negative log-likelihood of the rows' targets, and how many there are."""
    ids_BL, mask_BL, labels_BL = padded(corpus, rows, device)
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")
    return loss, int((labels_BL >= 0).sum())


def by_peft(scale: Scale, seed: int, dtype: str, device: str, start: LoraWeights, corpus: Corpus, held: int) -> Curve:
    training, plan = training_of(scale, seed, corpus, held)
    model = peft_model(dtype, device, start)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, betas=(training.beta1, training.beta2), eps=training.eps, weight_decay=training.weight_decay
    )
    losses = list[float]()
    for step in range(plan.total_steps):
        parts, targets = list[float](), 0
        for rows in plan.step(step).micro_batches:
            loss, count = summed_loss(model, corpus, rows, device)
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(float(loss.detach()))
            targets += count
        for parameter in learned:
            assert parameter.grad is not None, "every site is trained"
            parameter.grad /= targets
        torch.nn.utils.clip_grad_norm_(learned, training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step, plan.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / targets)
    with torch.no_grad():
        found = [summed_loss(model, corpus, rows, device) for rows in plan.validation()]
    return Curve(losses, sum(float(loss) for loss, _ in found) / sum(count for _, count in found))


Rows = Sequence[Mapping[str, Any]]


def differences(rows: Rows) -> dict[str, dict[str, Any]]:
    """coserve minus PEFT, by dtype: of the validation losses and of the last training losses (each seed's), the largest
    difference between two steps; and the spread of PEFT's validation loss over seeds."""
    of = {(row["dtype"], row["side"], row["seed"]): row for row in rows}
    found = {}
    for dtype in DTYPES:
        seeds = sorted({seed for _, _, seed in of if all((dtype, side, seed) in of for side in SIDES)})
        pairs = [(of[dtype, "coserve", seed], of[dtype, "peft", seed]) for seed in seeds]
        if not pairs:
            continue
        steps = [
            abs(a - b) for ours, theirs in pairs for a, b in zip(ours["training"], theirs["training"], strict=True)
        ]
        theirs = [peft["value"] for _, peft in pairs]
        found[dtype] = {
            "validation": [round(ours["value"] - peft["value"], 6) for ours, peft in pairs],
            "training": [round(ours["training"][-1] - peft["training"][-1], 6) for ours, peft in pairs],
            "largest_step": round(max(steps), 6),
            "seeds_std": round(statistics.stdev(theirs), 6) if len(theirs) > 1 else None,
        }
    return found


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draw the figure and update `finetune.quality.*`, from the rows in `out`."""
    rows = list(msgspec.json.decode((out / NAME).read_bytes())["rows"].values())
    latest = max(rows, key=lambda row: row["date"])
    more = {f"finetune.quality.delta.{dtype}": found for dtype, found in differences(rows).items()}
    found: dict[str, Key] = {
        key: (round(statistics.mean(own["validation"]), 6), "nats/token", None, latest) for key, own in more.items()
    }
    update_summary(out, "finetuning/quality.py", NAME, found, more)
    draw(rows, figure)


def draw(rows: Rows, path: Path) -> None:
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    with panels(path, 1, len(dtypes), (1 + 5 * len(dtypes), 4)) as (axes,):
        for row in rows:
            color, peft = f"C{row['seed']}", row["side"] == "peft"
            steps = range(1, len(row["training"]) + 1)
            style = (
                {"linestyle": "--", "linewidth": 1.0, "color": "black"} if peft else {"linewidth": 2.5, "color": color}
            )
            axis = axes[dtypes.index(row["dtype"])]
            axis.plot(
                steps, row["training"], **style, label=f"{row['side']}, seed {row['seed']}", zorder=3 if peft else 2
            )
        for axis, dtype in zip(axes, dtypes, strict=True):
            axis.set(xlabel="optimizer step", ylabel="training loss, nats/token", title=dtype)
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)


def main() -> None:
    parser = make_parser(__doc__, tiny="few steps, to try the script")
    parser.add_argument("--device", default="cpu")
    add_names(parser, "--dtypes", DTYPES, what="dtypes")
    parser.add_argument("--plot", action="store_true", help="draw the figure, put the keys in summary.json, and stop")
    given = parser.parse_args()
    if given.plot:
        publish()
        return
    scale, device = TRIED if given.tiny else FULL, given.device
    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    corpus, held = read_corpus()
    results = Results.of(
        given,
        NAME,
        __file__,
        asdict(scale)
        | {
            "rank": LORA.r,
            "warmup": WARMUP,
            "rows": corpus.rows - held,
            "tokens": int(corpus.bounds[-held - 1]),
            "validation_rows": held,
        },
        seed=scale.seeds[0],
        hardware=cpu_name() if device == "cpu" else None,
    )
    bases = {dtype: load_base("bundled", device=device, dtype=dtype) for dtype in given.dtypes}
    known = results.keys()
    for dtype, seed, side in itertools.product(given.dtypes, scale.seeds, SIDES):
        key, began = f"{dtype}.{side}.seed{seed}", time.process_time()
        if key in known:
            continue
        base = bases[dtype]
        if side == "coserve":
            found = by_coserve(scale, seed, base, corpus, held)
        else:
            found = by_peft(scale, seed, dtype, device, start_of(base, seed), corpus, held)
        about = {"dtype": dtype, "side": side, "seed": seed, "steps": len(found.training)}
        about |= {"training": [round(loss, 6) for loss in found.training]}
        about |= {"cpu_seconds": round(time.process_time() - began, 1)}
        results.put(key, round(found.validation, 6), "nats/token", about=about)
    print(msgspec.json.format(msgspec.json.encode(differences(results.rows())), indent=1).decode())


if __name__ == "__main__":
    main()
