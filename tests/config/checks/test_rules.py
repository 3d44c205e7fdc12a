"""Rules over several settings: refused and valid configs, and the messages."""

import json
from dataclasses import replace

import pytest

from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from hybridrl.config import (
    DPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    check_config,
    check_dpo_config,
    check_rm_config,
    check_sft_config,
    load_config,
)
from hybridrl.config.capabilities import SAMPLING, RolloutCapabilities, TransportCapabilities
from hybridrl.errors import ConfigError

NAMES = {
    "known_estimators": ("gae", "grpo", "rloo", "gdpo", "maxrl", "remax", "vapo", "optimal_token_baseline"),
    "group_estimators": ("grpo", "rloo"),
    "critic_estimators": ("gae",),
    "known_losses": ("vanilla", "gspo"),
    "own_agg_modes": {"gspo": "seq-mean-token-mean"},
}
ALL_BUT_RANKS = RolloutCapabilities(
    keyed_sampling=True, log_probs=True, partial=True, requests=True, adapters=True, sampling=frozenset(SAMPLING)
)
ROLLOUTS = {
    "hf": replace(ALL_BUT_RANKS, quantization=frozenset({"fp8"})),
    "vllm": replace(ALL_BUT_RANKS, tensor_parallel=True),
    "toy": RolloutCapabilities(log_probs=True),
    "mute": RolloutCapabilities(),
}

TAIL = (
    "algorithm.filter_groups.order=tail_batching data.train_batch_size=512 data.gen_batch_size=640 "
    "actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.mode=async"
)
AGENT = (
    "actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.endpoint_port=8000 "
    "actor_rollout_ref.rollout.agent.default_agent_loop=http_agent actor_rollout_ref.rollout.agent.program=x "
    "actor_rollout_ref.rollout.agent.timeout_s=5"
)
PARTIAL = (
    "trainer.lag=2 trainer.partial_rollout=true actor_rollout_ref.rollout.n_gpus_per_node=1 "
    "actor_rollout_ref.rollout.mode=async"
)
ELASTIC = "trainer.min_ranks=1 trainer.save_freq=1"
MEGATRON = "actor_rollout_ref.actor.strategy=megatron critic.strategy=megatron"
LAYOUT = "actor_rollout_ref.actor.megatron"
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"

TRANSPORTS = {
    "broadcast": TransportCapabilities(streaming=True),
    "disk": TransportCapabilities(streaming=False, needs_directory=True),
}


@pytest.fixture
def check(tmp_path):
    """Return a function that checks a valid config with overrides and returns the error message or ""."""
    (tmp_path / "train.parquet").touch()
    base = [
        f"data.train_files={tmp_path}/train.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
        "actor_rollout_ref.rollout.name=hf",
    ]

    def problems(*words, base=base):
        config = load_config(PPOConfig, [*base, *words], program="p", config_name="ppo_trainer")
        try:
            chosen = config.actor_rollout_ref.rollout
            transport = TRANSPORTS.get(chosen.weight_sync.transport)
            check_config(config, **NAMES, rollout=ROLLOUTS[chosen.name], transport=transport)
        except ConfigError as error:
            return str(error)
        return ""

    return problems


@pytest.mark.parametrize(
    "words, expected",
    [
        ("data.train_files=[]", "data.train_files=[]: no training data"),
        ("data.train_files=nowhere.parquet", "data.train_files=nowhere.parquet: there is no such file"),
        ("data.val_files=['~/v.parquet']", "write $HOME"),
        ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path=null: no model"),
        ("actor_rollout_ref.model.path=/nowhere/model", "there is no such directory"),
        ("actor_rollout_ref.model.path=outputs/nowhere/model", "outputs/nowhere/model: there is no such directory"),
        ("critic.model.path=./nowhere", "critic.model.path=./nowhere: there is no such directory"),
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1: algorithm.adv_estimator=grpo compares"),
        (
            "algorithm.adv_estimator=gea",
            "algorithm.adv_estimator=gea: there is no such estimator; did you mean gae? known are gae, gdpo, grpo",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gsbo", "did you mean gspo? known are gspo, vanilla"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=token-sum",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum: gspo always uses seq-mean-token-mean; leave it out",
        ),
        (
            "actor_rollout_ref.actor.loss_scale_factor=512",
            "loss_scale_factor=512: only loss_agg_mode=seq-mean-token-sum-norm divides by it",
        ),
        ("critic.enable=false", "algorithm.adv_estimator=gae needs values"),
        ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[]: gdpo needs the rewards it combines"),
        (
            "algorithm.gdpo_reward_keys=[a]",
            "reward_keys=[a]: has no effect with adv_estimator=gae, only with gdpo",
        ),
        (
            "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1.0]",
            "algorithm.gdpo_reward_weights=[1.0]: must have one weight for each of gdpo_reward_keys=['a', 'b']",
        ),
        (
            "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,a]",
            "algorithm.gdpo_reward_keys=['a', 'a']: names a reward twice",
        ),
        ("algorithm.adv_estimator=maxrl algorithm.use_kl_in_reward=true", "maxrl needs rewards of 0 or more"),
        ("algorithm.adv_estimator=remax algorithm.normalize_reward=true", "baseline of remax is not normalised"),
        ("algorithm.adv_estimator=maxrl algorithm.normalize_reward=true", "maxrl needs the scores as they are"),
        ("algorithm.lam_alpha=0.1", "algorithm.lam_alpha=0.1: has no effect with adv_estimator=gae, only with vapo"),
        (
            "algorithm.adv_estimator=optimal_token_baseline actor_rollout_ref.actor.calculate_sum_pi_squared=false",
            "calculate_sum_pi_squared=false: optimal_token_baseline needs it",
        ),
        ("data.sampler.class_path=mine.py", "data.sampler.class_name=null: a sampler needs both"),
        (
            "algorithm.filter_groups.enable=true",
            "actor_rollout_ref.rollout.n=1: algorithm.filter_groups.enable=true compares several samples",
        ),
        (
            "data.gen_batch_size=64",
            "data.gen_batch_size=64: has no effect without algorithm.filter_groups.enable=true; leave it out",
        ),
        (
            "algorithm.filter_groups.order=shortest",
            "order=shortest: there are no more groups to choose from; set data.gen",
        ),
        (
            "algorithm.filter_groups.order=tail_batching actor_rollout_ref.rollout.mode=async",
            "order=tail_batching: there are no more groups to choose from; set data.gen_batch_size above",
        ),
        (
            f"{TAIL} algorithm.filter_groups.enable=true data.gen_batch_size=512",
            "order=tail_batching: there are no more groups to choose from; set data.gen_batch_size above",
        ),
        (f"{TAIL} trainer.backend=local trainer.lag=1", "is a schedule of synchronous training, and trainer.lag=1"),
        (
            f"{TAIL} actor_rollout_ref.rollout.endpoint_port=8000 "
            "actor_rollout_ref.rollout.agent.default_agent_loop=outside_agent "
            "actor_rollout_ref.rollout.agent.timeout_s=5",
            "default_agent_loop=outside_agent play at their own pace, so a round would end with the last of them",
        ),
        (
            f"{TAIL} actor_rollout_ref.rollout.mode=sync",
            "order=tail_batching: actor_rollout_ref.rollout.mode=sync generates each batch in one call",
        ),
        (
            "algorithm.select_samples.k=2 actor_rollout_ref.rollout.n=2",
            "k=2: there are only actor_rollout_ref.rollout.n=2",
        ),
        (
            "algorithm.select_samples.k=1 actor_rollout_ref.rollout.n=4",
            "k=1: one score has no variance; set k=2 or more",
        ),
        (
            "algorithm.adv_estimator=grpo algorithm.select_samples.k=1 algorithm.select_samples.method=max_reward "
            "actor_rollout_ref.rollout.n=4",
            "algorithm.select_samples.k=1: algorithm.adv_estimator=grpo compares several samples of a prompt; set k=2",
        ),
        ("algorithm.select_samples.method=random", "method=random: has no effect without algorithm.select_samples.k"),
        ("algorithm.pf_ppo.weight_pow=3", "pf_ppo.weight_pow=3: has no effect without algorithm.use_pf_ppo=true"),
        (
            "algorithm.use_pf_ppo=true algorithm.pf_ppo.reweight_method=max_min algorithm.pf_ppo.weight_pow=3",
            "algorithm.pf_ppo.weight_pow=3: has no effect without reweight_method=pow",
        ),
        (
            "reward_model.length_reward_coef=0.2",
            "reward_model.length_reward_coef=0.2: it compares several samples of a prompt; set actor_rollout_ref",
        ),
        (
            "reward_model.length_reward_coef=0.2 actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=gdpo "
            "algorithm.gdpo_reward_keys=[format]",
            "length_reward_coef=0.2: gdpo reads only algorithm.gdpo_reward_keys=['format']; add length_reward there",
        ),
        (
            "reward_model.length_reward_coef=0.2 actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=maxrl",
            "reward_model.length_reward_coef=0.2: maxrl needs rewards of 0 or more",
        ),
        (
            "distillation.enabled=true distillation.distillation_loss.use_task_rewards=false algorithm.use_pf_ppo=true "
            "distillation.teacher_models.teacher_model.model_path=some/model",
            "algorithm.use_pf_ppo=True: needs scores, which a distillation without task rewards has not",
        ),
        (
            "actor_rollout_ref.actor.loss_scale_factor=512",
            "loss_scale_factor=512: only loss_agg_mode=seq-mean-token-sum-norm divides by it",
        ),
        (
            "algorithm.filter_groups.enable=true actor_rollout_ref.rollout.n=4 data.train_batch_size=8 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=8 data.gen_batch_size=3 "
            "algorithm.filter_groups.max_num_gen_batches=2",
            "max_num_gen_batches=2: so many generation batches of 3 prompts (data.gen_batch_size) never fill "
            "data.train_batch_size=8; set 3 or more, or 0 for no limit",
        ),
        (
            "algorithm.filter_groups.enable=true actor_rollout_ref.rollout.n=4 algorithm.use_kl_in_reward=true "
            "algorithm.filter_groups.metric=seq_final_reward",
            "metric=seq_final_reward: groups are filtered before log-probs are computed",
        ),
        (
            "critic.strategy=megatron",
            "critic.strategy=megatron: must be the engine of actor_rollout_ref.actor.strategy=fsdp",
        ),
        (
            f"{MEGATRON} {LAYOUT}.tensor_model_parallel_size=3 trainer.n_gpus_per_node=4",
            f"{LAYOUT}: tensor_model_parallel_size=3 * pipeline_model_parallel_size=1 * "
            "context_parallel_size=1 = 3 does not",
        ),
        (f"{MEGATRON} {LAYOUT}.sequence_parallel=true", "sequence_parallel=true: has no effect with"),
        (
            "actor_rollout_ref.rollout.quantization=fp8 actor_rollout_ref.rollout.name=hf data.val_files=README.md "
            "trainer.val_only=true trainer.resume_mode=disable",
            "quantization=fp8: only what an actor pushes is quantised",
        ),
        (
            "actor_rollout_ref.rollout.quantization=int8 actor_rollout_ref.rollout.name=vllm",
            "quantization=int8: actor_rollout_ref.rollout.name=vllm does not declare it in capabilities.quantization",
        ),
        (
            "actor_rollout_ref.rollout.quantization=fp8 actor_rollout_ref.rollout.name=hf "
            "actor_rollout_ref.rollout.weight_sync.lora=adapter actor_rollout_ref.model.lora_rank=4",
            "quantization=fp8: merged weights are quantised; set actor_rollout_ref.rollout.weight_sync.lora=merged",
        ),
        (
            f"{ULYSSES}=3 trainer.n_gpus_per_node=4",
            f"{ULYSSES}=3: does not divide the 4 processes (trainer.nnodes * trainer.n_gpus_per_node); use a divisor",
        ),
        (
            f"{ULYSSES}=2 trainer.n_gpus_per_node=2 data.max_response_length=8000 "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000: one sequence may have",
        ),
        (
            f"{MEGATRON} {LAYOUT}.virtual_pipeline_model_parallel_size=2",
            "virtual_pipeline_model_parallel_size=2: has no effect with",
        ),
        (
            f"{MEGATRON} {LAYOUT}.optimizer_offload=true",
            "not supported with the distributed optimizer in this release; set",
        ),
        (
            f"{MEGATRON} actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
            "no effect with actor_rollout_ref.actor.strategy=me",
        ),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "has no effect with actor_rollout_ref.actor.strategy=fsdp",
        ),
        (
            "actor_rollout_ref.rollout.name=mute",
            "actor_rollout_ref.rollout.calculate_log_probs=true: needs the capability log_probs, which "
            "actor_rollout_ref.rollout.name=mute does not declare; set it to false",
        ),
        (
            "actor_rollout_ref.rollout.name=toy actor_rollout_ref.rollout.mode=async",
            "actor_rollout_ref.rollout.mode=async: needs the capability requests, which "
            "actor_rollout_ref.rollout.name=toy does not declare; use sync",
        ),
        (
            "actor_rollout_ref.rollout.name=toy actor_rollout_ref.model.lora_rank=2 "
            "actor_rollout_ref.rollout.weight_sync.lora=adapter",
            "actor_rollout_ref.rollout.weight_sync.lora=adapter: needs the capability adapters, which",
        ),
        (
            f"{PARTIAL} actor_rollout_ref.rollout.mode=sync",
            "trainer.partial_rollout=true: actor_rollout_ref.rollout.mode=sync generates each batch in one call",
        ),
        (
            "actor_rollout_ref.rollout.name=toy actor_rollout_ref.rollout.top_k=5",
            "actor_rollout_ref.rollout.top_k=5: actor_rollout_ref.rollout.name=toy does not declare top_k in "
            "capabilities.sampling; leave it out",
        ),
        (
            "actor_rollout_ref.rollout.name=toy actor_rollout_ref.rollout.val_kwargs.do_sample=true "
            "actor_rollout_ref.rollout.val_kwargs.top_p=0.5",
            "actor_rollout_ref.rollout.val_kwargs.top_p=0.5: actor_rollout_ref.rollout.name=toy does not declare top_p",
        ),
        (
            f"{ROLLOUT_TP}=2",
            f"{ROLLOUT_TP}=2: needs the capability tensor_parallel, which actor_rollout_ref.rollout.name=hf does not "
            "declare; use actor_rollout_ref.rollout.name=vllm, or 1",
        ),
        ("actor_rollout_ref.rollout.agent.path=x.py", "has no effect without actor_rollout_ref.rollout.mode=async"),
        (
            "actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.agent.default_agent_loop=environment_agent",
            "environment_agent: there is no environment; name the file of their list in actor_rollout_ref",
        ),
        (
            "actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.agent.default_agent_loop=verifiers_agent "
            "actor_rollout_ref.rollout.agent.path=x.py",
            "verifiers_agent: it plays on the endpoint; set actor_rollout_ref.rollout.endpoint_port",
        ),
        ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=256: a step has only 16 prompts"),
        (
            "critic.ppo_mini_batch_size=2048",
            "critic.ppo_mini_batch_size=2048: a step has only 1024 prompts (data.train_batch_size); set",
        ),
        (
            "reward_model.enable=true reward_model.model.path=m reward_model.forward_max_token_len_per_gpu=1023",
            "reward_model.forward_max_token_len_per_gpu=1023: one sequence may have",
        ),
        ("actor_rollout_ref.rollout.top_k=0", "actor_rollout_ref.rollout.top_k=0: would keep no token; -1 keeps all"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k=0", "actor_rollout_ref.rollout.val_kwargs.top_k=0"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "val_kwargs.do_sample=true"),
        (
            "trainer.backend=local trainer.n_gpus_per_node=2",
            "trainer.nnodes * trainer.n_gpus_per_node = 2; use trainer.backend=ray",
        ),
        ("trainer.backend=local trainer.colocate=device", "trainer.colocate=device"),
        ("trainer.min_ranks=2 trainer.save_freq=1", "trainer.min_ranks=2: the run has 1 ranks"),
        (f"{ELASTIC} trainer.backend=local", "trainer.min_ranks=1: trainer.backend=local has one process only"),
        (f"{ELASTIC} trainer.snapshot_freq=0", "trainer.min_ranks=1: with trainer.snapshot_freq=0 a lost process ends"),
        (
            "trainer.min_ranks=1",
            "trainer.min_ranks=1: a lost machine takes its snapshots with it; set trainer.save_freq",
        ),
        (
            f"{ELASTIC} actor_rollout_ref.actor.strategy=hybridrl.workers.engine.fsdp.engine:FSDPEngine",
            "is not built in, and its checkpoints may not load into another number of ranks; use fsdp or megatron",
        ),
        (
            f"trainer.min_ranks=3 trainer.save_freq=1 trainer.n_gpus_per_node=4 {MEGATRON} "
            f"{LAYOUT}.tensor_model_parallel_size=2",
            "trainer.min_ranks=3: 2 processes share a model (tensor, pipeline, context and expert parallel sizes of",
        ),
        (
            f"{ELASTIC} trainer.n_gpus_per_node=2 actor_rollout_ref.rollout.name=vllm "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "so the number of ranks is a multiple of 2; set 2",
        ),
        ("trainer.experiment_name=../../x", "leaves checkpoints/; for another directory set trainer.default_local_dir"),
        ("trainer.project_name=/x", "leaves checkpoints/"),
        ("trainer.resume_mode=resume_path", "set trainer.resume_from_path to a global_step_N directory"),
        ("trainer.resume_from_path=x", "is read only with trainer.resume_mode=resume_path, not auto"),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=nowhere", "there is no such directory"),
        ("reward_model.enable=true", "set reward_model.model.path"),
        (
            "reward_model.limits.memory_gb=3",
            "reward_model.limits.memory_gb: there is no such key; did you mean memory_mb?",
        ),
        ("reward_model.limits.memory_mb=-3", "reward_model.limits.memory_mb=-3: must be > 0"),
        ("reward_model.model.path=some/model", "set reward_model.enable=true"),
        ("data.custom_cls.name=Mine", "data.custom_cls.path=null: a dataset class needs both"),
        (
            "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=4",
            "only reward_model.reward_manager=dapo",
        ),
        (
            "reward_model.reward_manager=no_such_module:Mine",
            "reward_model.reward_manager=no_such_module:Mine: no module named 'no_such_module'",
        ),
        (
            "trainer.logger=[console,decimal:Decmal]",
            "trainer.logger=decimal:Decmal: decimal has no 'Decmal'; did you mean Decimal",
        ),
        (
            "reward_model.overlong_buffer.enable=true reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer.len=0: must be between 1 and",
        ),
        (
            "reward_model.overlong_buffer.enable=true reward_model.reward_manager=dapo "
            "reward_model.overlong_buffer.len=513",
            "between 1 and data.max_response_length=512",
        ),
        ("trainer.lag=1", "give the rollout its own pool with actor_rollout_ref.rollout.n_gpus_per_node"),
        (
            "trainer.backend=local trainer.lag=1 trainer.staleness=2",
            "no token gets older than trainer.lag=1; leave it out",
        ),
        ("trainer.replay.groups=8", "with trainer.staleness above trainer.lag=0, not None"),
        ("trainer.val_only=true", "trainer.val_only=true: there is no validation data"),
        ("trainer.test_freq=5", "trainer.test_freq=5: there is no validation data"),
        ("trainer.test_freq=0", "trainer.test_freq=0: is not a frequency"),
        ("trainer.save_freq=0", "trainer.save_freq=0: is not a frequency; -1 means never"),
    ],
)
def test_a_contradiction_is_refused_on_one_line_with_a_fix(check, words, expected):
    message = check(*words.split())
    assert expected in message
    assert "\n" not in message


def test_a_generating_engine_has_whole_groups_of_ranks_on_each_machine(check):
    pool, tensor_parallel = (
        "actor_rollout_ref.rollout.n_gpus_per_node",
        f"actor_rollout_ref.rollout.name=vllm {ROLLOUT_TP}=2",
    )
    assert f"{ROLLOUT_TP}=2: does not divide trainer.n_gpus_per_node=3" in check(
        *tensor_parallel.split(), "trainer.n_gpus_per_node=3"
    )
    message = check(*tensor_parallel.split(), "trainer.n_gpus_per_node=3", f"{pool}=1", "trainer.eval_n_gpus=5")
    assert f"does not divide {pool}=1" in message and "does not divide trainer.eval_n_gpus=5" in message
    assert "does not divide trainer.n_gpus_per_node" not in message
    for mode in ("sync", "async"):
        words = ("trainer.n_gpus_per_node=3", f"{pool}=4", f"actor_rollout_ref.rollout.mode={mode}")
        assert ROLLOUT_TP not in check(*tensor_parallel.split(), *words)


@pytest.mark.parametrize(
    "prefix, switch, budget",
    [
        ("actor_rollout_ref.actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ("actor_rollout_ref.rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ("critic", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    ],
)
def test_a_token_budget_must_hold_the_longest_sequence_where_it_is_used(check, prefix, switch, budget):
    rows = budget.replace("max_token_len", "micro_batch_size")
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    lengths = ["data.max_prompt_length=60", "data.max_response_length=40"]
    assert check(*lengths, kl, f"{prefix}.{budget}=99", f"{prefix}.{rows}=4") == ""
    assert f"{prefix}.{budget}=99: one sequence may have" in check(
        *lengths, kl, f"{prefix}.{budget}=99"
    )  # no rows: cut by it
    assert check(*lengths, f"{prefix}.{budget}=100", f"{prefix}.{switch}=true") == ""
    message = check(*lengths, f"{prefix}.{budget}=99", f"{prefix}.{switch}=true")
    assert (
        f"{prefix}.{budget}=99: one sequence may have data.max_prompt_length + data.max_response_length = 100 tokens"
        in message
    )


@pytest.mark.parametrize(
    "words",
    [
        "",
        "data.train_files=s3://bucket/train.parquet",
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 critic.enable=false critic.strategy=megatron",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "data.train_batch_size=7 actor_rollout_ref.actor.ppo_mini_batch_size=3 trainer.n_gpus_per_node=2",
        "trainer.save_freq=3",
        "trainer.backend=local",
        "custom_reward_function.kwargs.format_score=0.1",
        "reward_model.limits.memory_mb=4000 reward_model.limits={env:[JUDGE_KEY],processes:8}",
        "reward_model.overlong_buffer.enable=true reward_model.reward_manager=dapo "
        "reward_model.overlong_buffer.len=512",
        "actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "data.gen_batch_size=2048 algorithm.filter_groups.order=shortest trainer.staleness=1",
        TAIL,
        f"{TAIL} {AGENT}",
        f"{PARTIAL} {AGENT}",
        # A rollout process that is lost has to wait for the trainer then.
        f"{PARTIAL} actor_rollout_ref.rollout.weight_sync.transport=broadcast",
        f"{PARTIAL} actor_rollout_ref.model.lora_rank=2 actor_rollout_ref.rollout.weight_sync.lora=adapter",
        f"{PARTIAL} {AGENT} actor_rollout_ref.rollout.agent.default_agent_loop=outside_agent "
        "actor_rollout_ref.rollout.agent.program=null",
        f"{PARTIAL} {AGENT} actor_rollout_ref.rollout.agent.default_agent_loop=environment_agent "
        "actor_rollout_ref.rollout.agent.path=env.py",
    ],
)
def test_a_valid_config_passes(check, words):
    assert check(*words.split()) == ""


def test_every_contradiction_is_reported_at_once(check):
    lines = check(
        "trainer.test_freq=1", "trainer.val_only=true", "algorithm.adv_estimator=rloo", "critic.enable=false"
    ).splitlines()
    assert lines[0] == "3 problems in the configuration:" and len(lines) == 4


@pytest.mark.parametrize("preset", ["grpo_trainer", "local_debug"])
def test_a_preset_runs_once_it_has_data_and_a_model(check, preset):
    assert check("--config-name", preset) == ""


@pytest.mark.parametrize(
    "words, expected",
    [
        ("model.path=null", "model.path=null: no model"),
        ("data.train_files=[]", "no training data"),
        (
            "data.max_length=2000 data.max_token_len_per_gpu=1999",
            "one sequence may have data.max_length = 2000 tokens",
        ),
        ("trainer.critic_warmup=3", "has no effect here, only in main_ppo"),
        ("trainer.val_only=true data.val_files=${data.train_files}", "has no effect here, only in main_ppo"),
        ("trainer.test_freq=2", "set data.val_files"),
        ("trainer.backend=local trainer.n_gpus_per_node=2", "use trainer.backend=ray"),
        ("", ""),
        (
            "data.max_length=2000 data.max_token_len_per_gpu=1999 data.use_dynamic_bsz=false "
            "data.micro_batch_size_per_gpu=1",
            "",
        ),
    ],
)
def test_supervised_fine_tuning_has_the_same_kind_of_rules(tmp_path, words, expected):
    (tmp_path / "train.parquet").touch()
    base = [f"data.train_files={tmp_path}/train.parquet", "model.path=some/model"]
    config = load_config(SFTConfig, [*base, *words.split()], program="p", config_name="sft_trainer")
    if not expected:
        assert check_sft_config(config) is None
        return
    with pytest.raises(ConfigError) as caught:
        check_sft_config(config)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "of_model", "words"),
    [
        ("tensor_model_parallel_size=4", {}, "does not divide the model's num_key_value_heads=2; use a divisor of it"),
        ("pipeline_model_parallel_size=4", {}, "num_hidden_layers=6 cannot be cut into 4 equal parts"),
        (
            "pipeline_model_parallel_size=2 {0}.virtual_pipeline_model_parallel_size=2",
            {},
            "num_hidden_layers=6 cannot be cut into 4 equal parts",
        ),
        ("expert_model_parallel_size=2", {}, "the model (qwen2) has no experts; use 1"),
        (
            "expert_model_parallel_size=4",
            {"model_type": "qwen3_moe", "num_experts": 6},
            "does not divide the model's num_experts=6",
        ),
        (
            "tensor_model_parallel_size=2",
            {"model_type": "qwen3_moe", "num_experts": 6},
            "a model with experts also needs actor_rollout_ref.actor.megatron.sequence_parallel=true",
        ),
        (
            "tensor_model_parallel_size=2",
            {"model_type": "gpt2"},
            "supports the model types llama, mistral, qwen2, qwen3, qwen3_moe, not gpt2",
        ),
    ],
)
def test_a_megatron_layout_fits_the_local_model(check, tmp_path, layout, of_model, words):
    known = {
        "model_type": "qwen2",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "intermediate_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(known | of_model))
    settings = f"{MEGATRON} trainer.n_gpus_per_node=4 {{0}}.{layout}".format(LAYOUT).replace("{0}", LAYOUT)
    assert words in check(f"actor_rollout_ref.model.path={tmp_path}", *settings.split())
    fitting = (
        f"{MEGATRON} trainer.n_gpus_per_node=4 {LAYOUT}.tensor_model_parallel_size=2 "
        f"{LAYOUT}.pipeline_model_parallel_size=2"
    )
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert "megatron" not in check(f"actor_rollout_ref.model.path={tmp_path}", *fitting.split())
    overridden = "actor_rollout_ref.model.override_config={num_attention_heads:3}"
    assert "num_attention_heads=3" in check(f"actor_rollout_ref.model.path={tmp_path}", *fitting.split(), overridden)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", ""),
        ("model.path=null", "model.path=null: no model"),
        ("loss.loss_type=dop", "loss.loss_type=dop: there is no such loss; did you mean dpo?"),
        ("loss.loss_type=ipo loss.label_smoothing=0.1", "loss.label_smoothing=0.1: has no effect with"),
        ("loss.simpo_gamma=1", "loss.simpo_gamma=1.0: has no effect with loss.loss_type=dpo, only with simpo"),
        ("loss.loss_type=orpo ref.fsdp_config.param_offload=true", "loss.loss_type=orpo has no reference policy"),
        ("loss.loss_type=kto data.train_batch_size=1", "set 2 or more"),
        ("data.max_length=600 data.max_token_len_per_gpu=1199", "2 * data.max_length = 1200 tokens; raise it"),
        ("data.max_length=600 data.max_token_len_per_gpu=599", "one sequence may have data.max_length = 600 tokens"),
        ("data.max_length=600 data.max_token_len_per_gpu=600 loss.loss_type=kto", ""),
        ("trainer.lag=1", "has no effect here, only in main_ppo"),
        ("model.lora_rank=4 ref.fsdp_config.param_offload=true", "so there is no second copy to offload"),
        ("megatron.context_parallel_size=2", "has no effect with strategy=fsdp; leave it out"),
        ("strategy=megatron fsdp_config.dtype=float32", "fsdp_config.dtype=float32: has no effect with strategy=mega"),
        (
            "strategy=megatron megatron.tensor_model_parallel_size=2",
            "megatron: tensor_model_parallel_size=2 * pipeline",
        ),
        ("strategy=megatron model.lora_rank=4", ""),
    ],
)
def test_preference_learning_has_rules_of_its_own(tmp_path, words, expected):
    (tmp_path / "train.parquet").touch()
    base = [f"data.train_files={tmp_path}/train.parquet", "model.path=some/model"]
    config = load_config(DPOConfig, [*base, *words.split()], program="p", config_name="dpo_trainer")
    if not expected:
        assert check_dpo_config(config, losses=PREFERENCE_LOSSES) is None
        return
    with pytest.raises(ConfigError) as caught:
        check_dpo_config(config, losses=PREFERENCE_LOSSES)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_loss_that_reads_unknown_settings_is_refused(tmp_path):
    (tmp_path / "train.parquet").touch()
    words = [f"data.train_files={tmp_path}/train.parquet", "model.path=some/model", "loss.loss_type=own"]
    own = {"own": PreferenceLoss(lambda chosen_N, rejected_N, *, beta, temper: chosen_N)}
    with pytest.raises(ConfigError, match="loss.loss_type=own: reads temper.*section loss"):
        check_dpo_config(load_config(DPOConfig, words, program="p", config_name="dpo_trainer"), losses=own)


def test_a_reward_model_has_no_adapters(tmp_path):
    (tmp_path / "train.parquet").touch()
    words = [f"data.train_files={tmp_path}/train.parquet", "model.path=some/model"]
    config = load_config(RMConfig, words, program="p", config_name="rm_trainer")
    assert check_rm_config(config) is None
    config = load_config(RMConfig, [*words, "model.lora_rank=4"], program="p", config_name="rm_trainer")
    with pytest.raises(ConfigError, match="model.lora_rank=4: main_rm trains a new score head"):
        check_rm_config(config)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.safetensors").touch()
    config = load_config(
        RMConfig, [*words, f"model.lora_adapter_path={tmp_path}"], program="p", config_name="rm_trainer"
    )
    with pytest.raises(ConfigError, match="model.lora_adapter_path=.*: main_rm trains a new score head"):
        check_rm_config(config)


def test_a_response_beyond_the_models_positions_is_one_error_that_names_them(check, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"max_position_embeddings": 8192}')
    model = f"actor_rollout_ref.model.path={tmp_path / 'small'}"
    message = check(model, "data.max_response_length=100000")
    assert message.count("\n") == 0 and "small has 8192 positions (max_position_embeddings)" in message
    assert "a sequence has 100512 tokens" in message
    assert check(model, "data.max_response_length=7680") == ""
    (tmp_path / "small" / "config.json").write_text(
        '{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": '
        '{"type": "longrope"}}'
    )
    assert "small has 4096 positions (original_max_position_embeddings)" in check(
        model, "data.max_response_length=4000"
    )
