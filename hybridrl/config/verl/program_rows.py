"""Rows for verl's keys of data, rewards, algorithm, trainer, launcher, and of supervised fine-tuning.

Read with the names of verl 0.4 to 0.9. Values are those of verl's own defaults and published commands.
"""

from hybridrl.config.verl.row import Row, done, elsewhere, no_effect, refused, renamed
from hybridrl.config.verl.worker_rows import MODEL, PROFILER

_RAY = "start Ray yourself and set RAY_ADDRESS; the run then connects to it"
_DRIVER = "prompts are tokenized and filtered in the driver"
_ENGINE = "a reward model is scored in the training engine, on whole prompts and responses"
_OWN_PROCESSES = "rewards are computed in processes of their own"
_AHEAD = "generation runs ahead with trainer.lag and a rollout pool of its own"
REWARD = "{reward,reward_model}"

DATA_ROWS: tuple[Row, ...] = (
    done("data.{return_raw_chat,return_raw_input_ids,return_full_prompt}", "prompts are kept whole"),
    renamed("data.trust_remote_code", f"{MODEL}.trust_remote_code"),
    done("data.tokenizer", "the tokenizer is the policy's", "null"),
    done("data.tokenizer", "the tokenizer is the policy's", same_as=f"{MODEL}.path"),
    refused("data.tokenizer", "put the tokenizer into the directory of actor_rollout_ref.model.path"),
    done("data.reward_fn_key", "the column is data_source", "data_source"),
    refused("data.reward_fn_key", "the column that selects the reward is data_source; rename yours"),
    no_effect("data.{filter_overlong_prompts_workers,dataloader_num_workers,use_shm}", _DRIVER),
    done("data.validation_shuffle", "the order of validation changes no figure"),
    done("data.{video_key,audio_key}", "datasets with videos or audio are refused when they are read"),
    done("data.{image_patch_size,return_multi_modal_inputs}", "patches are those of the model's image processor"),
    done("data.{tool_config_path,datagen.path,datagen.name}", "there is none", "null"),
    done("data.need_tools_kwargs", "tools get a row's extra_info.tools_kwargs where it has them"),
    refused("data.{tool_config_path,datagen}", "this is not in this release; leave it out"),
)

REWARD_ROWS: tuple[Row, ...] = (
    renamed(f"{REWARD}.num_workers", "reward_model.num_processes"),
    renamed(
        "{reward.reward_manager.name,reward_model.reward_manager}",
        "reward_model.reward_manager",
        when=("naive", "dapo", "batch", "prime", "gdpo"),
        values={"prime": "naive", "gdpo": "naive"},
    ),
    done("reward.reward_manager.source", "reward managers have registered names", "register"),
    done("reward.reward_manager.module.{path,name}", "there is none", "null", "custom_reward_manager"),
    refused(
        "reward.reward_manager", "known are naive, dapo and batch; your own: reward_model.reward_manager=path.py:Name"
    ),
    *(
        renamed(f"{REWARD}.reward_kwargs.overlong_buffer_cfg.{name}", f"reward_model.overlong_buffer.{name}")
        for name in ("enable", "len", "penalty_factor")
    ),
    elsewhere(f"{REWARD}.reward_kwargs.overlong_buffer_cfg.log", "scores are logged"),
    done(f"{REWARD}.reward_kwargs.max_resp_len", "it is the longest response", same_as="data.max_response_length"),
    refused(f"{REWARD}.reward_kwargs.max_resp_len", "it is data.max_response_length; set that"),
    done(f"{REWARD}.reward_kwargs", "nothing is given", "{}", "null"),
    refused(f"{REWARD}.reward_kwargs", "set arguments of your own function: custom_reward_function.kwargs"),
    *(renamed(f"reward.custom_reward_function.{name}", f"custom_reward_function.{name}") for name in ("path", "name")),
    renamed("{reward.,}custom_reward_function.reward_kwargs", "custom_reward_function.kwargs"),
    renamed("reward.reward_model.enable", "reward_model.enable"),
    renamed("{reward.reward_model,reward_model}.model_path", "reward_model.model.path"),
    done("reward_model.use_reward_loop", _OWN_PROCESSES),
    no_effect("{reward.,}reward_model.{inference,rollout,enable_resource_pool,n_gpus_per_node,nnodes}", _ENGINE),
    no_effect("reward_model.{launch_reward_fn_async,use_dynamic_bsz,forward_prefetch}", _OWN_PROCESSES),
    renamed("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu", convert="per_process"),
    no_effect("reward_model.model.{fsdp_config,use_remove_padding,use_rmpad,use_fused_kernels,use_shm}", _ENGINE),
    done("reward_model.{strategy,ulysses_sequence_parallel_size}", "the reward model uses the actor's engine"),
    elsewhere("reward_model.{megatron,profiler}", "the reward model uses the actor's engine"),
    done("reward_model.model.{external_lib,trust_remote_code}", "they are the policy's", "null", "false"),
    renamed("reward_model.model.external_lib", f"{MODEL}.external_lib"),
    renamed("reward_model.model.trust_remote_code", f"{MODEL}.trust_remote_code"),
    done("reward_model.model.input_tokenizer", "the reward model reads with its own tokenizer", "null"),
    done("reward_model.{reward_loop_source,reward_loop_module_path,reward_loop_class_name}", "there is none", "null"),
    *(
        renamed(f"{{sandbox_fusion,reward.sandbox_fusion}}.{name}", f"reward_model.sandbox_fusion.{name}")
        for name in ("url", "max_concurrent", "memory_limit_mb")
    ),
)

TRAINER_ROWS: tuple[Row, ...] = (
    renamed("trainer.{max_actor_ckpt_to_keep,max_critic_ckpt_to_keep}", "trainer.max_ckpt_to_keep"),
    renamed("trainer.remove_previous_ckpt_in_save", "trainer.max_ckpt_to_keep", when=("true",), values={"true": 1}),
    done("trainer.remove_previous_ckpt_in_save", "all checkpoints are kept", "false"),
    elsewhere("trainer.default_hdfs_dir", "nothing is copied", "null"),
    refused("trainer.default_hdfs_dir", "checkpoints are in trainer.default_local_dir; mount the remote storage there"),
    elsewhere("trainer.del_local_ckpt_after_load", "retention is trainer.max_ckpt_to_keep"),
    elsewhere(
        "trainer.{log_val_generations,log_train_generations}", "samples are written to trainer.validation_data_dir"
    ),
    elsewhere(
        "trainer.{ray_wait_register_center_timeout,esi_redundant_time,rollout_data_dir_name}",
        "every wait has its own timeout",
    ),
    done("trainer.checkpoint_callback_class", "there is none", "null"),
    renamed("trainer.logger", "trainer.logger", convert="known_loggers"),
    done("trainer.device", "the device is found", "gpu"),
    done("trainer.use_v1", "there is one trainer"),
    done("trainer.use_legacy_worker_impl", "there is one implementation"),
    done("trainer.v1.trainer_mode", "generation and training take turns", "sync"),
    refused("trainer.v1.trainer_mode", f"{_AHEAD}; leave it out"),
    done("trainer.v1.sampler.custom_sampler", "there is none", "null"),
    done("trainer.v1.separate_async.hybrid_rollout.enable_switch", "the trainer's devices only train", "false"),
    refused("trainer.v1", f"{_AHEAD}; leave it out"),
    elsewhere("{ray_kwargs,ray_init}", _RAY),
    elsewhere("global_profiler", PROFILER),
    elsewhere("transfer_queue", "tensors travel through Ray's object store"),
    done("skip.{rollout,rollout_tq,async_rollout}.enable", "every step generates", "false"),
    refused("skip", "every step generates; leave it out"),
    refused("{rollout,async_training}", f"{_AHEAD}: actor_rollout_ref.rollout.n_gpus_per_node; leave it out"),
    refused(
        "distillation.{teacher_backend,teacher_chunk_size,teacher_fsdp_config}",
        "teachers always run in the training engine, and reverse_kl_topk compares the teacher's most likely tokens "
        "instead of the student's; leave it out",
    ),
    no_effect("algorithm.filter_groups.max_inflight_gen_batches", "one generation batch runs at a time"),
)

SFT_ROWS: tuple[Row, ...] = (
    renamed("engine", "strategy", when=("fsdp", "fsdp2", "megatron"), values={}),
    refused("engine", "engines are fsdp and megatron; set strategy"),
    renamed("data.micro_batch_size", "data.micro_batch_size_per_gpu", convert="per_process"),
    renamed("data.multiturn.messages_key", "data.messages_key"),
    renamed("model.partial_pretrain", "model.path"),
    renamed("optim.clip_grad", "grad_clip"),
    renamed("optim.{lr_scheduler,warmup_style,lr_decay_style}", "optim.lr_scheduler_type"),
    renamed("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    renamed("use_remove_padding", "model.use_remove_padding"),
    renamed("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
)

PROGRAM_ROWS = (*DATA_ROWS, *REWARD_ROWS, *TRAINER_ROWS, *SFT_ROWS)
