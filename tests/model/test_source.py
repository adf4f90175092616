"""A base that cannot be loaded is refused before anything starts, each time with the text of its own mistake."""

from __future__ import annotations

import errno
import json
import os
import shutil
from importlib import resources
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.source import INDEX, check_source, fetch_files
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.model.formats.sizes import read_sizes
from coserve.model.load import load_base


def refused(source: object, **kwargs: bool) -> str:
    with pytest.raises(UnsupportedBase) as error:
        check_source(str(source), **kwargs)
    assert error.value.message.startswith("model: ")
    return error.value.message


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".").replace("--", "-")).write_text(content)
    return path


@pytest.mark.parametrize("source", ["./llama", "/no/such/llama", "~/no-such-llama", "a/b/c", "llama/"])
def test_a_path_that_leads_nowhere(source: str) -> None:
    assert "no such folder" in refused(source)
    assert "hub" not in refused(source)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    assert "no config.json" in refused(folder(tmp_path / "empty"))
    assert "holds an adapter" in refused(folder(tmp_path / "adapter", adapter_config__json="{}"))
    (tmp_path / "file").write_text("x")
    assert "got another file" in refused(tmp_path / "file")


def test_folders_whose_weights_are_missing(tmp_path: Path) -> None:
    none = folder(tmp_path / "none", config__json="{}")
    assert "not there" in refused(none)
    check_source(str(none), weights=False)
    assert "pickle" in refused(folder(tmp_path / "bin", config__json="{}", pytorch_model__bin="x"))
    shards = folder(tmp_path / "shards", config__json="{}")
    (shards / "model-1.safetensors").write_text("x")
    (shards / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert "1 of 2" in refused(shards) and "model-2.safetensors" in refused(shards)
    (shards / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refused(shards)
    (shards / "model-2.safetensors").write_text("x")
    check_source(str(shards))
    (shards / INDEX).write_text("[]")
    assert "damaged" in refused(shards)


def test_names_pass() -> None:
    for name in ("bundled", "gpt2", "owner/name", "owner/name@refs/pr/1"):
        check_source(name)


def test_a_revision_of_the_hub_is_read_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits in the hub's cache; nothing is fetched."""
    tiny = Path(str(resources.files("coserve") / "assets" / "tiny"))
    repository = tmp_path / "models--org--tiny"
    for commit, reference, layers in (("a" * 40, "v1", 1), ("b" * 40, "main", 4)):
        snapshot = repository / "snapshots" / commit
        shutil.copytree(tiny, snapshot)
        config = json.loads((tiny / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        (snapshot / "chat_template.jinja").write_text(reference)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, layers, template in (("org/tiny@v1", 1, "v1"), ("org/tiny", 4, "main")):
        spec, sizes = load_base(name, device="cpu", dtype="auto").spec, read_sizes(name, "float32")
        assert (spec.name, spec.hub_name, spec.layers, sizes.spec.layers) == ("org/tiny", "org/tiny", layers, layers)
        assert Tokenizer.load(name).chat_template == template


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (HFValidationError("bad"), "nor is it a name on the hub"),
        (GatedRepoError.__new__(GatedRepoError), "gated"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "the hub has no model of that name"),
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (ConnectionError("down"), "cannot be reached"),
        (httpx.ReadTimeout("late"), "cannot be reached"),
    ],
)
def test_what_is_wrong_with_a_hub_name(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnsupportedBase, match=says):
        fetch_files("gpt22", ["*.json"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_what_the_machine_refuses_while_it_downloads_is_not_blamed_on_the_hub(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(number, os.strerror(number), "/cache/blobs/1")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnsupportedBase, match=os.strerror(number)) as refused:
        fetch_files("org/model", ["*.json"])
    assert "no such folder" not in refused.value.message and "cannot be reached" not in refused.value.message
