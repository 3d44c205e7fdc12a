import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest

from hybridrl import cli, main_ppo
from hybridrl.algos.token_stats.from_states import CPU_TILE, DEVICE_TILE
from hybridrl.cli.plan import PlannedDevice, expected_sft_step, faster_dtype, shape_reader
from hybridrl.config import PPOConfig, SFTConfig, load_config
from hybridrl.config.load import compose_settings
from hybridrl.planning import Devices, candidates, plan_processes, with_settings
from hybridrl.planning.costs import Costs, Device, Model
from hybridrl.planning.machine import this_machine
from hybridrl.planning.processes import FLOAT32, TILE_BYTES
from hybridrl.testing.engine_reference import save_tiny_qwen2
from hybridrl.workers.engine.model_shape import ModelShape

GIB = 2**30
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
SHAPE = ModelShape(
    hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152064, tied=False
)
SETTINGS = {
    "data.train_files": "x",
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 4096,
    "actor_rollout_ref.model.path": "x",
    "actor_rollout_ref.rollout.n": 8,
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 8,
}


SMALL_JOB = [
    "data.train_files=x",
    "data.train_batch_size=8",
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.backend=local",
]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def job(**changes) -> PPOConfig:
    return with_settings(
        compose_settings(PPOConfig, SETTINGS, config_name="ppo_trainer"),
        {name.replace("__", "."): value for name, value in changes.items()},
    )


def devices(gib: float) -> Devices:
    return Devices(read_shape=lambda path: SHAPE, device="cuda", memory=gib * GIB, budget=gib * GIB)


def planned(config: PPOConfig, gib: float = 80.0):
    return plan_processes(config, read_shape=lambda path: SHAPE, device="cuda", memory=gib * GIB)


def words(model, **changes) -> list[str]:
    chosen = {**SETTINGS, "actor_rollout_ref.model.path": model}
    chosen |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["plan", "--device", "h100", *(f"{name}={value}" for name, value in chosen.items())]


def test_a_shared_process_has_every_model_and_a_separate_rollout_has_none():
    [shared] = planned(job(actor_rollout_ref__actor__use_kl_loss=True, algorithm__adv_estimator="gae"))
    assert (shared.count, set(shared.models)) == (8, {"actor", "critic", "ref"})
    separate = planned(job(actor_rollout_ref__rollout__n_gpus_per_node=4, trainer__n_gpus_per_node=4))
    assert {process.pool: set(process.models) for process in separate} == {
        "global_pool": {"actor"},
        "rollout_pool": set(),
    }
    assert separate[0].rollout is None and separate[1].rollout is not None


def test_a_separate_rollout_keeps_its_memory_and_a_shared_one_frees_it():
    [shared] = planned(job())
    rollout = planned(job(actor_rollout_ref__rollout__n_gpus_per_node=8))[1].rollout
    assert shared.rollout and rollout and shared.rollout.resting == 0.0
    assert rollout.resting == rollout.total == pytest.approx(40 * GIB)
    [kept] = planned(job(actor_rollout_ref__rollout__free_cache_engine=False))
    assert kept.rollout and kept.peak.total == pytest.approx(shared.peak.total + kept.rollout.total)


def test_a_critic_has_no_logits_and_a_smaller_head():
    [process] = planned(job(algorithm__adv_estimator="gae"))
    actor, critic = process.models["actor"], process.models["critic"]
    assert actor.shape.params - critic.shape.params == SHAPE.matrix_params
    assert critic.by_phase()["backward_start"].logits == 0.0 < actor.by_phase()["backward_start"].logits


def test_rows_of_a_micro_batch_count_with_their_longest_length():
    [rows] = planned(job(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2))
    assert rows.models["actor"].sizes.tokens == 2 * 5120
    [tokens] = planned(job(actor_rollout_ref__actor__use_dynamic_bsz=True))
    assert tokens.models["actor"].sizes.tokens == 16384
    [few] = planned(job(data__train_batch_size=2))  # 16 rows on 8 processes
    assert few.models["actor"].sizes.tokens == 2 * 5120


def test_processes_that_share_sequences_share_activations_and_budgets():
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    alone, shared = job(actor_rollout_ref__actor__use_dynamic_bsz=True), {}
    for size in (2, 4):
        [process] = planned(with_settings(alone, {key: size}))
        shared[size] = process.models["actor"]
    [one] = planned(alone)
    assert [memory.sizes.tokens for memory in shared.values()] == [2 * 16384, 4 * 16384]
    for memory in shared.values():  # each process has as many tokens as before, and as few parameters
        assert memory.by_phase()["backward_start"] == one.models["actor"].by_phase()["backward_start"]
    [few] = planned(with_settings(job(data__train_batch_size=2), {key: 4}))
    assert few.models["actor"].sizes.tokens == 8 * 5120  # 16 rows for 2 groups of processes


def test_a_sequence_too_long_for_one_process_is_planned_for_several():
    budgets = {
        f"actor_rollout_ref__{name}_max_token_len_per_gpu": 140000 for name in ("actor__ppo", "rollout__log_prob")
    }
    long = job(data__max_response_length=131072, **budgets)
    found = {each.layout: each for each in candidates(long, devices(48.0))}
    assert found["as given"].problem
    assert not found["sequence parallelism 4"].problem
    changes = found["sequence parallelism 4"].changes
    budget = changes["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert 4 * budget >= 131072 + 1024 > 4 * budget // 2
    assert "sequence parallelism 8" not in found  # 28 heads


def test_more_memory_gives_larger_micro_batches_and_less_memory_recomputation_and_offload():
    first = {gib: next(candidates(job(), devices(gib))) for gib in (32.0, 48.0, 80.0)}
    assert [found.problem for found in first.values()] == ["", "", ""]
    assert first[80.0].tokens > 5120
    changes = first[32.0].changes
    assert changes["actor_rollout_ref.model.enable_gradient_checkpointing"]
    assert all(found.peak.total <= gib * GIB for gib, found in first.items())


def test_what_fits_is_planned_to_fit_again():
    small = devices(40.0)
    for found in candidates(job(algorithm__adv_estimator="gae"), small):
        config = with_settings(job(algorithm__adv_estimator="gae"), found.changes)
        assert small.problem(config, small.plan(config)) == found.problem


def test_a_plan_offloads_nothing_that_the_settings_refuse():
    for found in candidates(job(algorithm__adv_estimator="gae"), devices(24.0)):
        if found.layout.startswith("Megatron"):
            assert not any(value for name, value in found.changes.items() if name.endswith("_offload"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"actor_rollout_ref__model__lora_rank": 8},
        {"actor_rollout_ref__rollout__mode": "async"},
        {"trainer__n_gpus_per_node": 6},
        {"actor_rollout_ref__rollout__name": "hf"},
    ],
)
def test_no_layout_is_offered_that_the_checks_of_the_settings_refuse(model, changes):
    config = job(actor_rollout_ref__model__path=str(model), data__train_batch_size=480, **changes)
    found = [*candidates(config, devices(28.0))]
    assert len(found) > 1
    for candidate in found:
        main_ppo.validate_config(with_settings(config, candidate.changes), with_inputs=False)


def test_models_that_fit_no_megatron_layout_are_offered_none(model):
    (model / "config.json").write_text(json.dumps(QWEN_7B | {"model_type": "qwen2_moe_other"}))
    config = job(actor_rollout_ref__model__path=str(model))
    assert not any(found.layout.startswith("Megatron") for found in candidates(config, devices(28.0)))


def test_a_mixture_of_experts_is_offered_layouts_that_shard_its_experts(model):
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "head_dim": 128}
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
    (model / "config.json").write_text(json.dumps(QWEN_7B | moe | sizes | {"num_experts_per_tok": 8}))
    config = job(actor_rollout_ref__model__path=str(model), actor_rollout_ref__rollout__tensor_model_parallel_size=8)
    card = Devices(read_shape=shape_reader(config), device="cuda", memory=90 * GIB, budget=90 * GIB)
    found = {each.layout: each for each in candidates(config, card) if each.layout.startswith("Megatron")}
    assert found.keys() > {"Megatron TP 1 PP 1 EP 8", "Megatron TP 2 PP 1 EP 8", "Megatron TP 4 PP 2 EP 4"}
    chosen = with_settings(config, found["Megatron TP 2 PP 1 EP 8"].changes)
    assert chosen.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 8
    for expert, weights in ((8, 8.2), (1, 55.4)):  # 2 bytes of 1.54e9 / 2 parameters, and of 28.99e9 of experts
        layout = {"actor_rollout_ref.actor.megatron.expert_model_parallel_size": expert}
        [process] = card.plan(with_settings(chosen, layout))
        assert process.models["actor"].weights == pytest.approx(weights * GIB, rel=0.02)


def test_too_small_a_cache_is_a_problem_that_more_shards_of_the_rollout_solve():
    found = {one.layout: one.problem for one in candidates(job(), devices(28.0))}
    assert found["as given"].startswith("the cache of global_pool holds 0 tokens, a row has 5,120")
    assert "rollout TP 2" in found and not found["rollout TP 4"].startswith("the cache")


def test_the_settings_that_the_command_prints_fit(model, capsys):
    assert cli.main(words(model)) == 1
    shown = capsys.readouterr().out
    assert "global_pool: 8 processes, GiB of each" in shown
    assert "Megatron TP 4 PP 1" in shown and "Megatron TP 8" not in shown  # 4 heads of keys and values
    assert cli.main([*words(model), "--apply"]) == 0
    changes = capsys.readouterr().out.replace("\\\n", " ").split()
    assert cli.main([*words(model), *changes]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("8 x h100, 79 GiB each\n")
    assert "the job fits as it is" in shown and "expected step on 8 x h100: " in shown and "(gen " in shown
    assert "old_log_prob" in shown and ", ref " not in shown  # several mini-batches, no reference


def test_wrong_input_is_one_error(model, tmp_path, capsys):
    for changes, text in {
        ("actor_rollout_ref.model.path=/nowhere",): "model.path='/nowhere': transformers cannot read it",
        ("trainer.n_gpus_per_nod=8",): "trainer.n_gpus_per_node",
        ("actor_rollout_ref.actor.strategy=fsdp3",): "fsdp3",
    }.items():
        assert cli.main([*words(model), *changes]) == 2
        error = capsys.readouterr().err
        assert text in error and "Traceback" not in error
    (model / "config.json").write_text(json.dumps(QWEN_7B | {"model_type": "nothing"}))
    assert cli.main(words(model)) == 2


def test_a_model_is_planned_as_its_engines_load_it(model, tmp_path, capsys):
    other = tmp_path / "critic"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(QWEN_7B))
    changes = {"actor_rollout_ref__model__path": str(model)}
    changes["actor_rollout_ref__model__override_config"] = {"num_hidden_layers": 2}
    read = shape_reader(job(**changes))
    assert (read(str(model)).layers, read(str(other)).layers) == (2, 28)
    code = "from transformers import Qwen2Config\nclass Own(Qwen2Config):\n  model_type = 'own'\n"
    (model / "own.py").write_text(code)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(QWEN_7B | own))
    assert shape_reader(job(**changes, actor_rollout_ref__model__trust_remote_code=True))(str(model)).layers == 2
    assert cli.main(words(model)) == 2 and "transformers cannot read it" in capsys.readouterr().err


def test_a_job_that_only_validates_has_a_plan(model, capsys):
    only = {"trainer__val_only": True, "trainer__resume_mode": "disable", "data__val_files": "x"}
    assert cli.main(words(model, **only)) == 0
    assert "the job fits as it is" in capsys.readouterr().out


def test_a_cpu_job_has_the_memory_that_is_given(model, capsys):
    chosen = words(model, trainer__device="cpu", trainer__n_gpus_per_node=1)
    assert cli.main(["plan", *chosen[3:], "--memory", "8"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("a device of 8 GiB (cpu)\n") and "of 8 GiB" in shown


def test_without_a_device_the_plan_is_for_this_machine_and_says_so_first(tmp_path, capsys):
    save_tiny_qwen2(tmp_path / "tiny")
    job = [f"actor_rollout_ref.model.path={tmp_path / 'tiny'}", *SMALL_JOB]
    assert cli.main(["plan", *job]) == 0
    shown = capsys.readouterr().out
    here = this_machine()
    assert shown.startswith(f"this machine: {len(os.sched_getaffinity(0))} CPU cores, {here.memory / GIB:.0f} GiB")
    assert "expected step on this machine" in shown and "of 79 GiB" not in shown
    assert ", ref " not in shown and "old_log_prob" not in shown  # one mini-batch, whose own log-probs serve
    assert cli.main(["plan", *job, "actor_rollout_ref.actor.use_kl_loss=true"]) == 0
    assert ", ref " in capsys.readouterr().out


def test_a_cpu_with_products_in_bfloat16_is_said_with_the_speed_up():
    speeds = {"bfloat16": 9e11, "float32": 3e11}
    speed = lambda device, dtype: speeds[dtype]  # noqa: E731
    config = job(actor_rollout_ref__actor__fsdp_config__dtype="auto")
    advice = faster_dtype(config, "amx_bf16", speed=speed)
    assert "amx_bf16: products in bfloat16 are 3.0 times as fast here" in advice and "rollout.dtype=bfloat16" in advice
    chosen = job(actor_rollout_ref__actor__fsdp_config__dtype="bfloat16")
    assert faster_dtype(chosen, "amx_bf16", speed=speed) == ""
    speeds["bfloat16"] = 3.1e11
    assert faster_dtype(config, "avx512_bf16", speed=speed) == ""


def test_a_step_of_fine_tuning_computes_six_operations_a_token_and_parameter(model):
    data = {"data.train_files": "x", "data.train_batch_size": 64, "model.path": str(model)}
    words = [f"{key}={value}" for key, value in data.items()]
    line = {}
    for gpus in (1, 8):
        config = load_config(
            SFTConfig, [*words, f"trainer.n_gpus_per_node={gpus}"], program="", config_name="sft_trainer"
        )
        h100 = PlannedDevice("", "cuda", 80 * GIB, Device(1e15, 3e12))
        line[gpus] = expected_sft_step(config, h100, tokens=512)
    products = 6 * 7.6156e9 * 64 * 512
    attention = 3 * 4 * 28 * 3584 * 256 * 64 * 512
    seconds = (products + attention) / (1e15 * Costs.train_efficiency)
    for gpus, text in line.items():
        shown = float(re.fullmatch(r"\nexpected step: (.+) s, 64 conversations of 512 tokens\n", text)[1])
        assert shown == pytest.approx(seconds / gpus, rel=0.05)


def test_the_seconds_of_a_mixture_are_those_of_the_experts_that_compute_a_token(tmp_path):
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 2}
    seconds = {}
    for experts in (2, 64):
        folder = tmp_path / str(experts)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN_7B | moe | {"num_experts": experts}))
        words = ["data.train_files=x", f"model.path={folder}"]
        config = load_config(SFTConfig, words, program="", config_name="sft_trainer")
        h100 = PlannedDevice("", "cuda", 80 * GIB, Device(1e15, 3e12))
        seconds[experts] = float(expected_sft_step(config, h100, tokens=512).split()[2])
    assert seconds[64] == pytest.approx(seconds[2], rel=0.05)


def test_float32_is_proposed_where_bfloat16_is_slower():
    config = job(actor_rollout_ref__actor__fsdp_config__dtype="bfloat16")
    speeds = {"bfloat16": 5e9, "float32": 150e9}
    advice = faster_dtype(config, "", speed=lambda device, dtype: speeds[dtype])
    assert "products in float32 are 30.0 times as fast as in bfloat16 here: " in advice
    assert "actor_rollout_ref.rollout.dtype=float32" in advice


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("hybridrl.system.machine.CGROUP_MEMORY", (str(limit), str(tmp_path / "missing")))
    whole = this_machine().memory
    for text, expected in (("1073741824\n", 2**30), ("max\n", whole), (f"{2**62}\n", whole)):
        limit.write_text(text)
        assert this_machine().memory == expected


def test_adapters_train_in_less_memory():
    def peak(config: PPOConfig) -> float:
        [process] = planned(config)
        return process.peak.total

    assert peak(job(actor_rollout_ref__model__lora_rank=8)) < peak(job())
    [process] = planned(job(actor_rollout_ref__model__lora_rank=8))
    sizes = process.models["actor"].sizes
    assert replace(sizes, lora_rank=0).trains and sizes.lora_rank == 8


def test_on_a_cpu_the_program_itself_has_its_place_in_the_budget():
    # Token budgets are chosen to fill the memory, in which the program has 0.5 GiB.
    shape = replace(SHAPE, layers=2)
    cpu = Devices(read_shape=lambda path: shape, device="cpu", memory=60 * GIB, budget=50 * GIB)
    config = job(trainer__n_gpus_per_node=1, actor_rollout_ref__rollout__name="hf", data__train_batch_size=8)
    small = {"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "trainer.device": "cpu", "trainer.snapshot_freq": 0}
    config = with_settings(config, small)
    found = next(candidates(config, cpu))
    assert found.problem == "" and found.peak.program == 2**29


def test_processes_and_snapshots_of_a_machine_without_gpus_share_its_memory():
    shape = replace(SHAPE, layers=2)
    small = {"actor_rollout_ref.rollout.name": "hf", "trainer.device": "cpu", "trainer.n_gpus_per_node": 2}
    small |= {"data.max_prompt_length": 128, "data.max_response_length": 128, "data.train_batch_size": 8}
    small |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 8}

    def best(gib: float, snapshot_freq: int):
        cpu = Devices(read_shape=lambda path: shape, device="cpu", memory=gib * GIB, budget=gib * GIB)
        return next(candidates(with_settings(job(), small | {"trainer.snapshot_freq": snapshot_freq}), cpu))

    found = best(400, 1)
    assert found.tokens == 4096  # larger micro-batches are slower on a CPU
    needed = 2 * found.peak.total / GIB  # of two processes
    stored = 2 * 12 * shape.params / GIB  # of two snapshots: parameters and two moments
    assert best(needed + 1, 0).problem == "" and best(needed + stored + 1, 1).problem == ""
    assert "global_pool needs" in best(needed - 1, 0).problem
    assert "global_pool needs" in best(needed + stored - 1, 1).problem
    assert not best(needed - 1, 0).changes["actor_rollout_ref.actor.fsdp_config.optimizer_offload"]  # to where it is


def test_the_snapshots_of_a_job_are_named_and_only_on_ray(tmp_path, capsys):
    save_tiny_qwen2(tmp_path / "tiny")
    job = [f"actor_rollout_ref.model.path={tmp_path / 'tiny'}", *SMALL_JOB]
    assert cli.main(["plan", *job]) == 0 and "snapshot" not in capsys.readouterr().out
    assert cli.main(["plan", *job, "trainer.backend=ray", "trainer.device=cpu"]) == 0
    assert "a step's snapshot: 0.00 GiB of each machine's memory" in capsys.readouterr().out


def test_a_prompt_of_several_rows_is_computed_once_where_they_share_it():
    model = Model(params=1e6, layers=1, hidden=1, kv_width=1)
    apart, shared = (
        Costs(Device(1e12, 1e30), model, prompt_tokens=100, samples=n, shared_rows=n, step_overhead_s=0) for n in (1, 4)
    )
    assert apart.score_s(np.zeros(8)) == pytest.approx(4 * shared.score_s(np.zeros(8)), rel=0.01)
    prefill = 8 * 100 * 2e6 / (1e12 * apart.train_efficiency)
    assert apart.generate_s([0] * 8) == pytest.approx(prefill)
    assert shared.generate_s([0] * 8) == pytest.approx(prefill / 4)
    assert shared.generate_s([0] * 8, done=10) == pytest.approx(prefill / 4 + prefill / 10)


def test_the_plan_counts_the_tiles_of_logits_that_are_computed():
    assert TILE_BYTES == {"cuda": DEVICE_TILE * FLOAT32, "cpu": CPU_TILE * FLOAT32}
