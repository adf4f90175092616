"""Suggests the right field for an unknown one, from other libraries' names of our fields and from near misses. Pure.

An alias has the same meaning in the same unit. Names whose value must be converted are in `OTHER_UNITS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache

import msgspec

from coserve.core.training.other_names import OTHER_OPTIMIZERS, SAME

ALIASES = {
    **SAME,
    # PEFT and the libraries around it
    "lora_r": "r",
    "rank": "r",
    "lora_rank": "r",
    "nblocks": "bd_blocks",
    "use_bdlora": "bd_blocks",
    "target_modules_bd_a": "targets_bd_a",
    "target_modules_bd_b": "targets_bd_b",
    # trainers
    "num_epochs": "epochs",
    "lr": "learning_rate",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "patience": "early_stopping_patience",
    # OpenAI's fine-tuning
    "n_epochs": "epochs",
    "hyperparameters": "training",
    # generation, as elsewhere
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "num_return_sequences": "n",
    "adapter_id": "adapter",
    "adapter_name": "adapter",
    "lora_request": "adapter",
    "model": "adapter",
    "inputs": "prompt",
    "text": "prompt",
    "dataset": "data",
    "eval_dataset": "validation",
    "validation_data": "validation",
    "validation_file": "validation",
}
_ALIKE = (
    ("adapter", "name", "id", "lora_name", "adapter_name", "model", "target"),
    ("max_tokens", "max_output_tokens", "max_completion_tokens"),
    ("input", "prompt", "messages"),
)
"""Groups of fields of one body or another that mean the same: an adapter, a limit, and what is asked."""
OTHER_UNITS = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        ("batch_rows", "coserve has one batch size for all devices and micro-batches"),
    ),
    "learning_rate_multiplier": ("learning_rate", "coserve takes the rate itself"),
    "max_length": ("max_tokens", "coserve counts new tokens alone"),
    "training_file": ("path", "coserve takes a file under its data_root"),
    "suffix": ("adapter", "coserve takes the whole name"),
}
"""Maps another library's name to our field and the difference in unit."""
_TEXT_ALONE = "coserve reads text alone, no images, audio or video"
OTHER_WAYS = {
    _TEXT_ALONE: "image_url image_embeds video_url input_audio audio_url pixel_values",
    # memory, types and devices
    "layers are recomputed as each job's memory asks for (all of them with the daemon's --recompute)": (
        "gradient_checkpointing* activation_offloading torch_empty_cache_steps"
    ),
    "the base has the daemon's --dtype, and adapters in training are float32": "bf16* fp16* tf32 dtype torch_dtype",
    "the daemon's --quantization (fp8 or nf4) stores the base's layers in 8 or 4 bits, for requests and jobs alike": (
        "load_in_4bit load_in_8bit bnb_4bit_* quantization_config use_qalora qalora_group_size"
    ),
    "micro-batches are cut to the memory there is, and to training.micro_batch_tokens": (
        "per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size"
    ),
    "the daemon's --tp holds the base on several GPUs": (
        "ddp_* fsdp* deepspeed local_rank accelerator_config parallelism_config average_tokens_across_devices"
    ),
    "the daemon's --compile says whether layers are compiled": "torch_compile*",
    "losses and LoRA terms have kernels of coserve's own": "use_liger_* liger_kernel_config use_logits_to_keep",
    # logging, checkpoints, evaluation
    "each step's metrics are in the job's events": (
        "logging_* log_* disable_tqdm include_num_input_tokens_seen include_for_metrics skip_memory_metrics"
    ),
    "the daemon's --tracker sends curves to TensorBoard, Weights & Biases or MLflow": (
        "report_to run_name project trackio_*"
    ),
    "jobs are evaluated every training.eval_steps steps, on the rows that training.validation_split holds back": (
        "eval_strategy evaluation_strategy eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_packing batch_eval_metrics prediction_loss_only do_eval"
    ),
    "checkpoints are written every training.checkpoint_steps steps": (
        "save_strategy save_only_model save_on_each_node save_safetensors enable_jit_checkpoint"
    ),
    "the daemon's --keep-checkpoints says how many checkpoints a job keeps": "save_total_limit",
    "with training.early_stopping_patience the weights of the best evaluation are published": (
        "load_best_model_at_end metric_for_best_model greater_is_better early_stopping_threshold"
    ),
    "jobs resume from their last checkpoint without being asked": (
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    "a job publishes a version of the adapter, and `coserve adapters download` writes its files": (
        "output_dir overwrite_output_dir push_to_hub hub_*"
    ),
    "chat_template_kwargs has the variables of the chat template": "enable_thinking thinking",
    "training.sample_prompts asks for samples": "generate_during_eval predict_with_generate",
    # rows
    "the daemon's --tokenizer-workers is the number of processes that tokenise": (
        "dataloader_num_workers dataset_num_proc preprocessing_num_workers"
    ),
    "rows are packed without padding, and attention keeps them apart": (
        "packing* padding_free pad_to_multiple_of pad_token dataloader_drop_last group_by_length "
        "train_sampling_strategy length_column_name"
    ),
    "training.seed is the seed of the order of rows, too": "data_seed shuffle_dataset full_determinism",
    "training.train_on says which tokens are learned": "completion_only_loss assistant_only_loss",
    "columns says which columns the rows are read from": (
        "dataset_text_field dataset_kwargs remove_unused_columns label_names"
    ),
    "training.max_length is that of prompt and answer together": (
        "max_prompt_length max_completion_length max_target_length truncation_mode"
    ),
    "settings of sampling are fields of the request itself": "sampling_params",
    "the base's own tokenizer is used": "eos_token tokenizer_name*",
    "the daemon's --chat-template gives the base a chat template": "chat_template_path",
    # optimizers and losses
    "the fields of training have all settings of optimizers and schedules": (
        "optim_args optim_target_modules lr_scheduler_kwargs"
    ),
    "training.loss has its settings: type, loss_type, beta, gamma, label_smoothing, sft_weight, "
    "desirable_weight and undesirable_weight": (
        "loss_weights rpo_alpha simpo_gamma cpo_alpha dpo_beta dpo_label_smoothing pref_loss pref_beta pref_ftx "
        "kto_*_weight"
    ),
    "the loss is that of the target tokens, or training.loss": (
        "label_smoothing_factor f_divergence_type f_alpha_divergence_coef use_weighting ld_alpha"
    ),
    "training.loss.reference says what a DPO loss is relative to": (
        "reference_free ref_* *_ref_model precompute_ref_* model_adapter_name"
    ),
    "lora.dropout is 0 unless it is set": "disable_dropout",
    # adapters
    "coserve trains the A and B of modules, and rows of tokens (lora.trainable_token_indices)": (
        "modules_to_save ensure_weight_tying bias lora_bias"
    ),
    "other variants of LoRA are not supported; lora.rslora, use_dora, bd_blocks and training.lora_plus_ratio are": (
        "peft_type velora_config monteclora_config kasa_config arrow_config alora_invocation_tokens layer_replication"
    ),
    "lora.init has the ways to begin": "loftq_config eva_config corda_config lora_ga_config",
    "lora.targets takes whole names of modules, too": "exclude_modules layers_to_transform layers_pattern",
    "the base is the daemon's --model": "base_model_name_or_path model_name_or_path model_init_kwargs",
    "the base is the daemon's --model, NAME@REVISION": "revision",
    "it is not needed here": (
        "task_type auto_mapping peft_version inference_mode fan_in_fan_out megatron_* runtime_config do_train "
        "do_predict use_cpu use_cache debug dataloader_*"
    ),
}
"""Maps what coserve does instead to names that have no field here: settings of transformers' `TrainingArguments`, TRL's
configs and PEFT's `LoraConfig`. `*` matches any ending."""
OPTION_ALIASES = {
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "rank"),
    # vLLM
    "tensor_parallel_size": "tp",
    "enable_expert_parallel": "ep",
    "uvicorn_log_level": "log_level",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "step_tokens",
    "block_size": "page_tokens",
    "fully_sharded_loras": "lora_sharding",
    "scheduling_policy": "fairness",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "tool_call_parser": "tool_parser",
    "enable_prefix_caching": "prefix_cache",
    # text-generation-inference and SGLang
    "max_concurrent_requests": "max_running",
    "max_running_requests": "max_running",
    "tp_size": "tp",
    "mem_fraction_static": "memory_fraction",
    "chunked_prefill_size": "step_tokens",
}
"""Maps other programs' command-line options, which are not fields of a request, to ours."""
NEEDLESS_OPTIONS = {
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_loras_per_batch", "lora_target_modules"),
        "adapters of any number and rank, at any modules, are served without it",
    ),
    **dict.fromkeys(
        ("lora_modules", "lora_paths"),
        "adapters are imported while the daemon runs: coserve adapters import NAME FOLDER",
    ),
    "enforce_eager": "--compile off runs without compiled layers and CUDA graphs",
    **dict.fromkeys(
        ("max_model_len", "context_length"), "a request may use the base's whole context, and takes pages as it grows"
    ),
    "cuda_graph_sizes": "graphs are captured for all sizes up to --max-running and --step-tokens",
    **dict.fromkeys(
        ("max_cpu_loras", "max_loaded_loras"), "--host-adapter-bytes is the host memory for adapters, in bytes"
    ),
    "lora_eviction_policy": "adapters leave memory by uses and size; coserve adapters set NAME --pin keeps one",
    "no_enable_prefix_caching": "it is --no-prefix-cache here",
    "mamba_cache_mode": "the prefix cache keeps snapshots of recurrent states near the end of a prompt",
    "enable_chunked_prefill": "prompts are computed in chunks of at most --step-tokens",
    **dict.fromkeys(
        ("enable_auto_tool_choice", "reasoning_parser"),
        "the base's chat template says how calls and reasoning are parsed; --tool-parser names another way",
    ),
    **dict.fromkeys(("tokenizer", "tokenizer_mode"), "the base's own tokenizer is used"),
    "enable_prompt_tokens_details": "usage has cached_tokens in every answer",
    "seed": "each request has its own seed",
    "download_dir": "HF_HOME says where models of the hub are kept",
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), "requests without room are computed again, and the base stays"),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size"),
        "--tp holds the base on several GPUs; further copies are daemons of their own",
    ),
    **dict.fromkeys(("disable_log_requests", "enable_log_requests"), "texts of requests are never logged"),
    "disable_log_stats": "GET /metrics has the statistics",
    "hf_token": "HF_TOKEN is the token of the hub",
    "distributed_executor_backend": "--tp starts the processes of all GPUs",
    "attention_backend": "attention has kernels of coserve's own",
    "speculative_config": "there is no speculative decoding",
}
"""vLLM's server options without a counterpart, and what to do instead."""
OTHER_VALUES = {
    "optimizer": {
        **{other: f"did you mean {ours!r}?" for other, ours in OTHER_OPTIMIZERS.items()},
        "adam": "did you mean 'adamw'?",
        **dict.fromkeys(("adam8bit", "adamw8bit", "adamw_torch_8bit"), "did you mean 'adamw_8bit'?"),
        "lion8bit": "did you mean 'lion_8bit'?",
    },
    "type": {
        **dict.fromkeys(
            ("image_url", "image", "input_image", "image_embeds", "video_url", "video", "input_audio", "audio_url"),
            _TEXT_ALONE,
        ),
        **dict.fromkeys(("sigmoid", "hinge", "ipo"), "it is a loss_type of the type 'dpo'"),
    },
    "loss_type": {
        **dict.fromkeys(("orpo", "simpo"), "it is a type, not a loss_type of 'dpo'"),
        "sft": "sft_weight adds it",
        **dict.fromkeys(("kto", "apo_zero_unpaired"), "it is one of the type 'kto'"),
        "kto_pair": "the type 'kto' learns from answers that are no pairs",
    },
    "generation_config": {"vllm": "did you mean 'none'?"},
    "load_format": dict.fromkeys(("safetensors", "gguf"), "auto reads safetensors, and a GGUF file given as the model"),
    "quantization": {
        **dict.fromkeys(
            ("awq", "awq_marlin", "compressed-tensors", "fbgemm_fp8", "gguf", "gptq", "gptq_marlin", "mxfp4"),
            "a quantised base is recognised by its files, and dequantised at load, without --quantization",
        ),
        "bitsandbytes": "did you mean 'nf4'?",
    },
    "kv_cache_dtype": {
        **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), "did you mean 'auto'?"),
        "fp8_e4m3": "did you mean 'fp8'?",
    },
    "dtype": {
        "bf16": "did you mean 'bfloat16'?",
        **dict.fromkeys(("fp16", "half"), "did you mean 'float16'?"),
        **dict.fromkeys(("float", "fp32"), "did you mean 'float32'?"),
    },
}
"""For each field: other programs' values (transformers' `optim`, vLLM's options), and what to give instead."""
UNSUPPORTED = frozenset(
    {
        # in messages
        *("annotations", "audio", "function_call", "provider_specific_fields", "reasoning_content"),
        *("refusal", "thinking_blocks"),
        # of OpenAI
        *("access_programs", "context_management", "moderation", "prediction", "web_search_options"),
        # of vLLM
        *("chat_template", "documents", "kv_transfer_params", "logits_processors", "mm_processor_kwargs"),
        *("prompt_embeds", "request_id", "vllm_xargs"),
    }
)
"""Fields of other servers that coserve lacks. They are refused as unsupported, not as misspelt."""

NEAR = 0.75
"""Minimum similarity (`difflib`'s ratio) of a misspelt name."""
VERY_NEAR = 0.9
"""Similarity from which a name is a misspelt setting of ours, though it fits a pattern of `OTHER_WAYS`."""


def hint(name: str, parent: str, known: Iterable[str]) -> str:
    """Return a hint such as `"; did you mean 'alpha'?"` or `"; coserve counts a batch in tokens:
    training.batch_tokens"`, one of `OTHER_WAYS`, or an empty text.

    `known`: dotted paths of all fields of the request. `parent`: path of the object with the unknown field `name`,
    empty for the request itself.
    """
    if way := _other_way(name):
        return way
    paths = list(known)
    here = f"{parent}." if parent else ""
    if name in OTHER_UNITS and not any(path.rpartition(".")[2] == name for path in paths):
        field, difference = OTHER_UNITS[name]
        ours = next((path for path in paths if path.rpartition(".")[2] == field), None)
        if ours is not None:
            return f"; {difference}: {ours}"
    siblings = [path.removeprefix(here) for path in paths if path.startswith(here) and "." not in path[len(here) :]]
    if parent and name in siblings:  # of a struct that has several types
        return "; it belongs to another type"
    others = () if parent else next((group for group in _ALIKE if name in group), ())
    if (ours := next((other for other in others if other in siblings), None)) is not None:
        return f"; did you mean {ours!r}?"
    for wanted in (ALIASES.get(name, name), name):
        if wanted in siblings and wanted != name:
            return f"; did you mean {wanted!r}?"
        elsewhere = [path for path in paths if path.rpartition(".")[2] == wanted and path != here + name]
        if elsewhere:
            return f"; did you mean {elsewhere[0]!r}?"
    return near_miss(name[:80].lower().replace("-", "_"), siblings)


def _other_way(name: str) -> str:
    """Return a hint such as `"; it is not needed here"`, or an empty text."""
    for way, patterns in OTHER_WAYS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return f"; {way}"
    return ""


def value_hint(field: str, value: object) -> str:
    """Return what to give instead of `value`, if it is another library's name of a value of `field`; else an empty
    text."""
    found = OTHER_VALUES.get(field.rpartition(".")[2], {}).get(str(value).lower())
    return "" if found is None else f"; {found}"


def option_hint(option: str, options: Iterable[str], near: float = NEAR) -> str:
    """Return a hint for an unknown command-line option or setting of a file, such as `"; did you mean
    '--learning-rate'?"`, or an empty text. `near`: minimum similarity of a misspelt name."""
    return _setting_hint(
        option.lstrip("-").replace("-", "_"), {text.lstrip("-").replace("-", "_"): text for text in options}, near
    )


def variable_hint(variable: str, settings: Iterable[str]) -> str:
    """Return a hint for an unknown environment variable, such as `"; did you mean 'COSERVE_MAX_RUNNING'?"`, or an empty
    text."""
    return _setting_hint(
        variable.removeprefix("COSERVE_").lower(), {name: f"COSERVE_{name.upper()}" for name in settings}
    )


def _setting_hint(name: str, flags: dict[str, str], least: float = NEAR) -> str:
    """Return the hint for a setting. `flags` maps each setting's name to the way a user gives it."""
    way = _other_way(name)
    if way and not difflib.get_close_matches(name[:80].lower(), list(flags), n=1, cutoff=VERY_NEAR):
        return way
    field, difference = OTHER_UNITS.get(name, ("", ""))
    if field in flags:
        return f"; {difference}: {flags[field]}"
    if "tp" in flags and name in NEEDLESS_OPTIONS:
        return f"; {NEEDLESS_OPTIONS[name]}"
    near = difflib.get_close_matches(name[:80].lower(), list(flags), n=1, cutoff=least)
    for meant in (OPTION_ALIASES.get(name), ALIASES.get(name), *near):
        if meant in flags:
            return f"; did you mean {flags[meant]!r}?"
    return ""


def near_miss(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'pirate'?"` for the most similar name, or an empty text."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def fields_of(type: type) -> tuple[str, ...]:
    """Return dotted paths of a struct's fields, nested structs included; empty for any other type."""
    return _fields_of(type)


@cache  # it takes milliseconds
def _fields_of(type: type) -> tuple[str, ...]:
    return tuple(_walk(msgspec.inspect.type_info(type), ""))


def _walk(info: msgspec.inspect.Type, parent: str) -> Iterator[str]:
    match info:
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield parent + field.encode_name
                yield from _walk(field.type, f"{parent}{field.encode_name}.")
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                yield from _walk(one, parent)
        case _:
            return
