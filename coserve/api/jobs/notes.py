"""Notes for the user who submitted a job."""

from __future__ import annotations

import logging

from coserve.core.errors import CoserveError
from coserve.core.training.jobs import JobSpec
from coserve.data.corpus.findings import count_beginning, count_without
from coserve.data.corpus.staging import PendingCorpus
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)


def replacement_notes(job: JobSpec, current: int | None) -> tuple[str, ...]:
    """Return a note for a job whose adapter already has versions and that continues from none of them."""
    if current is None or (job.init_from is not None and job.init_from.id == job.adapter):
        return ()
    name, version = job.adapter, job.version
    note = (
        f"this job trains version {version} of {name!r} from scratch: once it succeeds, {name!r} means version "
        f"{version} "
        f"instead of version {current}, which stays available as {name}@{current}; to train {name!r} further, set "
        f"continue_from to {name!r}; for a separate adapter, choose another name"
    )
    return (note,)


def row_notes(corpus: Corpus, rows_cut: int, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return notes about rows that begin with two BOS tokens, and about rows without an end token to learn, if there
    are more of them than rows that were cut."""
    notes: tuple[str, ...] = ()
    bos, turn = tokenizer.bos_token_id, tokenizer.end_of_turn_id
    twice = 0 if bos is None else count_beginning(corpus, bos, bos)
    if twice:
        why = "the tokenizer puts one before a text, and theirs has one already; leave it out"
        notes = (f"{twice} of {corpus.rows} rows begin with two BOS tokens: {why}",)
    ends = {*tokenizer.eos_token_ids, *(() if turn is None else (turn,))}
    if (endless := count_without(corpus, ends)) > rows_cut:
        why = "none of their learned tokens ends a generation, so that the adapter may go on to max_tokens"
        notes = (*notes, f"{endless} of {corpus.rows} rows teach no end: {why}")
    return notes


def record_cut_rows(registry: Registry, id: str, corpus: PendingCorpus) -> None:
    """Add an event about rows that were cut. The job stays accepted if the event cannot be written."""
    try:
        limits = "max_length, the base's context or micro_batch_tokens"
        text = f"{corpus.rows_cut} of {corpus.rows} rows were longer than {limits} and lost a part"
        registry.record_message(id, text, level="warning")
    except CoserveError as error:
        log.warning("job %s: %s", id, error.message)
