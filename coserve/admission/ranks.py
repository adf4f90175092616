"""Whether a job can train with a base that is sharded over several GPUs. Pure: no torch, no files."""

from __future__ import annotations

from coserve.admission.optimizers import check_optimizer
from coserve.core.errors import InvalidRequest
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import DpoLoss, KtoLoss, TrainingSettings
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.bdlora import ParallelStyle, blocks_at, parallel_style
from coserve.lora.files.targets import target_sites


def blocks_fit(settings: LoraSettings, base: BaseSpec, ranks: int) -> bool:
    """Return whether each of `ranks` GPUs can hold whole blocks of an adapter, or a shard of one block, at each site.

    If true, `parallel.lora.partition_pair` keeps the blocks of every pair. It also keeps some others, where several
    GPUs share a key/value head; this function does not know about these.
    """
    if ranks == 1 or settings.bd_blocks == 1:
        return True
    return all(site_fits(site, blocks_at(settings, site), ranks) for site in target_sites(settings, base))


def site_fits(site: str, blocks: tuple[int, int], ranks: int) -> bool:
    """Return whether a site's blocks can be divided among `ranks` GPUs. `blocks`: number of blocks of A and of B; 1:
    dense."""
    in_a, in_b = blocks
    if blocks == (1, 1):
        return True
    match parallel_style(site):
        case ParallelStyle.COLUMN:
            return in_a == 1 and _divide(in_b, ranks)
        case ParallelStyle.ROW:
            return in_b == 1 and _divide(in_a, ranks)
        case None:  # a fused projection
            return False


def _divide(blocks: int, ranks: int) -> bool:
    return blocks % ranks == 0 or ranks % blocks == 0


def keeps_reference(training: TrainingSettings, *, continues: bool) -> bool:
    """Return whether a job keeps a frozen copy of the adapter that it `continues`, as the reference of a loss."""
    return continues and isinstance(training.loss, DpoLoss | KtoLoss) and training.loss.reference == "start"


def check_ranks(settings: LoraSettings, base: BaseSpec, *, ranks: int, field: str) -> None:
    """Raise `InvalidRequest` for an adapter that cannot be trained on `ranks` GPUs. `field`: the request field to
    name."""
    if blocks_fit(settings, base, ranks):
        return
    blocks = settings.bd_blocks
    if _divide(blocks, ranks):
        raise InvalidRequest(
            f"with --tp {ranks} only B of column-parallel sites and A of row-parallel ones can be block-diagonal",
            field=field,
        )
    raise InvalidRequest(
        f"expected bd_blocks that {ranks} GPUs (--tp {ranks}) divide, or that divide them, got {blocks}", field=field
    )


def unmet_need(job: JobSpec, base: BaseSpec, *, ranks: int) -> str | None:
    """Return what an accepted job needs that this daemon lacks; None: it can train. `ranks`: GPUs that share the
    base."""
    if not blocks_fit(job.lora, base, ranks):
        return f"needs a --tp that its {job.lora.bd_blocks} blocks fit; this daemon has {ranks}"
    try:
        check_optimizer(job.training.optimizer, ranks=ranks)
    except InvalidRequest as error:
        return f"needs another daemon: {error.message}"
    return None
