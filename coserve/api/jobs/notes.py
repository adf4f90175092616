"""Notes for the user who submitted a job."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from coserve.core.errors import CoserveError
from coserve.core.training.jobs import JobSpec
from coserve.data.corpus.staging import PendingCorpus
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.registry.registry import Registry

ROWS = 4096
"""Rows examined at once."""

log = logging.getLogger(__name__)


def replacement_notes(registry: Registry, job: JobSpec) -> tuple[str, ...]:
    """Return a note for a job whose adapter already has versions and that continues from none of them."""
    name, version = job.adapter, job.version
    current = registry.current_version(name)
    if current is None or (job.init_from is not None and job.init_from.id == name):
        return ()
    continuable = not job.prefix and not registry.adapter(name, current).prefix
    further = f"to train {name!r} further, set continue_from to {name!r}; " if continuable else ""
    note = (
        f"this job trains version {version} of {name!r} from scratch: once it succeeds, {name!r} means version "
        f"{version} instead of version {current}, which stays available as {name}@{current}; {further}"
        "for a separate adapter, choose another name"
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


def count_beginning(corpus: Corpus, *tokens: int) -> int:
    """Count the rows that begin with these tokens."""
    count = 0
    for starts, found, _ in _blocks(corpus):
        long = starts[np.diff(starts, append=len(found)) >= len(tokens)]
        count += int(np.all([found[long + place] == token for place, token in enumerate(tokens)], axis=0).sum())
    return count


def count_without(corpus: Corpus, ends: Collection[int]) -> int:
    """Count the rows without a target token in `ends`."""
    count = 0
    for starts, found, learned in _blocks(corpus):
        taught = np.isin(found, list(ends)) & (learned > 0)
        count += int((np.add.reduceat(taught, starts, dtype=np.int64) == 0).sum())
    return count


def _blocks(corpus: Corpus) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
    """Yield, for each block of S rows and N tokens: where its rows begin (S), its tokens (N) and their target flags
    (N)."""
    for first in range(0, corpus.rows, ROWS):
        bounds = corpus.bounds[first : first + ROWS + 1]
        here = slice(bounds[0], bounds[-1])
        yield bounds[:-1] - bounds[0], corpus.tokens[here], corpus.target[here]
