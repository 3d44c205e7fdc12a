"""Pushes of adapters alone: the rollout merges them as the trainer would, and detects wrong or missing ones."""

from importlib.util import find_spec

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.rollout import HFRollout, RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.weight_transfer import OutgoingWeights
from hybridrl.workers.weight_transfer.disk import DiskReceiver, DiskSender
from tests.support.workers.engine_cases import (
    PROMPT,
    RESPONSE,
    WHOLE,
    make_batch,
    make_engine,
    num_response_tokens,
    save_tiny_qwen2,
    train,
)

pytestmark = pytest.mark.timeout(240)
# vLLM's CPU attention has no heads below 32. Large weights, so that greedy decoding does not repeat one token.
MODEL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
GREEDY = SamplingParams(RESPONSE, n=1, do_sample=False)
ENGINES = [
    "hf",
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm")]),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"), **MODEL)


@pytest.fixture
def actor(path):
    """Return an engine with trained adapters; alpha / rank is not a power of two."""
    engine = make_engine(path, lora=LoRA(4, 12.0))
    train_adapters(engine)
    return engine


def train_adapters(engine) -> None:
    batch = make_batch()
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch))
    with torch.no_grad():  # as after many steps, so that a push without effect is noticed
        for name, parameter in engine.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.add_(torch.full_like(parameter, 0.05))


def setup_of(path: str, *, dtype: str = "float32") -> RolloutSetup:
    config = RolloutConfig(dtype=dtype, kv_cache_memory_mb=4, max_num_seqs=16)
    return RolloutSetup(path, config, (5, 9), 0, PROMPT, RESPONSE, load_format="dummy")


@pytest.fixture(scope="module")
def rollouts(path):
    started = {}

    def get(name: str):
        if name not in started:
            started[name] = make_rollout(name, setup_of(path))
        return started[name]

    return get


def prompts() -> DataProto:
    columns = make_batch(12).batch
    mask = columns["attention_mask"][:, :PROMPT]
    ids = columns["input_ids"][:, :PROMPT]
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_alone_generate_what_merged_weights_generate(rollouts, actor, name):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="base_and_adapters"))
    for version in (2, 3):
        before = rollout.generate(prompts(), GREEDY).batch["rollout_log_probs"]
        train_adapters(actor)
        sent = OutgoingWeights(actor.weights(lora="adapters"), torch.float32)
        rollout.load_weights(version, sent, sent=lambda sent=sent: sent.fingerprint, adapters=True)
        alone, health = rollout.generate(prompts(), GREEDY), rollout.health()
        assert (health.version, health.received) == (version, sent.fingerprint)
        with torch.no_grad():
            log_probs = actor.forward(alone, WHOLE, outputs=("log_probs",))["log_probs"]
        mask = alone.batch["response_mask"].bool()
        assert (alone.batch["rollout_log_probs"] - log_probs)[mask].abs().max() < 1e-4
        assert (alone.batch["rollout_log_probs"] - before)[mask].abs().max() > 1e-2, "the push changed something"
        rollout.load_weights(version, actor.weights())
        merged = rollout.generate(prompts(), GREEDY)
        assert torch.equal(merged.batch["responses"], alone.batch["responses"])
        assert (merged.batch["rollout_log_probs"] - alone.batch["rollout_log_probs"]).abs().max() < 1e-4
        rollout.load_weights(version, actor.weights(lora="base_and_adapters"))
        assert rollout.health().fingerprint == health.fingerprint


def test_a_push_of_adapters_reads_only_the_weights_that_it_replaces(path, actor):
    rollout = make_rollout("hf", setup_of(path))
    rollout.load_weights(1, actor.weights(lora="base_and_adapters"))
    embedding = rollout._model.get_input_embeddings().weight
    embedding.data[0, 0] += 1
    rollout.load_weights(2, actor.weights(lora="adapters"), adapters=True)
    assert rollout.health().version is None, "health reads all"
    rollout.load_weights(3, actor.weights(lora="base_and_adapters"))
    assert rollout.health().version == 3


def test_only_a_and_b_are_sent(actor):
    merged, alone = (OutgoingWeights(actor.weights(lora=lora), torch.bfloat16) for lora in ("merged", "adapters"))
    assert list(merged)
    named = dict(alone)
    assert len(named) == 2 * 7 * 2, "A and B of seven layers in each of two blocks"
    assert {name.rpartition(".")[2] for name in named} == {"lora_A", "lora_B"}
    # Their products are small and are added to large weights, so they stay float32 where the weights become bfloat16.
    # rank * (in + out) numbers each.
    assert (
        alone.num_bytes
        == 4 * sum(tensor.numel() for tensor in named.values())
        == 4 * 2 * 4 * (128 + 96 * 2 + 128 + 3 * 128)
    )
    assert merged.num_bytes > 2 * alone.num_bytes


def test_a_rollout_without_a_full_push_rejects_adapters_alone(path, actor):
    rollout = make_rollout("hf", setup_of(path))
    for push in (None, actor.weights()):
        if push is not None:
            rollout.load_weights(1, push)
        with pytest.raises(StaleWeightsError, match="adapters were pushed alone, .*keeps no weights"):
            rollout.load_weights(2, actor.weights(lora="adapters"), adapters=True)
        with pytest.raises(StaleWeightsError, match="it holds no weights"):
            rollout.generate(prompts(), GREEDY)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_missing_matrix_is_named_and_nothing_is_generated(rollouts, actor, name, part):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="base_and_adapters"))
    lost = f"model.layers.1.self_attn.v_proj.{part}"
    train_adapters(actor)
    with pytest.raises(StaleWeightsError, match=f"v_proj.weight came without|without 1 of its weights \\({lost}\\)"):
        rollout.load_weights(2, [pair for pair in actor.weights(lora="adapters") if pair[0] != lost], adapters=True)
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts(), GREEDY)
    rollout.load_weights(3, actor.weights(lora="base_and_adapters"))
    assert rollout.generate(prompts(), GREEDY).batch["weights_version"].eq(3).all()


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_of_another_step_than_the_sent_ones_are_detected_before_the_next_token(rollouts, actor, name):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="base_and_adapters"))
    old = [(n, t.clone()) for n, t in actor.weights(lora="adapters")]
    train_adapters(actor)
    sent = OutgoingWeights(actor.weights(lora="adapters"), torch.float32)
    assert list(sent)
    with pytest.raises(StaleWeightsError, match=f"with fingerprint {sent.fingerprint:016x}, and "):
        rollout.load_weights(2, old, sent=lambda: sent.fingerprint, adapters=True)
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts(), GREEDY)


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 1 << 12])
def test_adapters_arrive_before_their_weights_although_files_keep_no_order(path, actor, tmp_path, bucket_bytes):
    rollout, sender = make_rollout("hf", setup_of(path)), DiskSender(str(tmp_path), bucket_bytes=bucket_bytes)
    for version, lora in enumerate(("base_and_adapters", "adapters", "adapters")):
        train_adapters(actor)
        sent = sender.send(version, OutgoingWeights(actor.weights(lora=lora), torch.float32))
        incoming = DiskReceiver().receive(version, sent)
        rollout.load_weights(version, incoming, sent=incoming.fingerprint, adapters=lora == "adapters")
        assert rollout.health().received == sent.fingerprint
    fingerprint = rollout.health().fingerprint
    rollout.load_weights(3, actor.weights(lora="base_and_adapters"))
    assert rollout.health().fingerprint == fingerprint


class IgnoresWeights(HFRollout):
    """Consumes a push but keeps the old weights if `ignore` is set."""

    ignore = False

    def replace_weights(self, weights) -> None:
        if self.ignore:
            assert list(weights)
        else:
            super().replace_weights(weights)


def test_an_engine_that_consumed_adapters_but_kept_the_old_weights_is_detected_before_the_next_token(path, actor):
    rollout = IgnoresWeights(setup_of(path))
    rollout.load_weights(1, actor.weights(lora="base_and_adapters"))
    train_adapters(actor)
    rollout.ignore = True
    with pytest.raises(StaleWeightsError, match=r"engine holds \w+ instead of \w+ .*version 1"):
        rollout.load_weights(2, actor.weights(lora="adapters"), adapters=True)
    with pytest.raises(StaleWeightsError, match="it holds no weights"):
        rollout.generate(prompts(), GREEDY)


def test_adapters_after_their_weight_or_incomplete_are_rejected(path, actor):
    weights = list(actor.weights(lora="base_and_adapters"))
    rollout = make_rollout("hf", setup_of(path))
    half = [pair for pair in weights if pair[0] != "model.layers.0.mlp.up_proj.lora_B"]
    for push in (half, weights[::-1]):
        with pytest.raises(StaleWeightsError, match="came without these weights, or not in pairs"):
            rollout.load_weights(1, push)
