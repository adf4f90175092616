"""Sampling defaults of a base, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from coserve.core.errors import UnsupportedBase
from coserve.core.sampling import NEUTRAL, SamplingDefaults
from coserve.core.schemas.generation import GenerateRequest
from coserve.data.pretrained.generation_config import load_sampling_defaults


def write(folder: Path, content: str) -> str:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(content)
    return str(folder)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_sampling_defaults(str(tmp_path)) == NEUTRAL
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[1, 2]).save_pretrained(
        tmp_path
    )
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.0
    )
    assert load_sampling_defaults("bundled").temperature == 0.8


def test_null_is_no_default(tmp_path: Path) -> None:
    assert load_sampling_defaults(write(tmp_path, '{"temperature": null}')) == NEUTRAL


@pytest.mark.parametrize("value", ["[1]", "-1", '"hot"'])
def test_a_wrong_value_is_refused_by_its_name(value: str, tmp_path: Path) -> None:
    source = write(tmp_path, f'{{"temperature": {value}}}')
    with pytest.raises(UnsupportedBase, match=r"generation_config\.json.*temperature.*--generation-config none"):
        load_sampling_defaults(source)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedBase, match=r"generation_config\.json"):
        load_sampling_defaults(write(tmp_path, "no"))


def test_a_request_keeps_what_it_sets() -> None:
    filled = SamplingDefaults(temperature=0.6, top_k=20).fill(GenerateRequest(prompt="a", temperature=1.0))
    assert (filled.temperature, filled.top_k, filled.top_p) == (1.0, 20, None)
