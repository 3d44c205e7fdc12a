"""Error messages for unknown keys: the renamed key, a reason, or the nearest one.

No other name is accepted; the tables only improve the error message. RENAMED maps a key of other frameworks to ours
with the same meaning. UNSUPPORTED gives the reason why there is none; an entry also covers the keys below it.
"""

from collections.abc import Collection
from difflib import SequenceMatcher

MIN_SIMILARITY = 0.6  # below this similarity a suggestion confuses more than it helps
MAX_SUGGESTIONS = 3

RENAMED = {
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.total_training_steps": "trainer.total_training_steps",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.model.enable_activation_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.tokenizer_path": "actor_rollout_ref.model.path",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "actor_rollout_ref.rollout.weight_sync.transport",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.weight_sync.bucket_mb"
    ),
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "actor_rollout_ref.rollout.weight_sync.bucket_mb",
    "critic.model.external_lib": "actor_rollout_ref.model.external_lib",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp_config.optimizer_offload",
    "critic.model.fsdp_config.param_offload": "critic.fsdp_config.param_offload",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.total_training_steps": "trainer.total_training_steps",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "data.micro_batch_size": "data.micro_batch_size_per_gpu",
    "data.multiturn.messages_key": "data.messages_key",
    "data.tokenizer": "actor_rollout_ref.model.path",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "model.partial_pretrain": "model.path",
    "optim.clip_grad": "grad_clip",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "reward_model.launch_reward_fn_async": "reward_model.num_processes",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward_model.model.external_lib": "actor_rollout_ref.model.external_lib",
    "reward_model.num_workers": "reward_model.num_processes",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward_model.overlong_buffer.enable",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward_model.overlong_buffer.len",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward_model.overlong_buffer.penalty_factor",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_ckpt_to_keep",
    "use_remove_padding": "model.use_remove_padding",
}

_SHARDING = "parameters are sharded over all worker processes"
_WHOLE = "a checkpoint always holds everything that resuming needs"
_ULYSSES = "sequence parallelism is not in this release"
_PROFILER = "use py-spy or torch.profiler on a worker; timings of every stage are in the metrics"
_FORWARD = "the critic's forward pass uses the same micro-batches as its update"

UNSUPPORTED = {
    "actor_rollout_ref.actor.checkpoint": _WHOLE,
    "actor_rollout_ref.actor.data_loader_seed": "trainer.seed seeds everything but the order of prompts",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "FSDP2 always prefetches",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": _SHARDING,
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "use param_offload and optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": "every decoder layer is sharded on its own",
    "actor_rollout_ref.actor.profiler": _PROFILER,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.actor.use_torch_compile": "models run uncompiled",
    "actor_rollout_ref.hybrid_engine": "actor and rollout always share their workers",
    "actor_rollout_ref.model.use_fused_kernels": "there are no fused kernels in this release",
    "actor_rollout_ref.model.use_liger": "there are no fused kernels in this release",
    "actor_rollout_ref.model.use_shm": "the model is read from its path",
    "actor_rollout_ref.nccl_timeout": "a call on workers may take trainer.call_timeout_s",
    "actor_rollout_ref.ref.strategy": "the reference policy uses actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.rollout.disable_log_stats": (
        "engine statistics are always off; generation metrics are in perf/ and timing_s/"
    ),
    "actor_rollout_ref.rollout.do_sample": (
        "training always samples; validation has actor_rollout_ref.rollout.val_kwargs.do_sample"
    ),
    "actor_rollout_ref.rollout.layered_summon_param": "weights are always sent one tensor at a time",
    "actor_rollout_ref.rollout.load_format": "the rollout's weights always come from the trainer",
    "actor_rollout_ref.rollout.over_sample_rate": (
        "set data.gen_batch_size above data.train_batch_size, and algorithm.filter_groups.order=shortest"
    ),
    "actor_rollout_ref.rollout.max_model_len": "it is data.max_prompt_length + data.max_response_length",
    "critic.checkpoint": _WHOLE,
    "critic.forward_max_token_len_per_gpu": _FORWARD,
    "critic.forward_micro_batch_size": _FORWARD,
    "critic.forward_micro_batch_size_per_gpu": _FORWARD,
    "critic.model.tokenizer_path": "there is one tokenizer, in actor_rollout_ref.model.path",
    "critic.ppo_epochs": "the critic makes as many passes as actor_rollout_ref.actor.ppo_epochs",
    "critic.rollout_n": "it is actor_rollout_ref.rollout.n",
    "critic.ulysses_sequence_parallel_size": _ULYSSES,
    "data.dataloader_num_workers": "tokenizing happens in the driver",
    "data.filter_overlong_prompts_workers": "filtering happens in the driver",
    "data.return_raw_chat": "the chat always travels with the batch",
    "data.return_raw_input_ids": "the raw prompt ids always travel with the batch",
    "data.reward_fn_key": "the column is data_source",
    "data.validation_shuffle": "validation runs in the order of the file",
    "global_profiler": _PROFILER,
    "ray_init": "start Ray yourself and set RAY_ADDRESS; the run then connects to it",
    "ray_kwargs": "start Ray yourself and set RAY_ADDRESS; the run then connects to it",
    "reward_model.enable_resource_pool": "the reward model shares the workers' devices",
    "reward_model.sandbox_fusion": "call your sandbox from custom_reward_function",
    "reward_model.strategy": "the reward model uses actor_rollout_ref.actor.strategy",
    "trainer.default_hdfs_dir": "checkpoints are written to trainer.default_local_dir; mount the remote storage there",
    "trainer.del_local_ckpt_after_load": "retention is trainer.max_ckpt_to_keep",
    "trainer.log_val_generations": "validation samples are written to trainer.validation_data_dir",
    "trainer.ray_wait_register_center_timeout": "every wait has its own timeout",
}


def suggest_key(name: str, known: Collection[str]) -> str:
    """Return the error message for a key that is not in `known`."""
    ours = RENAMED.get(name)
    if ours in known:
        return f"{name}: there is no such key; here it is {ours}"
    reason = next(
        (text for theirs, text in UNSUPPORTED.items() if name == theirs or name.startswith(theirs + ".")), None
    )
    if reason:
        return f"{name}: there is no such key here: {reason}"
    near = nearest_names(name, known)
    return f"{name}: there is no such key" + (
        f"; did you mean {' or '.join(near)}?" if near else "; --help lists all keys"
    )


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Return up to three names of `known` that are most similar to `name`.

    Names with the same last part come first, then similarity of the whole name decides.
    """
    leaf = name.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        same_leaf = candidate.rpartition(".")[2] == leaf
        return same_leaf + SequenceMatcher(None, name, candidate).ratio()

    ranked = sorted(known, key=likeness, reverse=True)[:MAX_SUGGESTIONS]
    best = likeness(ranked[0]) if ranked else 0.0
    return [candidate for candidate in ranked if likeness(candidate) >= max(MIN_SIMILARITY, best - 0.1)]


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return the hint for an unregistered plugin name: the nearest name, and all known ones."""
    near = nearest_names(name, known)
    return (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(sorted(known))}"
