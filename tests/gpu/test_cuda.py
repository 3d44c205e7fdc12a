"""Tests of engine and rollout on a CUDA device: `python -m pytest -m gpu tests/gpu`. See docs/gpu.md.

They need neither Ray nor vLLM: engine and rollout are called directly, and the complete run uses
`trainer.backend=local`. GPU_TESTS_ON=cpu runs the same code on the CPU to check the tests themselves; tests of device
memory are skipped there.
"""

import pickle

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.rollout import Rollout, RolloutSetup, SamplingParams, fingerprint, make_rollout
from tests.support.end_to_end.runs import train as train_ppo
from tests.support.workers.engine_cases import (
    PROMPT,
    RESPONSE,
    WHOLE,
    assert_same_weights,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    plain_outputs,
    policy_loss,
    save_tiny_qwen2,
    train,
    whole_weights,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
POLICY = ("log_probs", "entropy")
NUM_TOKENS = 100.0
EOS, PAD = (5, 9), 0
MB = 1e6
# bfloat16 keeps 8 bits of a number, and logits here go up to 10: two orders of summation differ by 0.07 on the CPU.
ROLLOUT_BOUND = {"float32": 1e-4, "bfloat16": 0.5, "auto": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def varied_model(tmp_path_factory) -> str:
    """A model with large weights: its next token depends on the prompt, and greedy decoding does not repeat itself."""
    return save_tiny_qwen2(tmp_path_factory.mktemp("varied_model"), initializer_range=0.4)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> str:
    """A model with 4 million parameters: megabytes, which exceed what an allocator rounds up."""
    return save_tiny_qwen2(
        tmp_path_factory.mktemp("large_model"), hidden_size=256, intermediate_size=1024, num_hidden_layers=4
    )


@pytest.fixture
def float32(device):
    """Return `float32(path, **settings)`, an engine that computes in float32."""
    return lambda path, **settings: make_engine(path, **{"device": device, "dtype": "float32"} | settings)


def plain_model(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_float32_is_the_plain_model_on_the_cpu(model, float32, packed, record_figure):
    batch, plain = make_batch(), plain_model(model)
    expected = plain_outputs(plain, batch)
    policy_loss(NUM_TOKENS)(expected, batch)[0].backward()
    engine, micro = float32(model, packed=packed), MicroBatching(max_tokens=64)
    found = engine.forward(batch, micro, outputs=POLICY)
    worst = max((found[name] - expected[name]).abs().max().item() for name in POLICY)
    engine.forward_backward(batch, micro, policy_loss(NUM_TOKENS), outputs=POLICY)
    weights = dict(plain.named_parameters())
    worst_gradient = max(
        (gradient.cpu() - weights[name].grad).abs().max().item() for name, gradient in gradients(engine).items()
    )
    kind = "packed" if packed else "padded"
    record_figure(
        f"float32, {kind}: log-probs and entropy against plain Hugging Face, largest difference", f"{worst:.1e}"
    )
    record_figure(f"float32, {kind}: gradients against plain Hugging Face, largest difference", f"{worst_gradient:.1e}")
    assert worst <= 1e-4 and worst_gradient <= 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"packed": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "packed": True},
        {"reshard_after_forward": False},
    ],
    ids="+".join,
)
def test_packing_recomputing_and_sharding_do_not_change_the_gradients(model, float32, settings):
    batch = make_batch()
    plain, other = float32(model), float32(model, **settings)
    plain.forward_backward(batch, WHOLE, policy_loss(NUM_TOKENS), outputs=POLICY)
    other.forward_backward(batch, MicroBatching(max_tokens=64), policy_loss(NUM_TOKENS), outputs=POLICY)
    expected = gradients(plain)
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_bfloat16_trains_float32_parameters(model, device, packed, record_figure):
    batch = make_batch()
    engine = make_engine(model, device=device, dtype="bfloat16", packed=packed)
    dtypes = set()
    engine.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    losses = []
    for _ in range(5):
        stats = engine.forward_backward(
            batch, MicroBatching(max_tokens=64), policy_loss(num_response_tokens(batch)), outputs=POLICY
        )
        losses.append(sum(micro["loss"] for micro in stats))
        assert engine.optimizer_step()["skipped"] == 0.0
    record_figure(
        f"bfloat16, {'packed' if packed else 'padded'}: loss of five steps on one batch",
        " ".join(f"{loss:.4f}" for loss in losses),
    )
    assert losses[-1] < losses[0]
    assert dtypes == {torch.bfloat16}
    assert {tensor.dtype for tensor in whole_weights(engine).values()} == {torch.float32}


def test_recomputing_activations_lowers_the_peak(large_model, float32, allocated_bytes, record_figure):
    batch, peaks = make_batch(2000), []
    for recompute in (False, True):
        engine = float32(large_model, gradient_checkpointing=recompute)
        before = allocated_bytes()
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(batch, WHOLE, policy_loss(NUM_TOKENS), outputs=POLICY)
        peaks.append((torch.cuda.max_memory_allocated() - before) / MB)
        del engine
    record_figure(
        "peak of forward and backward over 2000 rows, activations kept and recomputed",
        f"{peaks[0]:.0f} MB, {peaks[1]:.0f} MB",
    )
    assert peaks[1] < 0.7 * peaks[0]


def test_offloading_frees_parameters_and_optimizer_state(large_model, float32, allocated_bytes, record_figure):
    engine = float32(large_model)
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS, steps=1)
    num_bytes = 4 * sum(tensor.numel() for tensor in whole_weights(engine).values())
    counts = [allocated_bytes()]
    for part in ("optimizer", "params"):
        engine.to("cpu", **{"optimizer": False, "params": False} | {part: True})
        counts.append(allocated_bytes())
    record_figure(
        f"device memory with all, without optimizer state, without parameters ({num_bytes / MB:.1f} MB of parameters)",
        ", ".join(f"{count / MB:.1f}" for count in counts) + " MB",
    )
    assert counts[0] - counts[1] >= 2 * num_bytes  # AdamW has two moments
    assert counts[1] - counts[2] >= num_bytes
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS, steps=1)
    assert allocated_bytes() - counts[2] >= 3 * num_bytes


def test_an_offloaded_engine_takes_the_same_steps(model, float32, deterministic_kernels):
    batch = make_batch()
    resident, offloaded = float32(model), float32(model, param_offload=True, optimizer_offload=True)
    for _ in range(2):
        stats = [train(engine, batch, WHOLE, num_tokens=NUM_TOKENS, steps=1) for engine in (resident, offloaded)]
        assert stats[0] == stats[1]
        offloaded.to("cpu")
    assert_same_weights(whole_weights(offloaded), whole_weights(resident), atol=0.0)


def test_a_loaded_engine_continues_exactly(model, float32, deterministic_kernels, tmp_path):
    batch = make_batch()
    saved, loaded = float32(model), float32(model)
    train(saved, batch, WHOLE, num_tokens=NUM_TOKENS)
    saved.save(str(tmp_path))
    loaded.load(str(tmp_path))
    assert_same_weights(whole_weights(loaded), whole_weights(saved), atol=0.0)
    assert train(loaded, batch, WHOLE, num_tokens=NUM_TOKENS) == train(saved, batch, WHOLE, num_tokens=NUM_TOKENS)
    assert_same_weights(whole_weights(loaded), whole_weights(saved), atol=0.0)


def hf_rollout(path: str, device: str, *, dtype: str = "float32", load_format: str = "auto") -> Rollout:
    config = RolloutConfig(name="hf", dtype=dtype)
    return make_rollout(
        "hf", RolloutSetup(path, config, EOS, PAD, PROMPT, RESPONSE, device=device, load_format=load_format)
    )


def prompts(num_rows: int = 12) -> DataProto:
    """Return the prompts of a batch of prompts and responses."""
    columns = make_batch(num_rows).batch
    mask = columns["attention_mask"][:, :PROMPT]
    ids = columns["input_ids"][:, :PROMPT]
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )


def test_greedy_tokens_are_those_of_generate(varied_model, device):
    batch = prompts()
    found = hf_rollout(varied_model, device).generate(batch, SamplingParams(RESPONSE, do_sample=False)).batch
    plain = plain_model(varied_model).to(device)
    for row in range(len(batch)):
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()][None].to(device)
        settings = {"do_sample": False, "max_new_tokens": RESPONSE, "eos_token_id": list(EOS), "pad_token_id": PAD}
        expected = plain.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
        assert found["responses"][row][found["response_mask"][row].bool()].tolist() == expected.tolist()
    assert len(set(map(tuple, found["responses"].tolist()))) > len(batch) // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pushed_weights_are_loaded_and_agree_with_the_engine(varied_model, device, float32, dtype, record_figure):
    engine, rollout = (
        float32(varied_model, dtype=dtype),
        hf_rollout(varied_model, device, dtype=dtype, load_format="dummy"),
    )
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts(), SamplingParams(RESPONSE))
    train(engine, make_batch(), WHOLE, num_tokens=NUM_TOKENS)
    rollout.load_weights(3, engine.weights())
    assert rollout.health().version == 3
    assert rollout.health().fingerprint == fingerprint(whole_weights(engine).items(), getattr(torch, dtype))
    samples = rollout.generate(prompts(), SamplingParams(RESPONSE, n=4))
    log_probs = engine.forward(samples, WHOLE, outputs=("log_probs",))["log_probs"]
    worst = ((log_probs - samples.batch["rollout_log_probs"]) * samples.batch["response_mask"]).abs().max().item()
    record_figure(f"{dtype}: log-probs of the rollout against the engine's, largest difference", f"{worst:.1e}")
    assert worst < ROLLOUT_BOUND[dtype]


def test_health_detects_damage_on_the_device(varied_model, device):
    rollout = hf_rollout(varied_model, device)
    with torch.no_grad():
        rollout._model.model.layers[1].mlp.down_proj.weight[3, 4] += 1e-3
    assert rollout.health().version is None


def test_a_sleeping_rollout_releases_its_memory_and_generates_the_same_afterwards(
    large_model, device, allocated_bytes, record_figure
):
    rollout = hf_rollout(large_model, device)
    before = rollout.generate(prompts(), SamplingParams(RESPONSE)).batch["responses"]
    num_bytes = sum(tensor.nbytes for tensor in rollout._model.parameters())
    counts = [allocated_bytes()]
    rollout.sleep()
    counts.append(allocated_bytes())
    record_figure(
        f"device memory with a rollout awake and asleep ({num_bytes / MB:.1f} MB of weights)",
        f"{counts[0] / MB:.1f}, {counts[1] / MB:.1f} MB",
    )
    assert counts[0] - counts[1] >= num_bytes
    assert not rollout.health().awake
    rollout.wake_up()
    assert torch.equal(rollout.generate(prompts(), SamplingParams(RESPONSE)).batch["responses"], before)


def test_a_batch_on_the_device_is_unpickled_on_the_cpu(device):
    batch = make_batch().to(device)
    batch.batch["half"] = batch.batch["advantages"].bfloat16()
    arrived = pickle.loads(pickle.dumps(batch, protocol=5))
    assert {tensor.device.type for tensor in batch.batch.values()} == {torch.device(device).type}
    assert {tensor.device.type for tensor in arrived.batch.values()} == {"cpu"}
    assert arrived.batch.keys() == batch.batch.keys()
    assert all(torch.equal(arrived.batch[name], batch.batch[name].cpu()) for name in batch.batch.keys())


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_complete_run_in_one_process(tmp_path, tiny_qwen2, device, dtype, record_figure):
    """The run with dtype=auto (bfloat16 on CUDA) also packs, recomputes and offloads."""
    memory_settings = {
        "actor_rollout_ref__model__use_remove_padding": True,
        "actor_rollout_ref__model__enable_gradient_checkpointing": True,
        "actor_rollout_ref__actor__fsdp_config__param_offload": True,
        "actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
    }
    rows = train_ppo(
        tmp_path,
        tiny_qwen2,
        trainer__device=device,
        actor_rollout_ref__actor__fsdp_config__dtype=dtype,
        actor_rollout_ref__rollout__dtype=dtype,
        **memory_settings if dtype == "auto" else {},
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    worst = max(row["training/rollout_log_probs_diff_max"] for row in rows[1:])
    seconds = rows[2]["timing_s/step"]
    record_figure(
        f"two GRPO steps with trainer.backend=local, {dtype}: rollout against trainer, second step",
        f"{worst:.1e}, {seconds:.2f} s",
    )
    assert worst < ROLLOUT_BOUND[dtype]
