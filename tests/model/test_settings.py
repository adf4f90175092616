"""The gate for config.json lets through what transformers itself writes, for every causal LM that it knows."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.opt import OPTConfig

from coserve.core.errors import UnsupportedBase
from coserve.model.settings import refuse_settings

WITHOUT_DEFAULTS = {"gemma4_assistant", "musicgen", "musicgen_melody"}
"""Their configs must be put together from others; they are no text models, or drafts of one."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_familys_own_config_passes() -> None:
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - WITHOUT_DEFAULTS)
    assert len(families) > 100
    for family in families:
        refuse_settings(family, json.loads(CONFIG_MAPPING[family]().to_json_string()), False)


def test_a_key_of_the_familys_own_is_a_number() -> None:
    refuse_settings("opt", json.loads(OPTConfig(_remove_final_layer_norm=True).to_json_string()), False)
    with pytest.raises(UnsupportedBase, match="_remove_final_layer_norm"):
        refuse_settings("opt", {"model_type": "opt", "_remove_final_layer_norm": "someone/kernel"}, False)
    with pytest.raises(UnsupportedBase, match="_remove_final_layer_norm"):  # transformers' models read it
        refuse_settings("llama", {"model_type": "llama", "_remove_final_layer_norm": True}, False)


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "_experts_implementation", "_output_attentions"])
def test_a_private_key_that_changes_what_transformers_does_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedBase, match=key):
        refuse_settings("llama", {"model_type": "llama", key: "someone/kernel"}, False)


def test_unknown_private_keys_are_found_at_any_depth_but_beside_code_refused() -> None:
    settings = {"model_type": "llama", "_model_name_or_path": "a.gguf", "text_config": {"_made_with": 3}, "_none": None}
    assert refuse_settings("llama", settings, False) == {"_model_name_or_path", "_made_with"}
    for wrong in ({"_made_with": {"a": 1}}, {"_made_with": 3, "auto_map": {}}):
        with pytest.raises(UnsupportedBase, match="_made_with"):
            refuse_settings("llama", wrong, True)
