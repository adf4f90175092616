"""An adapter that has to be evaluated first is not published unseen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coserve.core.errors import JobOutOfMemory
from coserve.core.link.jobs import JobNote
from coserve.model.lora import LoraWeights
from tests.support.finetuning import Bench, job_spec, random_corpus, tiny_base


def no_memory(weights: LoraWeights) -> LoraWeights:
    raise MemoryError


@pytest.mark.parametrize("evaluated", [True, False])
def test_without_memory_for_its_copy_the_job_fails(evaluated: bool, tmp_path: Path) -> None:
    bench, corpus = Bench(tiny_base("llama"), tmp_path), random_corpus(0, (5, 4))
    options = {"steps": 1} | ({} if evaluated else {"sample_prompts": ["x"], "sample_steps": 1})
    spec = bench.place(corpus, msgspec.structs.replace(job_spec(corpus, "job", **options), evaluated=evaluated))
    bench.start(spec)
    while not bench.trainer.finished(spec.id):
        bench.trainer.advance(spec.id, None)
    assert bench.trainer.snapshot_due(spec.id)
    bench.store.host_copy = no_memory  # type: ignore[method-assign]
    take = bench.trainer.snapshot(spec.id)
    if evaluated:
        with pytest.raises(JobOutOfMemory, match="before it is published"):
            take()
    else:
        assert isinstance(take()(), JobNote), "samples alone are left out"
