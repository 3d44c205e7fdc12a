"""Pushes of adapters alone: the rollout makes of them what the trainer would have pushed merged, and finds one that is
not the sent one.
"""

from importlib.util import find_spec

import pytest
import torch

from hybridrl.config.schema.workers import RolloutConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.lora import LoRA
from hybridrl.workers.rollout import HFRollout, RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.weight_transfer import Outgoing
from hybridrl.workers.weight_transfer.disk import DiskSender, receive
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
    """An engine with adapters that have learned: alpha / rank is not a power of two."""
    engine = make_engine(path, lora=LoRA(4, 12.0))
    learn(engine)
    return engine


def learn(engine) -> None:
    batch = make_batch()
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch))
    with torch.no_grad():  # as if after many steps, so that a push that came to nothing shows
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
def test_adapters_alone_make_what_merged_weights_make(rollouts, actor, name):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="apart"))
    for version in (2, 3):
        before = rollout.generate(prompts(), GREEDY).batch["rollout_log_probs"]
        learn(actor)
        sent = Outgoing(actor.weights(lora="adapters"), torch.float32)
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
        rollout.load_weights(version, actor.weights(lora="apart"))
        assert rollout.health().fingerprint == health.fingerprint


def test_only_a_and_b_travel(actor):
    whole, alone = (Outgoing(actor.weights(lora=lora), torch.bfloat16) for lora in ("merged", "adapters"))
    assert list(whole)
    named = dict(alone)
    assert len(named) == 2 * 7 * 2, "A and B of seven layers in each of two blocks"
    assert {name.rpartition(".")[2] for name in named} == {"lora_A", "lora_B"}
    # Sums of small numbers on large ones: they stay float32 where the weights become bfloat16. rank * (in + out)
    # numbers each.
    assert (
        alone.num_bytes
        == 4 * sum(tensor.numel() for tensor in named.values())
        == 4 * 2 * 4 * (128 + 96 * 2 + 128 + 3 * 128)
    )
    assert whole.num_bytes > 2 * alone.num_bytes


def test_a_rollout_that_never_got_everything_refuses_adapters_alone(path, actor):
    rollout = make_rollout("hf", setup_of(path))
    for push in (None, actor.weights()):
        if push is not None:
            rollout.load_weights(1, push)
        with pytest.raises(StaleWeightsError, match="adapters were pushed alone, and this rollout keeps no weights"):
            rollout.load_weights(2, actor.weights(lora="adapters"), adapters=True)
        with pytest.raises(StaleWeightsError, match="it holds no weights"):
            rollout.generate(prompts(), GREEDY)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_matrix_that_did_not_come_is_named_and_nothing_is_generated(rollouts, actor, name, part):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="apart"))
    lost = f"model.layers.1.self_attn.v_proj.{part}"
    learn(actor)
    with pytest.raises(StaleWeightsError, match=f"v_proj.weight came without|without 1 of its weights \\({lost}\\)"):
        rollout.load_weights(2, [pair for pair in actor.weights(lora="adapters") if pair[0] != lost], adapters=True)
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts(), GREEDY)
    rollout.load_weights(3, actor.weights(lora="apart"))
    assert rollout.generate(prompts(), GREEDY).batch["weights_version"].eq(3).all()


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_of_another_step_than_were_sent_are_found_before_the_next_token(rollouts, actor, name):
    rollout = rollouts(name)
    rollout.load_weights(1, actor.weights(lora="apart"))
    old = [(n, t.clone()) for n, t in actor.weights(lora="adapters")]
    learn(actor)
    sent = Outgoing(actor.weights(lora="adapters"), torch.float32)
    assert list(sent)
    with pytest.raises(StaleWeightsError, match=f"with fingerprint {sent.fingerprint:016x}, and "):
        rollout.load_weights(2, old, sent=lambda: sent.fingerprint, adapters=True)
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts(), GREEDY)


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 1 << 12])
def test_files_that_keep_no_order_bring_adapters_before_their_weights(path, actor, tmp_path, bucket_bytes):
    rollout, sender = make_rollout("hf", setup_of(path)), DiskSender(str(tmp_path), bucket_bytes=bucket_bytes)
    for version, lora in enumerate(("apart", "adapters", "adapters")):
        learn(actor)
        sent = sender.send(version, Outgoing(actor.weights(lora=lora), torch.float32))
        incoming = receive(sent)
        rollout.load_weights(version, incoming, sent=incoming.fingerprint, adapters=lora == "adapters")
        assert rollout.health().received == sent.fingerprint
    held = rollout.health().fingerprint
    rollout.load_weights(3, actor.weights(lora="apart"))
    assert rollout.health().fingerprint == held


class Deaf(HFRollout):
    """Takes a push and keeps what its model had."""

    deaf = False

    def _copy_weights(self, weights) -> None:
        if self.deaf:
            assert list(weights)
        else:
            super()._copy_weights(weights)


def test_an_engine_that_took_adapters_and_kept_the_old_policy_is_found_before_the_next_token(path, actor):
    rollout = Deaf(setup_of(path))
    rollout.load_weights(1, actor.weights(lora="apart"))
    learn(actor)
    rollout.deaf = True
    with pytest.raises(StaleWeightsError, match=r"the engine holds \w+ instead of \w+ \(version 1 before"):
        rollout.load_weights(2, actor.weights(lora="adapters"), adapters=True)
    with pytest.raises(StaleWeightsError, match="it holds no weights"):
        rollout.generate(prompts(), GREEDY)


def test_a_pair_that_comes_after_its_weight_or_halved_is_refused(path, actor):
    weights = list(actor.weights(lora="apart"))
    rollout = make_rollout("hf", setup_of(path))
    half = [pair for pair in weights if pair[0] != "model.layers.0.mlp.up_proj.lora_B"]
    for push in (half, weights[::-1]):
        with pytest.raises(StaleWeightsError, match="came without these weights, or not in pairs"):
            rollout.load_weights(1, push)
