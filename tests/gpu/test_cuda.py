"""What only a CUDA device can show: `python -m pytest -m gpu tests/gpu`. docs/gpu.md says how, and holds the figures.

Needs neither Ray nor vLLM: the engine and the rollout are called directly, the whole run goes through `trainer.backend=local`.
GPU_TESTS_ON=cpu runs the same code on the CPU, to see that the tests themselves are right.
"""

import os
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config.workers import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from tests.end_to_end.runs import train as train_ppo
from tests.workers.engine_cases import PROMPT, RESPONSE, WHOLE, make_batch, make_engine, save_tiny_qwen2, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
NUM_TOKENS = 100.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _exact_matmul():
    torch.backends.cuda.matmul.allow_tf32 = False


def plain_log_probs(path: str, batch: DataProto) -> torch.Tensor:
    """Log-probs (B, R) of the response tokens from a plain float32 forward pass on the CPU, 0 off the mask."""
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    log_probs = logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
    return log_probs * batch.batch["response_mask"]


@pytest.mark.parametrize("packed", [False, True])
def test_float32_log_probs_equal_a_plain_forward_pass(model, packed):
    batch = make_batch()
    engine = make_engine(model, device=DEVICE, dtype="float32", packed=packed)
    out = engine.forward(batch, MicroBatching(max_tokens=64), outputs=("log_probs",))["log_probs"]
    assert out.device.type == "cpu"
    assert (out - plain_log_probs(model, batch)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"packed": True},
        {"gradient_checkpointing": True},
        {"reshard_after_forward": False},
        {"param_offload": True, "optimizer_offload": True},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_how_it_is_computed_does_not_change_the_step(model, settings):
    batch = make_batch()
    plain, other = (make_engine(model, device=DEVICE, dtype="float32", **s) for s in ({}, settings))
    for engine, micro in ((plain, WHOLE), (other, MicroBatching(max_tokens=64))):
        train(engine, batch, micro, num_tokens=NUM_TOKENS)
    for (name, left), (_, right) in zip(plain.weights(), other.weights(), strict=True):
        if "k_proj.bias" not in name:
            assert (left - right).abs().max() < 1e-5, name


def test_bfloat16_trains_with_float32_parameters(model):
    engine = make_engine(model, device=DEVICE, dtype="bfloat16")
    said = train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS, steps=3)
    assert all(step["skipped"] == 0.0 and step["grad_norm"] > 0 for step in said)
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has no second memory to move things to")
def test_offload_frees_device_memory(model):
    engine = make_engine(model, device=DEVICE, dtype="float32")
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS)
    held = torch.cuda.memory_allocated()
    engine.to("cpu")
    assert torch.cuda.memory_allocated() < 0.2 * held
    engine.to(DEVICE)
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS)


def test_a_saved_engine_goes_on_exactly(model, tmp_path):
    batch = make_batch()
    first, second = (make_engine(model, device=DEVICE, dtype="float32") for _ in range(2))
    train(first, batch, WHOLE, num_tokens=NUM_TOKENS)
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    for engine in (first, second):
        train(engine, batch, WHOLE, num_tokens=NUM_TOKENS)
    for (name, left), (_, right) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(left, right), name


def test_the_rollout_holds_what_was_pushed_and_agrees_with_the_engine(model):
    config = RolloutConfig(name="hf", dtype="float32")
    setup = RolloutSetup(model, config, (1,), 0, PROMPT, RESPONSE, device=DEVICE, load_format="dummy")
    rollout, engine = make_rollout("hf", setup), make_engine(model, device=DEVICE, dtype="float32")
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS)
    rollout.load_weights(1, engine.weights())
    assert rollout.health().version == 1
    samples = rollout.generate(first_columns(make_batch()), SamplingParams(max_new_tokens=RESPONSE, n=2))
    out = engine.forward(samples, WHOLE, outputs=("log_probs",))["log_probs"]
    assert (out - samples.batch["rollout_log_probs"]).abs().max() < 1e-4


def first_columns(batch: DataProto) -> DataProto:
    """The prompts of a batch of prompts and responses."""
    mask = batch.batch["attention_mask"][:, :PROMPT]
    tensors = {
        "input_ids": batch.batch["input_ids"][:, :PROMPT],
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
    return DataProto.from_dict(tensors=tensors)


def test_a_batch_on_the_device_arrives_on_the_cpu():
    batch = DataProto.from_dict(tensors={"x": torch.arange(4, device=DEVICE, dtype=torch.bfloat16)})
    arrived = pickle.loads(pickle.dumps(batch, protocol=5))
    assert arrived.batch["x"].device.type == "cpu" and arrived.batch["x"].tolist() == [0, 1, 2, 3]


def test_a_whole_run_in_one_process(tmp_path, tiny_qwen2):
    rows = train_ppo(
        tmp_path, tiny_qwen2, trainer__device=DEVICE, actor_rollout_ref__actor__fsdp_config__dtype="float32",
        actor_rollout_ref__rollout__dtype="float32",
    )  # fmt: skip
    assert rows[2]["actor/grad_norm"] > 0
    assert max(row["training/rollout_log_probs_diff_max"] for row in rows[1:]) < 1e-4
