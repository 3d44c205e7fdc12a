"""A run stops if its rollout computes other log-probs than the trainer, although the fingerprints are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import ParityError
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.parity_gate import ParityGate, make_parity_gate
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.support.end_to_end.runs import settings, train
from tests.support.third_party import misreading_rollouts

ROLLOUTS = Path(misreading_rollouts.__file__)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHORT = {"trainer__save_freq": -1, "trainer__test_freq": -1, "trainer__val_before_train": "false"}


def save_model(folder: Path, tokenizer: Any, family: str) -> Path:
    """Write a tiny model with biases and sinks that are not 0, as trained ones."""
    import transformers

    own = {"Qwen3Moe": EXPERTS, "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}}
    config = getattr(transformers, f"{family}Config")(
        **SIZES,
        **own.get(family, {}),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, tensor in model.named_parameters():
            if name.endswith(("_proj.bias", "sinks")):
                tensor.normal_(std=2.0)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_tokenizer) -> dict[str, Path]:
    families = ("Qwen2", "Qwen3Moe", "GptOss")
    return {name: save_model(tmp_path_factory.mktemp(name), tiny_tokenizer, name) for name in families}


class Policy:
    """An actor with a rollout in this process, the gate, and pushes between them."""

    def __init__(self, folder: Path, model: Path, tokenizer: Any, **changes: object):
        words = settings(folder, model, **changes)
        self.config = load_config(PPOConfig, words, program="test", config_name="ppo_trainer")
        made = RayClassWithInitArgs(ActorRolloutRefWorker, self.config, "actor_rollout")
        group = LocalWorkerGroup(None, made, role="actor_rollout")
        group.init_model(10)
        self.worker = group.worker
        found = make_parity_gate(self.config, tokenizer, group)
        assert isinstance(found, ParityGate)
        self.gate = found
        self.pipeline = RolloutPipeline(PolicyWorkers({"actor_rollout": group}), self.config, gate=found)

    @torch.no_grad()
    def change_weights(self) -> None:
        torch.manual_seed(1)
        for parameter in self.worker.actor.state_tensors().modules[0].parameters():
            parameter += 0.05 * torch.randn_like(parameter)


FAULTS = [("SwappedExperts", "Qwen3Moe"), ("DroppedSinks", "GptOss"), ("CastBias", "Qwen2"), ("StaleLayer", "Qwen2")]


@pytest.mark.parametrize("first", [0, 2], ids=["at_the_start", "at_a_later_push"])
@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_weights_that_are_read_wrongly_stop_the_run(
    tmp_path, models, tiny_tokenizer, monkeypatch, fault, family, first
):
    monkeypatch.setattr(misreading_rollouts.MisreadingRollout, "FROM_PUSH", first)
    rollout = {"actor_rollout_ref__rollout__name": f"{misreading_rollouts.__name__}:{fault}"}
    policy = Policy(tmp_path, models[family], tiny_tokenizer, trainer__parity_freq=1, **rollout)
    for version in range(first):
        policy.pipeline.push_weights(version)
        assert policy.gate.take_metrics()["parity/log_prob_diff_max"] < 1e-5
        policy.change_weights()
    with pytest.raises(ParityError, match=rf"rollout ranks \[0\] of 1 .* \(version {first}\); the limit is 0.0001"):
        policy.pipeline.push_weights(first)


def test_a_run_ends_before_step_1_and_the_error_names_the_model_and_what_to_try(tmp_path, models, capsys):
    rollout = {"actor_rollout_ref__rollout__name": f"{ROLLOUTS}:SwappedExperts"}
    assert main_ppo.main(settings(tmp_path, models["Qwen3Moe"], **SHORT, **rollout)) == 1
    error = capsys.readouterr().err
    assert "family qwen3_moe, layers full_attention, 4 experts" in error and "attention of the trainer sdpa" in error
    assert "override_config.attn_implementation=eager; actor_rollout_ref.rollout.name=hf" in error
    assert "step 1/" not in error and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_logs_the_difference_and_a_limit_of_off_checks_nothing(tmp_path, models):
    first, second = train(tmp_path / "on", models["Qwen3Moe"], **SHORT)
    assert 0 < first["parity/log_prob_diff_mean"] <= first["parity/log_prob_diff_max"] < 1e-5
    assert "parity/log_prob_diff_mean" not in second
    rollout = {"actor_rollout_ref__rollout__name": f"{ROLLOUTS}:SwappedExperts", "trainer__parity_limit": "off"}
    rows = train(tmp_path / "off", models["Qwen3Moe"], **SHORT, **rollout)
    assert len(rows) == 2 and not any(name.startswith("parity/") for row in rows for name in row)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", "0.0001"), ("bfloat16", "0.08")])
def test_the_limit_depends_on_the_coarser_dtype(tmp_path, models, tiny_tokenizer, caplog, dtype, limit):
    policy = Policy(tmp_path, models["Qwen2"], tiny_tokenizer, actor_rollout_ref__rollout__dtype=dtype)
    with caplog.at_level("INFO", logger="hybridrl"):
        policy.pipeline.push_weights(0)
    assert f"(limit {limit})" in caplog.text
    difference = policy.gate.take_metrics()["parity/log_prob_diff_mean"]
    assert difference < 1e-5 if dtype == "float32" else 1e-5 < difference < 0.08


@pytest.mark.parametrize("limit", ["0", "-0.1", "of"])
def test_a_limit_that_is_no_number_and_no_word_is_refused(tmp_path, models, capsys, limit):
    assert main_ppo.main(settings(tmp_path, models["Qwen2"], trainer__parity_limit=limit)) == 2
    assert "must be auto, off, or a number above 0" in capsys.readouterr().err


def test_processes_that_were_replaced_are_checked_again(tmp_path, models, tiny_tokenizer):
    policy = Policy(tmp_path, models["Qwen2"], tiny_tokenizer, trainer__parity_freq=0)
    checked = []
    for version in range(4):
        if version == 2:
            policy.pipeline.disconnect("a process was lost")
            policy.pipeline.reconnect()
        policy.pipeline.push_weights(version)
        checked.append(bool(policy.gate.take_metrics()))
    assert checked == [True, False, True, False]


@pytest.mark.slow
def test_every_replica_is_checked_also_while_generation_runs_ahead(tmp_path, models, ray_cluster, capsys):
    pools = {
        **SHORT,
        "trainer__backend": "ray",
        "actor_rollout_ref__rollout__n_gpus_per_node": 2,
        "trainer__lag": 1,
        "trainer__parity_freq": 1,
    }
    rows = train(tmp_path / "right", models["Qwen2"], **pools)
    assert all(row["parity/log_prob_diff_max"] < 1e-5 for row in rows)
    wrong = {"actor_rollout_ref__rollout__name": f"{ROLLOUTS}:StaleLayerOfRankOne"}
    assert main_ppo.main(settings(tmp_path, models["Qwen2"], **pools, **wrong)) == 1
    assert "rollout ranks [1] of 2 " in capsys.readouterr().err


@pytest.mark.slow
def test_processes_that_only_validate_are_checked_before_their_first_validation(tmp_path, models, ray_cluster):
    pools = {"trainer__backend": "ray", "trainer__eval_n_gpus": 1, "trainer__test_freq": 1, "trainer__save_freq": -1}
    rows = train(tmp_path, models["Qwen2"], **pools, trainer__val_before_train=False)
    assert rows[1]["parity/log_prob_diff_max"] < 1e-5  # of the check after step 1; no push is checked again so soon


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_passes_with_a_mixture_of_experts(tmp_path, models):
    vllm = {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__kv_cache_memory_mb": 16}
    rows = train(tmp_path, models["Qwen3Moe"], **SHORT, **vllm, trainer__parity_freq=1)
    assert all(0 < row["parity/log_prob_diff_max"] < 1e-4 for row in rows)
