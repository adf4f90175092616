"""Memory of a long sequence for each served family, and which quantisations of the base it can have.

    python -m benchmarks.models.families [--only FAMILY,...]

The shape is the one that transformers' config of the family has by default (`SET`: fields that it leaves open), in
bfloat16; the model is made without weights. `python -m tools.families` writes the table of docs/guide/families.md from
the result. No GPU; some minutes.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, summarize
from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import BaseSizes
from coserve.core.types import BaseSpec
from coserve.lora.files.bdlora import CONV1D_FAMILIES
from coserve.model.formats.sizes import config_sizes
from coserve.model.quantized.modules import quantizable
from tests.support.families import SERVED

FILE, KEY = "families.json", "models.families"
TOKENS = 8192
QUANTIZATIONS = ("fp8", "nf4")
MIB = 1 << 20
_ATTENTION_AT = (2, 6, 10, 14, 18, 21)
_LLAMA31 = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128259}
SET: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "idefics3": {"text_config": {"model_type": "llama"} | _LLAMA31},
    "lfm2_moe": {
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if layer in _ATTENTION_AT else "conv" for layer in range(24)],
    },
    "ministral": {"head_dim": 128},
}
"""Fields without which no model can be made of a family's default config, from the family's published models."""


def key_of(family: str) -> str:
    """The key of a family's row."""
    return f"models.family.{family}"


def sizes_of(family: str) -> BaseSizes:
    """The sizes of the default shape. Raises `UnsupportedBase`."""
    return config_sizes(CONFIG_MAPPING[family](**SET.get(family, {})), "bfloat16", name=family)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="families, separated by commas")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    results = Results.of(options, FILE, __file__, {"tokens": TOKENS, "dtype": "bfloat16"}, hardware=cpu_name())
    for family in options.only.split(",") if options.only else SERVED:
        try:
            plain = sizes_of(family)
        except (UnsupportedBase, TypeError, ValueError) as error:  # no model can be made of the default config
            print(f"{family}: {error}")
            continue
        about = {
            "layers": plain.spec.layers,
            "hidden": plain.spec.hidden,
            "kv_bytes_a_token": plain.kv,
            "state_bytes": plain.states,
            "quantized": _quantized(plain.spec),
        }
        results.put(key_of(family), round((TOKENS * plain.kv + plain.states) / MIB, 1), "MiB", about=about)
    keys = results.keys()
    results.put(KEY, sum(key_of(family) in keys for family in SERVED), "families")
    summarize(FILE, options.out, [KEY])


def _quantized(spec: BaseSpec) -> list[str]:
    """The quantisations that some linear module of the layers can have."""
    if spec.family in CONV1D_FAMILIES:
        return []
    sites = {name: (site.in_features, site.out_features) for name, site in spec.sites.items()}
    return [kind for kind in QUANTIZATIONS if any(quantizable(name, *sizes, kind) for name, sizes in sites.items())]


if __name__ == "__main__":
    main()
