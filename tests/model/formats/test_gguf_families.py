"""GGUF files of each family, written here as llama.cpp's converter writes them: the
loaded model's parameters and logits are those of the model that was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.model.load import load_base
from tests.support.families import tiny_family
from tests.support.gguf_files import permute, write_by_names, write_llama

Stored = dict[str, Tensor]
Change = Callable[[str, Tensor], Stored]


def _split(tensor: Tensor, gate: str, up: str) -> Stored:
    half = tensor.shape[-2] // 2
    return {gate: tensor[..., :half, :], up: tensor[..., half:, :]}


def _experts(name: str, tensor: Tensor) -> Stored:
    """Experts stacked as transformers keeps them, gates and ups apart."""
    block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
    if name.endswith("experts.gate_up_proj"):
        return _split(tensor, f"{block}.ffn_gate_exps.weight", f"{block}.ffn_up_exps.weight")
    if name.endswith(("experts.down_proj", "experts.up_proj")):
        return {f"{block}.ffn_{name.split('.')[-1].removesuffix('_proj')}_exps.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{block}.exp_probs_b.bias": tensor}
    return {}


def _delta(config: PretrainedConfig, *, tiled: bool) -> Change:
    """Qwen3-Next's and Qwen3.5's converters. `tiled`: value heads in turns of the key heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value, each = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    order = [head * each + part for part in range(each) for head in range(keys)] if tiled else list(range(values))

    def heads(tensor: Tensor, size: int) -> Tensor:
        return torch.cat([tensor[head * size : (head + 1) * size] for head in order])

    def change(name: str, tensor: Tensor) -> Stored:
        block, last = f"blk.{name.split('.')[2]}" if "layers" in name else "", 2 * keys * key
        if name.endswith("A_log"):
            return {f"{block}.ssm_a": heads(-tensor.exp(), 1)}
        if name.endswith("dt_bias"):
            return {f"{block}.ssm_dt.bias": heads(tensor, 1)}
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze()
            return {f"{block}.ssm_conv1d.weight": torch.cat([tensor[:last], heads(tensor[last:], value)])}
        if name.endswith("in_proj_qkv.weight"):
            return {f"{block}.attn_qkv.weight": torch.cat([tensor[:last], heads(tensor[last:], value)])}
        if name.endswith("in_proj_z.weight"):
            return {f"{block}.attn_gate.weight": heads(tensor, value)}
        if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            kind = "alpha" if name.endswith("a.weight") else "beta"
            return {f"{block}.ssm_{kind}.weight": heads(tensor, 1)}
        if name.endswith("linear_attn.out_proj.weight"):
            return {f"{block}.ssm_out.weight": heads(tensor.T, value).T}
        if name.endswith("in_proj_qkvz.weight"):
            sizes = [key, key, each * value, each * value]
            query, of_key, of_value, gate = tensor.view(keys, sum(sizes), -1).split(sizes, 1)
            rest = torch.cat([part.reshape(-1, tensor.shape[1]) for part in (query, of_key, of_value)])
            return {f"{block}.attn_qkv.weight": rest, f"{block}.attn_gate.weight": gate.reshape(-1, tensor.shape[1])}
        if name.endswith("norm.weight") and "linear_attn.norm" not in name:
            own = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
            own |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
            stem = name.split(".")[-2]
            return {f"{block}.{own[stem]}.weight" if block else "output_norm.weight": tensor + 1}
        return _experts(name, tensor)

    return change


def _mamba(config: PretrainedConfig, groups: int) -> Change:
    """Granite's and Nemotron-H's converters."""

    def change(name: str, tensor: Tensor) -> Stored:
        block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
        for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if name.endswith(f"{kind}_proj.weight"):
                return {f"{block}.attn_{kind}.weight": torch.from_numpy(permute(tensor.numpy(), heads))}
        if name.endswith("A_log"):
            return {f"{block}.ssm_a": -tensor.exp()[:, None]}
        if name.endswith(".D"):
            return {f"{block}.ssm_d": tensor[:, None]}
        if name.endswith("dt_bias"):
            return {f"{block}.ssm_dt.bias": tensor}
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            return {f"{block}.ssm_norm.weight": tensor.view(groups, -1)}
        shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
        if name.endswith("shared_mlp.input_linear.weight"):
            return _split(tensor, f"{block}.ffn_gate{shared}.weight", f"{block}.ffn_up{shared}.weight")
        if name.endswith("shared_mlp.output_linear.weight"):
            return {f"{block}.ffn_down{shared}.weight": tensor}
        if name.endswith("router.weight"):
            return {f"{block}.ffn_gate_inp.weight": tensor}
        stem, _, suffix = name.partition(".mixer.")[2].rpartition(".")
        if stem in MIXER and suffix in ("weight", "bias"):
            return {f"{block}.{MIXER[stem]}.{suffix}": tensor.squeeze(1) if tensor.dim() == 3 else tensor}
        return _experts(name, tensor)

    return change


MIXER = {
    "conv1d": "ssm_conv1d",
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
}
"""llama.cpp's names of Nemotron-H's parameters."""


def _check(path: Path, model: PreTrainedModel, architecture: MODEL_ARCH, change: Change, **metadata: object) -> None:
    """Write the model, load it, and compare parameters, logits and settings."""
    config = model.config
    fields = {"attention__head_count_kv": "num_key_value_heads", "attention__key_length": "head_dim"}
    fields |= {"feed_forward_length": "intermediate_size", "attention__layer_norm_rms_epsilon": "rms_norm_eps"}
    given: dict[str, object] = {"attention__layer_norm_rms_epsilon": 1e-5, "feed_forward_length": 0}
    given |= {
        key: getattr(config, name) for key, name in fields.items() if key not in metadata and hasattr(config, name)
    }
    given |= metadata
    write_by_names(path, model, architecture, change=change, **given)  # type: ignore[arg-type]
    found = load_base(str(path), device="cpu", dtype="auto").model
    assert found.config.model_type == config.model_type
    written = found.state_dict()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(written[name], parameter, msg=lambda text, name=name: f"{name}: {text}")
    plain = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32, attn_implementation="eager").eval()
    plain.load_state_dict(found.state_dict())
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_olmo(family: str, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_family(family, **({"layer_types": kinds} if family == "olmo3" else {}))
    windows = {"attention__sliding_window": 5, "attention__sliding_window_pattern": [True, False]}
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.OLMO2, _experts, **(windows if family == "olmo3" else {}))


@pytest.mark.parametrize("biased", [True, False])
def test_seed_oss(biased: bool, tmp_path: Path) -> None:
    model = tiny_family("seed_oss", attention_bias=biased)
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.SEED_OSS, _experts)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("further", [0, 1])
def test_gated_delta_nets(family: str, further: int, tmp_path: Path) -> None:
    """Value heads in another order than the model's, and with a layer that predicts further tokens."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_family(family, rope_parameters=rotary)
    config, names = model.config, {"QWEN35": "qwen3_5_text", "QWEN35MOE": "qwen3_5_moe_text", "QWEN3NEXT": "qwen3_next"}
    architecture = next(MODEL_ARCH[name] for name, own in names.items() if own == family)
    _check(
        tmp_path / "m.gguf",
        model,
        architecture,
        _delta(config, tiled=family != "qwen3_next"),
        tensors={f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight": [1.0]} if further else {},
        block_count=config.num_hidden_layers + further,
        nextn_predict_layers=further,
        rope__dimension_count=config.head_dim // 2,
        full_attention_interval=3,
        ssm__conv_kernel=config.linear_conv_kernel_dim,
        ssm__state_size=config.linear_key_head_dim,
        ssm__group_count=config.linear_num_key_heads,
        ssm__time_step_rank=config.linear_num_value_heads,
        ssm__inner_size=config.linear_value_head_dim * config.linear_num_value_heads,
        expert_count=getattr(config, "num_experts", 0),
        expert_used_count=getattr(config, "num_experts_per_tok", 0),
        expert_feed_forward_length=getattr(config, "moe_intermediate_size", 0),
        expert_shared_feed_forward_length=getattr(config, "shared_expert_intermediate_size", 0),
    )


def test_glm(tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_family("glm4", rope_parameters=rotary)
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.GLM4, _experts, rope__dimension_count=model.config.head_dim // 2)


@pytest.mark.parametrize("normed", [True, False])
def test_glm_with_experts(normed: bool, tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_family("glm4_moe", rope_parameters=rotary, use_qk_norm=normed, routed_scaling_factor=1.5)
    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.GLM4_MOE,
        _experts,
        block_count=model.config.num_hidden_layers + 1,
        nextn_predict_layers=1,
        rope__dimension_count=4,
        leading_dense_block_count=1,
        **_routed(model.config),
    )


def _routed(config: PretrainedConfig) -> dict[str, object]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


_SCALES = {"attention_multiplier": 0.25, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
_SCALE_KEYS = {"attention__scale": 0.25, "embedding_scale": 6.0, "residual_scale": 0.5, "logit_scale": 4.0}


@pytest.mark.parametrize("experts", [0, 4])
def test_granite_hybrids(experts: int, tmp_path: Path) -> None:
    model = tiny_family("granitemoehybrid", num_local_experts=experts, **_SCALES)
    config = model.config
    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.GRANITE_HYBRID,
        _mamba(config, config.mamba_n_groups),
        attention__head_count_kv=[0, config.num_key_value_heads, 0],
        expert_count=experts,
        expert_used_count=config.num_experts_per_tok,
        expert_shared_feed_forward_length=config.shared_intermediate_size,
        rope__scaling__finetuned=False,
        ssm__conv_kernel=config.mamba_d_conv,
        ssm__state_size=config.mamba_d_state,
        ssm__group_count=config.mamba_n_groups,
        ssm__time_step_rank=config.mamba_n_heads,
        ssm__inner_size=config.mamba_n_heads * config.mamba_d_head,
        **_SCALE_KEYS,
    )


@pytest.mark.parametrize("family", ["granitemoe", "granitemoeshared"])
def test_granite_with_experts(family: str, tmp_path: Path) -> None:
    model = tiny_family(family, **_SCALES)
    config, shared = model.config, getattr(model.config, "shared_intermediate_size", None)
    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.GRANITE_MOE,
        _mamba(config, 1),
        expert_count=config.num_local_experts,
        expert_used_count=config.num_experts_per_tok,
        **_SCALE_KEYS,
        **({} if shared is None else {"expert_shared_feed_forward_length": shared}),
    )


@pytest.mark.parametrize("experts", [False, True])
def test_nemotron_h(experts: bool, tmp_path: Path) -> None:
    kinds = ["mamba", "attention", "moe" if experts else "mlp"]
    model = tiny_family(
        "nemotron_h", layers_block_type=kinds, num_hidden_layers=3, moe_shared_expert_intermediate_size=24
    )
    config = model.config
    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.NEMOTRON_H_MOE if experts else MODEL_ARCH.NEMOTRON_H,
        _mamba(config, config.n_groups),
        attention__head_count_kv=[0, config.num_key_value_heads, 0],
        feed_forward_length=[0, 0, config.moe_intermediate_size if experts else config.intermediate_size],
        ssm__conv_kernel=config.conv_kernel,
        ssm__state_size=config.ssm_state_size,
        ssm__group_count=config.n_groups,
        ssm__time_step_rank=config.mamba_num_heads,
        ssm__inner_size=config.mamba_num_heads * config.mamba_head_dim,
        **({"expert_shared_feed_forward_length": 24} | _routed(config) if experts else {}),
    )


@pytest.mark.parametrize("family", ["ministral3", "mistral"])
def test_mistral(family: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
    yarn |= {"beta_fast": 24.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    new = family == "ministral3"
    model = tiny_family(
        family, max_position_embeddings=256, sliding_window=None, **({"rope_parameters": yarn} if new else {})
    )
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 16.0,
        "rope__scaling__original_context_length": 16,
        "rope__scaling__yarn_beta_fast": 24.0,
        "rope__scaling__yarn_beta_slow": 2.0,
        "rope__scaling__yarn_log_multiplier": 1.0,
        "attention__temperature_scale": 0.1,
    }
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.MISTRAL3, _mamba(model.config, 1), **(scaling if new else {}))


@pytest.mark.parametrize(("experts", "shared"), [(True, 0), (False, 0), (False, 3)])
def test_gemma4(experts: bool, shared: int, tmp_path: Path) -> None:
    """As 26B-A4B (experts, and keys that are values in layers without a window), as a dense model with inputs of
    layers, and as E2B, whose last layers read keys and values of others and are twice as wide."""
    given = {"enable_moe_block": True, "top_k_experts": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    alone = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    alone["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_family(
        "gemma4_text",
        final_logit_softcapping=5.0,
        global_head_dim=16,
        **({} if shared else alone),
        **({"hidden_size_per_layer_input": 0} | given if experts else {"vocab_size_per_layer_input": 128}),
    )

    def change(name: str, tensor: Tensor) -> Stored:
        block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
        if name.endswith("experts.gate_up_proj"):
            return {f"{block}.ffn_gate_up_exps.weight": tensor}
        own = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"}
        own |= {"per_expert_scale": "ffn_down_exps.scale", "router.proj.weight": "ffn_gate_inp.weight"}
        found = next((theirs for end, theirs in own.items() if name.endswith(end)), None)
        return _experts(name, tensor) if found is None else {f"{block}.{found}": tensor}

    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.GEMMA4,
        change,
        tensors={"rope_freqs.weight": [1.0, 1.0, *[1e30] * 6]},
        attention__head_count_kv=[2, 1 if experts else 2] * (3 if shared else 1),
        attention__key_length=16,
        attention__key_length_swa=8,
        attention__shared_kv_layers=shared,
        feed_forward_length=[48] * 3 + [96] * 3 if shared else 48,
        attention__sliding_window=5,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in model.config.layer_types],
        embedding_length_per_layer_input=0 if experts else 8,
        rope__freq_base_swa=1e4,
        final_logit_softcapping=5.0,
        **({"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16} if experts else {}),
    )


def _plus_one(name: str, tensor: Tensor) -> Stored:
    """Gemma's norms."""
    parts, ends = name.split("."), {"input_layernorm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    ends |= {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    ends |= {"pre_feedforward_layernorm": "ffn_norm"}
    if not name.endswith("norm.weight"):
        return {}
    return {f"blk.{parts[2]}.{ends[parts[-2]]}.weight" if "layers" in name else "output_norm.weight": tensor + 1}


def _first_gemma(name: str, tensor: Tensor) -> Stored:
    return {key.replace("post_attention_norm", "ffn_norm"): one for key, one in _plus_one(name, tensor).items()}


def _transposed(name: str, tensor: Tensor) -> Stored:
    own = {"c_attn": "attn_qkv", "attn.c_proj": "attn_output", "c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    found = next((theirs for end, theirs in own.items() if name.endswith(f"{end}.weight")), None)
    return {} if found is None else {f"blk.{name.split('.')[2]}.{found}.weight": tensor.T}


EXPERTS: dict[str, object] = {"expert_count": 4, "expert_used_count": 2}
ROUTED_BY_SIGMOID = {"rope__dimension_count": 8, "expert_gating_func": 2}
LAYER_NORM: dict[str, object] = {"attention__layer_norm_epsilon": 1e-5}
WIDE = EXPERTS | {"expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 16}


@pytest.mark.parametrize(
    ("family", "architecture", "change", "own", "metadata"),
    [
        ("qwen2", MODEL_ARCH.QWEN2, _experts, {}, {}),
        ("qwen2_moe", MODEL_ARCH.QWEN2MOE, _experts, {}, WIDE),
        ("qwen3", MODEL_ARCH.QWEN3, _experts, {}, {}),
        ("qwen3_moe", MODEL_ARCH.QWEN3MOE, _experts, {"norm_topk_prob": True}, WIDE),
        ("gemma", MODEL_ARCH.GEMMA, _first_gemma, {}, {}),
        ("gemma2", MODEL_ARCH.GEMMA2, _plus_one, {"query_pre_attn_scalar": 8}, {"attention__sliding_window": 5}),
        ("gemma3_text", MODEL_ARCH.GEMMA3, _plus_one, {"query_pre_attn_scalar": 8}, {"attention__sliding_window": 5}),
        ("phi3", MODEL_ARCH.PHI3, _experts, {}, {"attention__sliding_window": 5}),
        ("olmoe", MODEL_ARCH.OLMOE, _experts, {}, EXPERTS),
        ("gpt2", MODEL_ARCH.GPT2, _transposed, {"n_inner": 96}, LAYER_NORM | {"feed_forward_length": 96}),
        ("starcoder2", MODEL_ARCH.STARCODER2, _experts, {"sliding_window": None}, LAYER_NORM),
        ("minimax_m2", MODEL_ARCH.MINIMAXM2, _experts, {}, EXPERTS | ROUTED_BY_SIGMOID),
    ],
)
def test_families_of_few_rules(
    family: str,
    architecture: MODEL_ARCH,
    change: Change,
    own: dict[str, object],
    metadata: dict[str, object],
    tmp_path: Path,
) -> None:
    _check(tmp_path / "m.gguf", tiny_family(family, **own), architecture, change, **metadata)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_llama(family: str, tmp_path: Path) -> None:
    model = tiny_family(family, sliding_window=None) if family == "mixtral" else tiny_family(family)
    experts = EXPERTS if family == "mixtral" else {}
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.LLAMA, _mamba(model.config, 1), **experts)


@pytest.mark.parametrize("name", ["gemma3n", "falcon"])
def test_what_is_refused_says_why(name: str, tmp_path: Path) -> None:
    model = tiny_family("llama", hidden_size=64)
    write_llama(tmp_path / "m.gguf", model, GGMLQuantizationType.F32, architecture=name)
    with pytest.raises(UnsupportedBase, match=f"'{name}' is not read from GGUF: .* not "):
        load_base(str(tmp_path / "m.gguf"), device="cpu", dtype="auto")


def test_lfm2_with_experts(tmp_path: Path) -> None:
    model = tiny_family("lfm2_moe", num_dense_layers=1, layer_types=["full_attention", "conv"])

    def change(name: str, tensor: Tensor) -> Stored:
        return {"blk.1.exp_probs_b.bias": tensor} if name.endswith("expert_bias") else _experts(name, tensor)

    _check(
        tmp_path / "m.gguf",
        model,
        MODEL_ARCH.LFM2MOE,
        change,
        attention__head_count_kv=[2, 0],
        leading_dense_block_count=1,
        shortconv__l_cache=model.config.conv_L_cache,
        **WIDE,
    )
