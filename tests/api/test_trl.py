"""TRL's asynchronous GRPO against coserve: its rollouts run on while its own code publishes new policies.

TRL's trainer step needs FlashAttention 3, so a random step stands in for it. The rest is TRL's: the probe of the
server, the rollout loop with its requests, and the sync, which saves, loads and unloads adapters.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import coserve
from tests.support.real_server import serve_real

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TINY = Path(coserve.__file__).parent / "assets" / "tiny"
SYNCS, SAMPLES, TOKENS = 3, 12, 12


@asynccontextmanager
async def rollouts(url: str, policy: SimpleNamespace) -> AsyncIterator[queue.Queue[Any]]:
    """TRL's rollout loop on a thread; yields the queue of its scored samples."""
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    tokenizer, found = AutoTokenizer.from_pretrained(TINY), queue.Queue[Any]()
    tokenizer.chat_template = qwen3_chat_template  # one whose answers TRL can parse; it sends token ids
    failed = threading.Event()
    rows = [{"prompt": [{"role": "user", "content": f"Tell me of {what}"}]} for what in ("a cat", "the sea", "rain")]
    loop = _AsyncRolloutLoop(
        model_name="tiny",
        lora_name="trl-policy",
        dataset=Dataset.from_list(rows * 1000),
        reward_funcs=[lambda completions, **_: [float(len(str(each))) for each in completions]],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=found,
        model_version_value=policy,
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=failed,
        exception_info_queue=queue.Queue(1),
        metrics_queue=queue.Queue(1000),
        num_generations=2,
        max_inflight_tasks=6,
        max_tokens=TOKENS,
        vllm_server_url=url,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield found
    finally:
        own = vars(loop)  # as its worker process stops it
        own["_loop"].call_soon_threadsafe(own["_stop_event"].set)
        await asyncio.to_thread(thread.join)
    assert not failed.is_set()


def randomized(model: PeftModel, seed: int) -> dict[str, torch.Tensor]:
    """What an optimizer step does: other weights. Returns them."""
    chance, state = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=chance) * 0.2)
                state[name] = weight.clone()
    return state


@torch.no_grad()
def scores(model: PeftModel, weights: dict[str, torch.Tensor], sample: Any) -> torch.Tensor:
    """Log-probabilities of the sample's completion under these weights."""
    model.load_state_dict(weights, strict=False)
    ids = torch.from_numpy(sample.input_ids.astype("int64"))
    found = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(sample.completion_mask)[1:] == 1]


async def test_every_rollout_is_of_one_policy_while_others_are_published(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, select_adapter_sync
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    accelerator = Accelerator(cpu=True)  # TRL's loggers ask for one
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    model.eval()
    policy, policies, samples = SimpleNamespace(value=0), list[dict[str, torch.Tensor]](), list[Any]()
    root = tmp_path / "root"
    await asyncio.to_thread(root.mkdir)
    async with serve_real(tmp_path / "data", data_root=root) as api:
        client = VLLMClient(f"http://127.0.0.1:{api.port}")
        args = SimpleNamespace(max_staleness=1)
        await asyncio.to_thread(client.wait_for_server_ready)
        assert await asyncio.to_thread(client.get_max_model_len) > TOKENS
        assert select_adapter_sync(await asyncio.to_thread(client.get_server_info), model, args)
        trainer = SimpleNamespace(
            model_version=0,
            _lora_dir=str(root / "lora"),
            _lora_name="trl-policy",
            _adapter_name="default",
            accelerator=accelerator,
            model=model,
            vllm_client=client,
            args=args,
            rollout_worker=SimpleNamespace(update_model_version=lambda version: setattr(policy, "value", version)),
        )

        async def publish() -> None:
            policies.append(randomized(model, len(policies)))
            await asyncio.to_thread(AsyncGRPOTrainer._sync_weight_lora, trainer, time.time())

        await publish()
        async with rollouts(client.server_url, policy) as found:
            for _ in range(SYNCS):
                samples += [await asyncio.to_thread(found.get, timeout=120) for _ in range(SAMPLES)]
                await publish()
            samples += [await asyncio.to_thread(found.get, timeout=120) for _ in range(SAMPLES)]
        listed = [ref.id for ref in api.folder.adapter_refs()]
    assert listed == [f"trl-policy-v{version}" for version in (SYNCS, SYNCS + 1)], "stale ones are unloaded"
    used = set[int]()
    for sample in samples:
        told = torch.from_numpy(sample.old_log_probs)[torch.from_numpy(sample.completion_mask) == 1]
        far = [float((scores(model, weights, sample) - told).abs().max()) for weights in policies]
        best = far.index(min(far))
        assert far[best] < 2e-3, f"of no policy: {far}"
        assert best + 1 >= sample.model_version, "a policy older than the one that the worker knew"
        used.add(best)
    assert len(used) > 1
