"""The daemon's settings, declared once: CLI options, environment variables and the file's keys are derived from here.

Precedence: command line, then `COSERVE_<NAME>`, then the TOML file of `--config`, then the default below.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.core.access.settings import check_host, check_origin, check_secret
from coserve.core.errors import ConfigError
from coserve.core.logs import LogSettings
from coserve.core.options import Bounds, check_options, find_settings, grouped, option
from coserve.core.processes import usable_cores
from coserve.queues.policies.choice import POLICIES, policy_class
from coserve.queues.policy import NamedPolicy

SECTIONS = {
    "model": "Model, data and network",
    "device": "Device and precision",
    "policy": "Schedule and latency targets",
    "kv_tokens": "Memory and steps",
    "max_queue": "Queues and jobs",
    "tracker": "Tracking",
    "data_root": "Requests and files",
    "log_level": "Logging",
    "config": "Settings file",
}
"""Maps the first setting of each section to the section's title, in the order of the settings below."""

GPU_TARGETS = 1.0, 0.05
CPU_TARGETS = 2.0, 0.2
"""Default TTFT and TPOT targets of interactive requests in seconds: on a GPU, and on a CPU."""
MAX_TOKENIZER_WORKERS = 4
"""Default limit of the number of tokenizer processes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `coserve serve`. Times in seconds unless the name says otherwise; sizes in bytes or tokens."""

    model: str = option(
        "bundled", "base model: a folder, a GGUF file, a hub name (NAME or NAME@REVISION), 'bundled' or 'smollm2'"
    )
    served_model_name: str | None = option(
        None, "name of the base in requests and answers; default: its hub name, or that of its folder or file"
    )
    data_dir: Path = option(Path("coserve-data"), "folder of the registry, the adapters and the checkpoints")
    host: str = option("127.0.0.1", "address to bind; anything but loopback needs --api-key")
    port: int = option(8000, "TCP port; 0 takes a free one", bounds=Bounds(0, 65535))
    api_key: str | None = option(
        None,
        "require 'Authorization: Bearer KEY' on every route but /health, /health/ready and /ping; at least 16 "
        "characters",
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "further names of this daemon, allowed in the Host header, and in Origin with any scheme and port"
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "web pages that may call the API from a browser (CORS), such as 'https://app.example'; '*': all, which needs "
        "--api-key",
    )
    tls_cert: Path | None = option(None, "PEM file with the certificate and its chain: serve HTTPS; needs --tls-key")
    tls_key: Path | None = option(None, "PEM file with the certificate's private key, without a passphrase")
    drain_seconds: float = option(
        30.0, "seconds after the first SIGTERM in which requests in flight may finish; new ones get 503. SIGINT: none"
    )

    device: str = option("auto", "where the base lives", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "type of the base", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = option(
        "none",
        "store the linear modules of the base's layers in 8 or 4 bits, for requests and jobs, quantised as they are "
        "loaded: FP8 (fp8), faster on a GPU with FP8 tensor cores, or QLoRA's NF4 (nf4), smallest",
        choices=("none", "fp8", "nf4"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of cached keys and values: the base's (auto), or FP8 (e4m3, without scales), which holds twice as many",
        choices=("auto", "fp8"),
    )
    mla_cache: str = option(
        "latents",
        "what is cached of multi-head latent attention (DeepSeek, Kimi K2, GLM-4.7-Flash, Mistral 4): latents, or the "
        "keys and values of all heads, which take many times the memory; cartridges need heads",
        choices=("latents", "heads"),
    )
    tp: int = option(
        1,
        "GPUs that share the base, each with a part of every layer (tensor parallelism): 1, 2, 4 or 8; on CPU, "
        "processes",
    )
    ep: int = option(1, "GPUs that share out the experts of a mixture: 1 (each has a part of every expert), or --tp")
    lora_server: int = option(
        0,
        "processes on the last GPUs, or on CPU, that compute adapters of experts, each for a share of the layers, or "
        "of the experts (lora_server_ep)",
        bounds=Bounds(0),
    )
    lora_server_ep: int = option(
        1,
        "LoRA servers that share out the experts of each layer (`coserve plan` says how many); groups of so many share "
        "out the layers",
        bounds=Bounds(1),
    )
    lora_server_at: Path | None = option(
        None,
        "folder of LoRA servers that `coserve lora-server` runs and several daemons use; default: processes of its own",
    )
    lora_server_timeout: float = option(
        30.0,
        "seconds that a LoRA server may take for one layer of a step; then it counts as lost",
        bounds=Bounds(1, 3600),
    )
    lora_sharding: str = option(
        "nfs",
        "with --tp above 1, how the GPUs hold LoRA matrices: one of each pair whole on every GPU (nfs), or both "
        "sharded, which needs more messages and less memory (slora); BD-LoRA matrices are sharded by their blocks",
        choices=("nfs", "slora"),
    )
    threads: int | None = option(None, "CPU threads of the engine; default: one or two, whichever decodes faster")
    engine_timeout: float = option(
        600.0,
        "seconds without a sign of an engine that has work, after which it is ended and started again (one whose "
        "process is stopped: after 6 s); longer than any step or slice of the base; 0: never",
    )
    lora_backend: str = option(
        "auto",
        "how LoRA terms are computed",
        choices=("auto", "reference", "naive", "grouped", "block_sparse", "segmented"),
    )
    compile: str = option(
        "on",
        "on a GPU, whether the base's layers are compiled and CUDA graphs captured, before the first request",
        choices=("on", "off"),
    )
    cache_dir: Path | None = option(
        None, "folder of compiled kernels, which later starts load; default: 'cache' in the data folder"
    )
    trust_remote_code: bool = option(
        False,
        "run Python code that comes with the model's files: of its tokenizer, and of its model if transformers has no "
        "such class",
    )
    chat_template: Path | None = option(
        None, "file of a Jinja chat template, for a base without one or in place of its own; default: the base's"
    )
    generation_config: str = option(
        "auto",
        "defaults of sampling that requests leave out: those of the base's generation_config.json (auto), or none",
        choices=("auto", "none"),
    )
    load_format: str = option(
        "auto",
        "weights of the base: from its files (auto), or random ones made on the device, for benchmarks (dummy)",
        choices=("auto", "dummy"),
    )

    policy: str = option(
        "auto",
        "who runs next: training where the deadlines of requests leave time (slack), or only while no request can be "
        "served (inference-first); both at the same time, each on its own part of the GPU (spatial), or on all of it, "
        "with steps paced by the deadlines (overlap); the ETS paper's Enhanced Temporal Sharing (ets) and Temporal "
        "Sharing (ts). auto: overlap on one GPU, slack on several and without one",
        choices=("auto", *POLICIES),
    )
    inference_batch_size: int = option(
        64, "ETS and TS(n): a batch of requests, dispatched when so many wait; at most max_running"
    )
    inference_delay: float = option(
        5.0, "ETS and TS(n): dispatch when the first request has waited so long, in seconds"
    )
    ts_n: int = option(10, "TS(n): inference batches per turn of fine-tuning")
    ts_unit: str = option(
        "request",
        "TS(n): a turn of fine-tuning: a job until it ends (request), which is how the paper is read here, or one "
        "batch of it (batch)",
        choices=("request", "batch"),
    )
    slo_ttft: float | None = option(
        None, "time to first token that 'slack' and 'overlap' keep, in seconds; default: 1 on a GPU, 2 on CPU"
    )
    slo_tpot: float | None = option(
        None, "time per output token that 'slack' and 'overlap' keep, in seconds; default: 0.05 on a GPU, 0.2 on CPU"
    )
    slo_batch_ttft: float = option(60.0, "the same for requests of the class batch: time to first token, in seconds")
    slo_batch_tpot: float = option(0.5, "the same for requests of the class batch: time per output token, in seconds")
    slo_attainment: float = option(
        0.995,
        "'slack' and 'overlap': share of answers whose mean time per token is to be kept, above 0 and at most 0.9999; "
        "more means fewer late tokens and less training. A single step may be slower than planned eight times as "
        "often: the next ones take it back",
        bounds=Bounds(0, 0.9999, open=(True, False)),
    )
    shed: str = option(
        "explicit",
        "which requests get 429 as soon as it is predicted that they cannot keep their targets though training waits "
        "('spatial': at the speed they have beside training): those that ask for slo_ttft, slo_e2e or the class "
        "interactive (explicit), all, or none (off). A request that finds a place in the batch is never refused, nor "
        "one with several choices once one of them has begun; 'ets' and 'ts' refuse none",
        choices=("explicit", "all", "off"),
    )
    train_weight: float = option(
        1.0,
        "'slack' and 'overlap': share, from 0 to 1, that training may use of the time that requests' targets leave; "
        "less means faster answers and less training",
        bounds=Bounds(0, 1),
    )
    train_patience: float = option(
        1.0,
        "'slack' and 'overlap': training waits at most so long for its next slice, in seconds; jobs take turns by "
        "whole micro-batches",
    )
    train_floor: float = option(
        0.05,
        "'slack' and 'overlap': share of the time, from 0 to 0.5, that training has at least, though tokens come late "
        "for it; 0: only what train_patience gives",
        bounds=Bounds(0, 0.5),
    )
    overlap_steps: str = option(
        "beside",
        "'overlap': the device computes steps beside training where the targets allow it (beside), or in turns with "
        "slices that were launched ahead (between)",
        choices=("beside", "between"),
    )
    training_sm_share: float = option(
        0.5,
        "'spatial': share, between 0 and 1, of the GPU's multiprocessors that training has, rounded up to what the GPU "
        "allows (multiples of 8 on an H100 or H200); generation has the others",
        bounds=Bounds(0, 1, open=(True, True)),
    )

    kv_tokens: int | None = option(
        None,
        "tokens the page pool holds, which adapters in use share (one that leaves no page is refused); default: what "
        "the memory plan leaves on a GPU, 16384 on CPU",
    )
    memory_fraction: float = option(
        0.9,
        "share of the GPU's memory that the engine may take, if kv_tokens is not set",
        bounds=Bounds(0, 1, open=(True, False)),
    )
    page_tokens: int = option(16, "tokens of one page")
    max_running: int = option(256, "most requests that run at once, in one batch; others wait")
    step_tokens: int | None = option(
        None, "most tokens of one generation step (decodes and prefill chunks); default: 512 on CPU, 2048 on a GPU"
    )
    prefix_cache: bool = option(
        True, "requests of one adapter version that begin alike share KV pages, and snapshots of recurrent states"
    )
    max_queue: int = option(1024, "most requests that wait; more get 429")
    fairness: str = option(
        "auto",
        "whose request is admitted next: adapters in turn (drr) or first come first served (fcfs); auto: fcfs under "
        "the paper's policies, drr under the others",
        choices=("auto", "drr", "fcfs"),
    )
    max_jobs: int = option(256, "most jobs that wait, run or are paused; more get 429")
    max_active_jobs: int = option(
        4, "jobs that train side by side, together in one forward or in turn; the others wait in line"
    )
    max_sessions: int = option(64, "most training sessions of clients that are open at a time; more get 429")
    session_timeout: float = option(
        300.0, "seconds without a sign of its client, after which a training session ends; 0: never"
    )
    host_adapter_bytes: int | None = option(
        None,
        "host memory for adapters, in bytes, of all ranks together; on a GPU it is pinned. Those that are used least "
        "leave first; default: a quarter of the memory that is free at the start",
    )
    pinned_memory_bytes: int | None = option(
        None,
        "host memory for the state of jobs, in bytes: on a GPU pinned copies for checkpoints, and paged moments; on a "
        "CPU all of the state, with such copies; default: half of the memory that the daemon may use",
    )
    micro_batch_tokens: int = option(
        2048,
        "most tokens of one training forward, of one job or of several together",
        bounds=Bounds(2),  # a row has at least a token and the next one to predict
    )
    micro_batch_rows: int | None = option(
        None, "most rows of one training forward; default: as many as micro_batch_tokens holds"
    )
    mix_jobs: bool = option(
        True,
        "rows of several jobs train in one forward, which is faster where each has few; off: one job's at a time, so "
        "that on a GPU, too, a job's result does not depend on other jobs to the last bit",
    )
    recompute: bool = option(False, "training: keep only each layer's input and compute the layer again")
    keep_checkpoints: int = option(2, "checkpoints kept per job")

    tracker: tuple[str, ...] = option(
        (),
        "where the curves of jobs go besides this API, in a process of its own: TensorBoard event files, Weights & "
        "Biases or MLflow, each set up by its own environment variables; may be repeated",
        choices=("tensorboard", "wandb", "mlflow"),
    )
    tracking_dir: Path | None = option(None, "folder of the trackers' files; default: 'tracking' in the data folder")

    data_root: Path | None = option(None, "folder from which /finetune and /adapters may read local paths")
    tool_parser: str = option(
        "auto",
        "form of the tool calls that /v1/chat/completions parses: by the base's chat template (auto), of Qwen and "
        "Hermes (hermes), of Qwen3-Coder and Qwen3.5 (qwen-xml), of GLM-4.5 (glm), of DeepSeek V3 (deepseek), of "
        "gpt-oss, of Llama 3 (llama3), of Mistral, or none",
        choices=("auto", "hermes", "qwen-xml", "glm", "deepseek", "gpt-oss", "llama3", "mistral", "none"),
    )
    tokenizer_workers: int | None = option(
        None,
        "processes that tokenise the corpora of jobs beside serving; default: half as many as there are cores, 4 at "
        "most",
    )
    max_connections: int = option(
        1024,
        "most open connections; idle ones make room for new ones, further ones get 503 (but for /health, "
        "/health/ready and GET of /ping)",
    )
    max_body_bytes: int = option(
        1 << 30, "largest request body, in bytes: of an upload, which goes to disk as it comes"
    )
    read_timeout: float = option(
        30.0,
        "deadline in seconds, 0.1 to 86400: for a request's headers, between parts of its body, and for a reader to "
        "take more of an answer",
        bounds=Bounds(0.1, 86400),  # less would close normal clients' connections; a socket takes at most 24 days
    )

    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "a line of text or a JSON object for each record", choices=("text", "json"))
    access_log: bool = option(False, "log every HTTP answer")
    config: Path | None = option(None, "TOML file with these settings")

    def __post_init__(self) -> None:
        check_options(self)
        if self.tp not in (1, 2, 4, 8):
            raise ConfigError(f"tp: expected 1, 2, 4 or 8, got {self.tp}")
        if self.ep not in (1, self.tp):
            raise ConfigError(f"ep: expected 1, or the number of tp, {self.tp}; got {self.ep}")
        if self.lora_server % self.lora_server_ep:
            wanted = f"a divisor of lora_server, {self.lora_server}"
            raise ConfigError(f"lora_server_ep: expected {wanted}, got {self.lora_server_ep}")
        if self.lora_server_at is not None and not self.lora_server:
            raise ConfigError("lora_server_at: expected lora_server, too: how many of the servers to use")
        if self.lora_server and self.tp > 1:
            raise ConfigError(f"lora_server: expected 0 with tp {self.tp}, got {self.lora_server}")
        if self.trains_concurrently and self.tp > 1:
            raise ConfigError(f"tp: expected 1 with policy {self.policy!r}, which shares one GPU, got {self.tp}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert: expected both tls_cert and tls_key, got one")
        if self.api_key is not None:
            check_secret("api_key", self.api_key)
        check_host("host", self.host)
        for host in self.allowed_hosts:
            check_host("allowed_hosts", host)
        for origin in self.allowed_origins:
            check_origin("allowed_origins", origin)
        if "*" in self.allowed_origins and self.api_key is None:
            raise ConfigError("allowed_origins: '*' lets every web page use the daemon; set api_key")
        if self.host not in ("127.0.0.1", "::1", "localhost") and self.api_key is None:
            raise ConfigError(f"host: {self.host!r} is not loopback; set api_key to serve others")

    def targets(self, *, device: str) -> tuple[float, float]:
        """Return TTFT and TPOT targets, in seconds, of interactive requests that bring none. `device`: that of the
        base."""
        ttft, tpot = CPU_TARGETS if device.startswith("cpu") else GPU_TARGETS
        return (
            ttft if self.slo_ttft is None else self.slo_ttft,
            tpot if self.slo_tpot is None else self.slo_tpot,
        )

    def resolved(self, *, device: str) -> Config:
        """Return the settings with `auto` replaced by a policy. `device`: that of the base."""
        if self.policy != "auto":
            return self
        return dataclasses.replace(self, policy="slack" if device.startswith("cpu") or self.tp > 1 else "overlap")

    @property
    def tokenizer_processes(self) -> int:
        """Return `tokenizer_workers`, or its default."""
        return self.tokenizer_workers or min(MAX_TOKENIZER_WORKERS, max(1, usable_cores() // 2))

    @property
    def logs(self) -> LogSettings:
        """Return the log settings of every process of the daemon."""
        return LogSettings(self.log_level, self.log_format, self.access_log)

    @property
    def policy_class(self) -> type[NamedPolicy]:
        """Return the policy's class; for `auto` that is not resolved yet, `Slack`."""
        return policy_class(self.policy)

    @property
    def batch_requests(self) -> int:
        """Return the maximum number of running requests."""
        most = self.max_running
        return min(most, self.inference_batch_size) if self.policy_class.in_batches else most

    @property
    def trains_concurrently(self) -> bool:
        """Return whether training has its own CUDA stream and overlaps generation."""
        return self.policy_class.stream is not None

    @property
    def fair(self) -> bool:
        """Return whether adapters are scheduled round-robin (deficit round robin)."""
        return self.fairness == "drr" or (self.fairness == "auto" and not self.policy_class.in_batches)


def sections() -> dict[str, list[str]]:
    """Return section titles with their settings' names."""
    return grouped(Config, SECTIONS)


def load_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Config:
    """Load settings from the command line (`given`, only options that were given), environment, file and defaults.

    Raise `ConfigError` for an unknown key or a value of the wrong type.
    """
    settings = {name: value for name, (value, _) in find_settings(Config, given, environ).items()}
    return Config(**settings)  # type: ignore[arg-type]  # names and types were checked above


def setting_sources(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return where `load_config` takes each setting from: command line, name of a variable, file, or default."""
    defaults = {f.name: "default" for f in dataclasses.fields(Config)}
    return defaults | {name: source for name, (_, source) in find_settings(Config, given, environ).items()}


def config_to_json(config: Config) -> bytes:
    """Return the settings for the engine process, without the API key and what needs one."""
    own = dataclasses.replace(config, api_key=None, host="127.0.0.1", allowed_origins=())
    return msgspec.json.encode(own, enc_hook=str)


def config_from_json(content: bytes) -> Config:
    return msgspec.json.decode(content, type=Config, dec_hook=lambda kind, value: kind(value))  # kind: Path
