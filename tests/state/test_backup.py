"""What a backup copies of jobs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from coserve.core.schemas import DocumentJob, DocumentSettings
from coserve.state.backup import back_up
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from tests.support.records import make_job


def test_a_document_that_is_not_a_corpus_yet_is_copied(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    for made in (folder.adapters, folder.files, folder.jobs):
        made.mkdir(parents=True)
    job = msgspec.structs.replace(make_job(), document=DocumentJob(settings=DocumentSettings()))
    with closing(Registry(folder.database)) as registry:
        registry.create_job(job)
    folder.job(job.spec.id).mkdir()
    folder.document(job.spec.id).write_bytes(b"chunks")
    (folder.job(job.spec.id) / "questions.jsonl").write_bytes(b"{}\n")
    assert back_up(folder.root, tmp_path / "copy").jobs == 1
    copied = tmp_path / "copy" / folder.job(job.spec.id).relative_to(folder.root)
    assert {path.name for path in copied.iterdir()} == {folder.document(job.spec.id).name, "questions.jsonl"}
