"""`coserve adapters merge`: an adapter added to the weights of its base, as a model folder of transformers."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from coserve.client import Client
from coserve.core.errors import UnsupportedAdapter, UnsupportedBase
from coserve.data.pretrained.source import check_source, locate
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.lora.files.gate import read_configs
from coserve.lora.files.wrapped import decoder_among, rename_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def merge_adapter(client: Client, name: str, base: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Download the adapter and let PEFT merge it into the base, on this machine's CPU and in the base's dtype; needs
    the host memory of the whole base. The tokenizer goes with it, and so do towers for images.

    `base`, `trust_remote_code`: as for `coserve serve`. Raises `FileExistsError`, `UnsupportedBase` if `base` is no
    model or PEFT is missing, `UnsupportedAdapter` if the adapter does not fit it, and the client's errors.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; choose a new folder")
    if find_spec("peft") is None:
        raise UnsupportedBase("merging needs PEFT: pip install peft")
    check_source(base)
    tokenizer = Tokenizer.load(base, trust_remote_code=trust_remote_code)  # before the weights, which take minutes
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        adapter, merged = Path(scratch, "adapter"), Path(scratch, "merged")
        client.download_adapter(name, adapter)
        read_configs(adapter).lora_alone()  # a KV prefix is no part of weights
        _merge(base, tokenizer, adapter, merged, trust_remote_code=trust_remote_code)
        merged.rename(folder)


def _merge(base: str, tokenizer: Tokenizer, adapter: Path, merged: Path, *, trust_remote_code: bool) -> None:
    # PEFT imports it; on some CPUs it warns of a kernel for 4-bit bases, which nothing here needs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import PeftModel
    from transformers import PreTrainedTokenizerFast

    load = import_module("coserve.model.formats.load")
    model = load.load_whole(locate(base), trust_remote_code=trust_remote_code)
    if (decoder := decoder_among(name for name, _ in model.named_modules())) is not None:
        rename_decoder(adapter, decoder)
    with warnings.catch_warnings():  # PEFT goes on with random weights
        warnings.filterwarnings("error", "Found missing adapter keys")
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # see `_untie_ends`
        try:
            tuned = PeftModel.from_pretrained(model, str(adapter))
        except UserWarning as error:
            raise UnsupportedAdapter(f"the adapter does not fit the base {base}: {error}") from None
    _untie_ends(tuned.get_base_model())
    tuned.merge_and_unload().save_pretrained(merged)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.serialised()),
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens,
    ).save_pretrained(merged)


def _untie_ends(model: PreTrainedModel) -> None:
    """Give the head a weight of its own if a LoRA of it, or of the embedding, would be merged into the one they
    share."""
    from peft.tuners.lora import LoraLayer

    ends = embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(end, LoraLayer) for end in ends) and head is not None and head.weight is embedding.weight:
        layer = head.get_base_layer() if isinstance(head, LoraLayer) else head
        layer.weight = copy.deepcopy(layer.weight)
        model.config.tie_word_embeddings = False
