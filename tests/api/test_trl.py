"""TRL's asynchronous GRPO trainer against coserve: it trains on rollouts that run on while it publishes new policies.

All of it is TRL's: the probe of the server, the rollout loop with its requests, the packing, the loss, the optimizer's
steps, and the sync, which saves, loads and unloads adapters. Only its attention is not: it calls a kernel of
FlashAttention 3, which needs a GPU and the hub, so plain PyTorch stands in for that function. The rollout loop runs on
a thread, by TRL's interface for rollout workers, as TRL's own worker asks for an installed vLLM.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import coserve
from tests.support.real_server import serve_real

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL, which takes a second to import"),
]

TINY = Path(coserve.__file__).parent / "assets" / "tiny"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
STEPS, TOKENS = 3, 12


def attention(
    q_THD: torch.Tensor,
    k_KHD: torch.Tensor,
    v_KHD: torch.Tensor,
    q_ends: torch.Tensor,
    k_ends: torch.Tensor,
    *_: object,
    softmax_scale: float,
    **__: object,
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func`: each segment's queries are the last tokens of its keys."""
    found = list[torch.Tensor]()
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        q, k, v = q_THD[q0:q1].transpose(0, 1), k_KHD[k0:k1].transpose(0, 1), v_KHD[k0:k1].transpose(0, 1)
        k, v = (each.repeat_interleave(len(q) // len(each), 0) for each in (k, v))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale))
    return torch.cat([each.transpose(0, 1) for each in found])


class Kept(queue.Queue[Any]):
    """A queue that also keeps all that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.all = list[Any]()

    def put_nowait(self, item: Any) -> None:
        self.all.append(item)
        super().put_nowait(item)


class Rollouts:
    """TRL's rollout loop on a thread, as one of its rollout workers; `published` is called with each new version."""

    def __init__(self, published: Any, **settings: Any) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

        self.rollout_buffer, self.metrics_queue = Kept(), queue.Queue[Any](1000)
        self._version, self._published, self.failed = SimpleNamespace(value=0), published, threading.Event()
        self._loop = _AsyncRolloutLoop(
            rollout_buffer=self.rollout_buffer,
            metrics_queue=self.metrics_queue,
            model_version_value=self._version,
            heartbeat_value=SimpleNamespace(value=time.time()),
            failed_event=self.failed,
            exception_info_queue=queue.Queue(1),
            **settings,
        )
        self._thread = threading.Thread(target=self._loop.run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """As TRL's worker process stops it."""
        own = vars(self._loop)
        own["_loop"].call_soon_threadsafe(own["_stop_event"].set)
        self._thread.join()

    def update_model_version(self, version: int) -> None:
        self._published(version)
        self._version.value = version

    def check_health(self, _: float) -> None:
        assert not self.failed.is_set()


def weights_of(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: own.detach().clone() for name, own in model.named_parameters() if "lora_" in name}


@torch.no_grad()
def scores(model: PeftModel, weights: dict[str, torch.Tensor], sample: Any) -> torch.Tensor:
    """Log-probabilities of the sample's completion under these weights."""
    model.load_state_dict(weights, strict=False)
    ids = torch.from_numpy(sample.input_ids.astype("int64"))
    found = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(sample.completion_mask)[1:] == 1]


async def test_trl_trains_and_every_rollout_is_of_one_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks for a GPU's name
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = qwen3_chat_template  # one whose answers TRL can parse; it sends token ids
    rows = [{"prompt": [{"role": "user", "content": f"Tell me of {what}"}]} for what in ("a cat", "the sea", "rain")]
    data, policies = Dataset.from_list(rows * 1000), dict[int, dict[str, torch.Tensor]]()
    root = tmp_path / "root"
    await asyncio.to_thread(root.mkdir)
    async with serve_real(tmp_path / "data", data_root=root) as api:
        url = api.url
        worker = Rollouts(
            lambda version: policies.update({version: weights_of(trainer.model)}),
            model_name="tiny",
            lora_name="trl-policy",
            dataset=data,
            reward_funcs=[lambda completions, **_: [float(len(str(each))) for each in completions]],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=2,
            max_inflight_tasks=6,
            max_tokens=TOKENS,
            vllm_server_url=url,
        )
        args = AsyncGRPOConfig(
            output_dir=str(root),
            max_steps=STEPS,
            learning_rate=0.02,
            per_device_train_batch_size=8,
            token_budget=0,  # as many samples as that a step
            max_staleness=1,
            vllm_server_base_url=url,
            max_completion_length=TOKENS,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = await asyncio.to_thread(
            AsyncGRPOTrainer,
            str(TINY),
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=LORA,
            rollout_worker=worker,
        )
        await asyncio.to_thread(trainer.train)
        listed = [ref.id for ref in api.folder.adapter_refs()]
    assert listed == [f"trl-policy-v{version}" for version in (STEPS, STEPS + 1)], "stale ones are unloaded"
    assert sorted(policies) == list(range(1, STEPS + 2))
    told = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(told) == STEPS and told[0]["ratio"] == pytest.approx(1.0, abs=1e-3), "both score the first policy alike"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), LORA).eval()
    used = set[int]()
    for sample in worker.rollout_buffer.all:
        said = torch.from_numpy(sample.old_log_probs)[torch.from_numpy(sample.completion_mask) == 1]
        far = {version: float((scores(model, own, sample) - said).abs().max()) for version, own in policies.items()}
        best = min(far, key=far.__getitem__)
        assert far[best] < 2e-3, f"of no policy: {far}"
        assert best >= sample.model_version, "a policy older than the one that the worker knew"
        used.add(best)
    assert len(used) > 1
