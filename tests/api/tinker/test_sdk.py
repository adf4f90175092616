"""Tinker's SDK as it is, against a daemon in processes of its own."""

from __future__ import annotations

import gc
import http.client
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
import torch
from safetensors.numpy import load_file
from tinker import types

from coserve.client import Client
from coserve.core.names import CHECKPOINT_TENSORS
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import in_turns
from tests.support.model_folder import make_model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "0123456789abcdef"
ADAM = types.AdamParams(learning_rate=0.05, beta2=0.95, eps=1e-8)
LIMIT = 64
"""Most tokens of a micro-batch: batches have several."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("tinker")
    environ = {"COSERVE_API_KEY": KEY}
    options = ("--micro-batch-tokens", str(LIMIT), "--max-sessions", "6")
    with DaemonProcess(make_model_folder(folder / "base"), folder / "data", options=options, environ=environ) as found:
        found.wait_ready()
        yield found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # the SDK leaves connections open


@pytest.fixture(scope="module")
def telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture
def service(daemon: DaemonProcess, telemetry: None) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=daemon.url, api_key=f"tml-{KEY}") as found:
        yield found


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return trained(service)


def trained(service: tinker.ServiceClient, rank: int = 4, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="base", rank=rank, seed=seed).result()


def datum(seed: int, length: int, **inputs: np.ndarray) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(5, 90, length + 1)
    given = inputs or {"weights": np.ones(length, np.float32)}
    arrays = {"target_tokens": tokens[1:]} | given
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


BATCH = [datum(0, 12), datum(1, 40), datum(2, 30)]


def log_probs(training: tinker.TrainingClient, data: list[types.Datum] = BATCH) -> np.ndarray:
    found = training.forward(data, "cross_entropy").result()
    return np.concatenate([each["logprobs"].to_numpy() for each in found.loss_fn_outputs])


def steps(training: tinker.TrainingClient, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        computed, stepped = training.forward_backward(BATCH, "cross_entropy"), training.optim_step(ADAM)
        losses.append(computed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    return losses


def test_supervised_steps_learn(training: tinker.TrainingClient) -> None:
    before = log_probs(training)
    losses = steps(training, 6)
    assert losses[0] == pytest.approx(-before.sum(), rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    assert training.get_info().lora_rank == 4


def test_a_saved_state_continues_as_if_nothing_had_been(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    steps(training, 2)
    path = training.save_state("two").result().path
    expected = steps(training, 2)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert steps(resumed, 2) == expected
    training.load_state_with_optimizer(path).result()
    assert steps(training, 2) == expected
    fresh = service.create_training_client_from_state(path).result()
    others = steps(fresh, 2)
    assert others[0] == expected[0] and others[1] != expected[1], "the moments are new"


def test_gradients_of_two_calls_are_those_of_one(service: tinker.ServiceClient) -> None:
    parted, whole = trained(service), trained(service)
    for part in (BATCH[:1], BATCH[1:]):
        parted.forward_backward(part, "cross_entropy").result()
    whole.forward_backward(BATCH, "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (parted, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    np.testing.assert_allclose(log_probs(parted), log_probs(whole), rtol=1e-4)


def test_samplers_are_the_weights_that_train(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    steps(training, 1)
    prompt = types.ModelInput.from_ints(BATCH[1].model_input.to_ints())
    trainer = log_probs(training, BATCH[1:2])[:-1]
    in_memory = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("one").result().path
    for sampler in (in_memory, service.create_sampling_client(model_path=path).result()):
        found = sampler.compute_logprobs(prompt).result()
        np.testing.assert_allclose(found[1:], trainer, atol=2e-5)
    base = service.create_sampling_client(base_model="base").result()
    assert np.abs(np.array(base.compute_logprobs(prompt).result()[1:]) - trainer).max() > 0.01
    found = in_memory.sample(
        prompt, 1, types.SamplingParams(max_tokens=3), topk_prompt_logprobs=2, topk_sample_logprobs=2
    ).result()
    assert [len(row) for row in found.topk_prompt_logprobs[1:]] == [2] * (prompt.length - 1)
    assert [len(row) for row in found.sequences[0].topk_logprobs] == [2] * len(found.sequences[0].tokens)


@pytest.mark.parametrize("loss", in_turns(["importance_sampling", "ppo"], days=2))
def test_an_rl_loop_finds_its_reward(training: tinker.TrainingClient, daemon: DaemonProcess, loss: str) -> None:
    """As the cookbook's `rl_loop`: groups of samples, advantages from their mean; the first step is on the policy. The
    reward: tokens on one side of the embedding."""
    prompt, rewards = types.ModelInput.from_ints([5, 6, 7]), list[float]()
    embedding = load_file(daemon.data.parent / "base" / "model.safetensors")["model.embed_tokens.weight"]
    wanted = embedding @ embedding[9] > 0
    for step in range(8):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=100 * step, stop=[])
        group = sampler.sample(prompt, 48, params).result().sequences
        scores = np.array([wanted[one.tokens].mean() for one in group])
        rewards.append(scores.mean())
        data = []
        for one, advantage in zip(group, scores - scores.mean(), strict=True):
            before, sampled = prompt.length - 1, len(one.tokens)
            data.append(
                types.Datum(
                    model_input=prompt.append(types.EncodedTextChunk(tokens=one.tokens[:-1])),
                    loss_fn_inputs={
                        "target_tokens": types.TensorData.from_torch(torch.tensor([0] * before + one.tokens)),
                        "logprobs": types.TensorData.from_torch(torch.tensor([0.0] * before + one.logprobs)),
                        "advantages": types.TensorData.from_torch(
                            torch.tensor([0.0] * before + [float(advantage)] * sampled)
                        ),
                    },
                )
            )
        computed, stepped = training.forward_backward(data, loss), training.optim_step(ADAM)
        trainer = [each["logprobs"].to_numpy()[prompt.length - 1 :] for each in computed.result().loss_fn_outputs]
        stepped.result()
        off = np.concatenate([np.array(one.logprobs) - own for one, own in zip(group, trainer, strict=True)])
        assert abs(off.mean()) < 1e-5 and 0.5 * (off**2).mean() < 1e-8, "the sampler's KL divergence from the trainer"
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.1, rewards


def test_on_the_policy_a_sequences_ratio_changes_nothing(service: tinker.ServiceClient) -> None:
    """GSPO takes the ratio over the tokens of `sequence_ratio_mask`, as the cookbook's `rl_loop` sends it."""
    plain, gspo = trained(service), trained(service)
    own = log_probs(plain, BATCH[:1]).astype(np.float32)
    given = {"logprobs": own, "advantages": np.linspace(-1, 1, own.size, dtype=np.float32)}
    plain.forward_backward([datum(0, own.size, **given)], "importance_sampling").result()
    masked = datum(0, own.size, **given, sequence_ratio_mask=(np.arange(own.size) > 4).astype(np.float32))
    gspo.forward_backward([masked], "gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}).result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (plain, gspo)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_custom_loss_is_that_of_its_client(service: tinker.ServiceClient) -> None:
    """DPO needs no loss of its own: its derivatives are weights."""
    custom, weighted = trained(service), trained(service)

    def loss(data: list[types.Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((3 * one.sum() for one in found), torch.zeros(())) * -1, {}

    custom.forward_backward_custom(BATCH, loss).result()
    tripled = [datum(seed, length, weights=np.full(length, 3, np.float32)) for seed, length in enumerate((12, 40, 30))]
    weighted.forward_backward(tripled, "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (custom, weighted)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


WRONG: dict[str, tuple[Callable[[tinker.TrainingClient], object], str]] = {
    "a loss": (
        lambda one: one.forward_backward(BATCH, "stable_reinforce"),
        "expected one of cross_entropy, importance_sampling",
    ),
    "a setting": (lambda one: one.forward_backward(BATCH, "cross_entropy", {"beta": 1.0}), "has no beta"),
    "a long row": (lambda one: one.forward([datum(0, LIMIT + 1)], "cross_entropy"), f"expected at most {LIMIT} tokens"),
    "no samples": (lambda one: one.forward(BATCH, "ppo"), "expected logprobs and advantages of each target"),
    "infinite weights": (
        lambda one: one.forward([datum(0, 3, weights=np.full(3, np.inf, np.float32))], "cross_entropy"),
        "got NaN or infinity",
    ),
    "an unknown input": (lambda one: one.forward([datum(0, 3, mask=np.ones(3))], "cross_entropy"), "got 'mask'"),
    "a shape": (
        lambda one: one.forward([datum(0, 3, weights=np.ones(4, np.float32))], "cross_entropy"),
        r"weights of shape \(3,\)",
    ),
    "a path": (lambda one: one.load_state("tinker://x/weights/y"), "no saved state 'y'"),
    "a name": (lambda one: one.save_state("../x"), "expected a name of at most 64"),
    "a sampler's name": (lambda one: one.save_weights_for_sampler("a/x"), "expected a name of at most 64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_ends_its_call_alone(service: tinker.ServiceClient, name: str) -> None:
    training, (call, message) = trained(service), WRONG[name]
    with pytest.raises(tinker.RequestFailedError, match=message):
        call(training).result()
    assert log_probs(training, BATCH[:1]).size == 12


def test_a_step_whose_gradients_are_not_complete_is_not_taken(training: tinker.TrainingClient) -> None:
    before = log_probs(training)
    training.forward_backward(BATCH, "cross_entropy").result()
    wrong, step = training.forward_backward(BATCH, "nothing"), training.optim_step(ADAM)
    for future, message in ((wrong, "loss_fn"), (step, "gradients of that step are dropped")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            future.result()
    np.testing.assert_array_equal(log_probs(training), before)
    steps(training, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "expected 'base', got 'Qwen/Qwen3-8B'"),
        ({"rank": 4096}, "expected 1 to 1024, got 4096"),
        ({"train_attn": False, "train_mlp": False}, "the unembedding alone cannot be trained"),
    ],
)
def test_models_that_cannot_be_are_refused(
    service: tinker.ServiceClient, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message):
        service.create_lora_training_client(**({"base_model": "base"} | changed)).result()


def test_sessions_train_beside_each_other_and_a_job(service: tinker.ServiceClient, daemon: DaemonProcess) -> None:
    alone = steps(trained(service, 4), 3), steps(trained(service, 8), 3)
    rows = [{"text": "the cat sat on the mat"}] * 4
    body = {"adapter": "beside", "data": rows, "training": {"steps": 30}, "lora": {"r": 2}}
    status, job = daemon.call("POST", "/finetune", body)
    assert status in (200, 202), job
    both = [trained(service, 4), trained(service, 8)]
    found = [list[float](), list[float]()]
    for _ in range(3):
        computed = [one.forward_backward(BATCH, "cross_entropy") for one in both]
        for one in both:
            one.optim_step(ADAM)
        for losses, future in zip(found, computed, strict=True):
            losses.append(future.result().metrics["loss:sum"])
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert daemon.call("POST", f"/jobs/{job['id']}/cancel", {})[0] in (200, 202, 404, 409)


def test_states_are_listed_and_deleted(training: tinker.TrainingClient, daemon: DaemonProcess) -> None:
    path = training.save_state("kept").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists: expected another name, or overwrite"):
        training.save_state("kept").result()
    run = path.split("/")[2]
    folder = daemon.data / "sessions" / run.replace(":", ".") / "kept"
    assert (folder / CHECKPOINT_TENSORS).is_file()
    status, found = daemon.call("GET", f"/api/v1/training_runs/{run}/checkpoints")
    assert status == 200
    assert [each["tinker_path"] for each in found["checkpoints"]] == [path]
    connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"))
    connection.request("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/kept", headers={"X-API-Key": KEY})
    assert connection.getresponse().status == 200
    connection.close()
    assert not folder.exists()


def test_weights_for_samplers_are_listed_and_deleted_beside_states(
    service: tinker.ServiceClient, training: tinker.TrainingClient, daemon: DaemonProcess
) -> None:
    steps(training, 1)
    paths = [training.save_weights_for_sampler("first").result().path, training.save_state("kept").result().path]
    paths.append(training.save_weights_for_sampler("last").result().path)
    run, rest = paths[0].split("/")[2], service.create_rest_client()
    found = rest.list_checkpoints(run).result().checkpoints
    assert [each.tinker_path for each in found] == paths
    kinds = [(each.checkpoint_type, each.checkpoint_id) for each in found]
    sampler, state = "sampler_weights", "weights"
    assert kinds == [("sampler", f"{sampler}/first"), ("training", f"{state}/kept"), ("sampler", f"{sampler}/last")]
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    assert [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints] == paths[1:]
    assert daemon.call("GET", f"/adapters/{run.replace(':', '.')}-first")[0] == 404
    assert daemon.call("GET", f"/adapters/{run.replace(':', '.')}-last")[0] == 200


def test_an_engine_that_dies_is_told_with_the_last_state(service: tinker.ServiceClient, daemon: DaemonProcess) -> None:
    training = trained(service)
    expected = steps(training, 1)
    path = training.save_state("before").result().path
    engine = next(
        each for each in psutil.Process(daemon.process.pid).children() if "engine" in " ".join(each.cmdline())
    )
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(tinker.RequestFailedError, match=f"its last saved state is {path}"):
        while True:
            training.forward_backward(BATCH, "cross_entropy").result()
    with Client(daemon.url, api_key=KEY) as client:
        client.wait_ready()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert steps(resumed, 1)[0] < expected[0]


OLDER = """
import sys, numpy as np, tinker
from tinker import types
assert tinker.__version__.startswith("0.25")
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client(base_model="base", rank=4, seed=1)
tokens = np.arange(5, 30)
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(24, np.float32)},
)
losses = []
for _ in range(4):
    found = training.forward_backward([datum], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.05))
    losses.append(-float(np.sum(found.result().loss_fn_outputs[0]["logprobs"].to_numpy())))
    step.result()
assert losses[-1] < 0.9 * losses[0], losses
state = training.save_state("old").result().path
sampler = training.save_weights_and_get_sampling_client(name="old")
params = types.SamplingParams(max_tokens=4, temperature=0.0)
asked = types.ModelInput.from_ints(tokens[:4].tolist())
(answer,) = sampler.sample(prompt=asked, num_samples=1, sampling_params=params).result().sequences
assert len(answer.tokens) == len(answer.logprobs) == 4, answer
again = service.create_training_client_from_state(state)
assert again.forward([datum], "cross_entropy").result().loss_fn_outputs
"""
OLDER_SITE = Path(sys.prefix) / "tinker025"
"""`make test-all` installs the older client there."""


def test_the_older_client_trains_saves_and_samples(daemon: DaemonProcess) -> None:
    if not OLDER_SITE.exists():
        pytest.skip("tinker 0.25 is not installed")
    environ = os.environ | {"PYTHONPATH": str(OLDER_SITE), "TINKER_TELEMETRY": "0"}
    command = (sys.executable, "-c", OLDER, daemon.url, f"tml-{KEY}")
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
