"""Rows for verl's keys of models and workers: `actor_rollout_ref`, `critic`, `reward_model`.

Read with the names of verl 0.4 to 0.9. Values are those of verl's own defaults and published commands.
"""

from hybridrl.config.verl.row import Row, RowKind, done, elsewhere, expanded, no_effect, refused, renamed

POLICY, CRITIC = "actor_rollout_ref", "critic"
ACTOR, REF, ROLLOUT, MODEL = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout", f"{POLICY}.model"
TRAINED = "{actor_rollout_ref.actor,critic}"
ROLES = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}"
MODELS = "{actor_rollout_ref.model,critic.model}"
OTHERS_FSDP = "{actor_rollout_ref.ref.fsdp_config,critic.fsdp_config,critic.fsdp,critic.model.fsdp_config}"
FSDP = f"{{actor_rollout_ref.actor.fsdp_config,{OTHERS_FSDP[1:]}"
DTYPES = {"bf16": "bfloat16", "torch.bfloat16": "bfloat16", "fp32": "float32", "torch.float32": "float32"}
MEGATRON = f"{ROLES}.megatron"
LAYOUT = (
    "{tensor_model_parallel_size,pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,"
    "context_parallel_size,expert_model_parallel_size,sequence_parallel,use_distributed_optimizer,dtype}"
)

_CORE = "megatron.override_transformer_config"
_FULL = {"when": ("full",), "values": {"full": True}}
_BALANCE = "moe_aux_loss_coeff,moe_z_loss_coeff,moe_router_bias_update_rate,moe_router_load_balancing_type"
_DIVISIONS = "data_parallel_size,expert_parallel_size,pipeline_model_parallel_size"
_SHARDED = "parameters are sharded over all worker processes"
_ULYSSES = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
_FOLLOW = "reference policy and critic share sequences as the actor does"
_GRIDS = "weights are quantised to fp8, int8 or int4, in blocks of 128 x 128: actor_rollout_ref.rollout.quantization"
_COMPILE = "models run uncompiled"
_KERNELS = "there are no fused kernels in this release"
_ENTROPY = "log-probs and entropy are computed in parts, and again in the backward pass"
_CHUNK = f"{ACTOR}.entropy_from_logits_chunk_size"
_ALL_ALIKE = "all models of a run compute log-probs as actor_rollout_ref.model.use_fused_kernels says"
_WHOLE = "a checkpoint always holds everything that resuming needs; hybridrl export writes Hugging Face files"
_SPEED = "speed and memory of Megatron's kernels and pipeline"
_BRIDGE = "weights are always converted from and to Hugging Face's"
_FORWARD = "the critic's forward pass uses the same micro-batches as its update"
PROFILER = "use py-spy or torch.profiler on a worker; timings of every stage are in the metrics"
_OFFLOADED = "the optimizer's state is offloaded whole, between updates, by optimizer_offload"
_VALUE_ADAPTERS = "the critic is trained in full; leave it out"
_ONE_TOKENIZER = "the tokenizer is the policy's; put it into the directory of actor_rollout_ref.model.path"

ENGINES: tuple[Row, ...] = (
    renamed("model_engine", f"{ACTOR}.strategy", f"{CRITIC}.strategy", when=("megatron",)),
    done("{model_engine,actor_rollout_ref.actor.model_engine}", "FSDP2 is the default engine", "dp", "fsdp"),
    done(f"{ACTOR}.model_engine", "it is the engine of strategy", same_as=f"{ACTOR}.strategy"),
    refused("model_engine", "engines are fsdp and megatron, or one of your own; set actor_rollout_ref.actor.strategy"),
    done(f"{REF}.strategy", "the reference policy uses the actor's engine", same_as=f"{ACTOR}.strategy"),
    done(f"{REF}.strategy", "the reference policy uses the actor's engine", "fsdp", "fsdp2"),
    refused(
        f"{{{ACTOR},{REF},{CRITIC}}}.{{veomni,torchtitan,automodel,mindspeed}}",
        "engines are fsdp and megatron, or one of your own; set actor_rollout_ref.actor.strategy",
    ),
    refused(f"{REF}.strategy", "the reference policy uses actor_rollout_ref.actor.strategy; leave it out"),
)

FSDP_ROWS: tuple[Row, ...] = (
    renamed("critic.{fsdp,model.fsdp_config,megatron}.param_offload", "critic.fsdp_config.param_offload"),
    renamed("critic.{fsdp,model.fsdp_config,megatron}.optimizer_offload", "critic.fsdp_config.optimizer_offload"),
    done(f"{FSDP}.model_dtype", "weights and optimizer state are float32", "fp32", "float32"),
    no_effect(f"{FSDP}.model_dtype", "weights and optimizer state are float32, computation is in bfloat16 on CUDA"),
    renamed(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{ACTOR}.fsdp_config.dtype", values=DTYPES),
    done(f"{FSDP}.mixed_precision", "gradients are reduced in float32, and others compute as the actor does"),
    renamed(f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.dtype", when=tuple(DTYPES), values=DTYPES),
    done(f"{OTHERS_FSDP}.dtype", "others compute as the actor does", same_as=f"{ACTOR}.fsdp_config.dtype"),
    no_effect(f"{OTHERS_FSDP}.dtype", "others compute in the actor's dtype, actor_rollout_ref.actor.fsdp_config.dtype"),
    done(f"{FSDP}.offload_policy", "nothing is offloaded unless param_offload says so", "false"),
    renamed(
        f"{ACTOR}.fsdp_config.offload_policy",
        f"{ACTOR}.fsdp_config.param_offload",
        f"{ACTOR}.fsdp_config.optimizer_offload",
    ),
    renamed(f"{REF}.fsdp_config.offload_policy", f"{REF}.fsdp_config.param_offload"),
    done(f"{FSDP}.fsdp_size", _SHARDED, "-1"),
    no_effect(f"{FSDP}.fsdp_size", _SHARDED),
    done(f"{FSDP}.{{wrap_policy,use_orig_params}}", "every decoder layer is sharded on its own"),
    no_effect(f"{FSDP}.forward_prefetch", "FSDP2 always prefetches"),
    no_effect(f"{FSDP}.{{grad_offload,use_no_sync_for_gradient_accumulation}}", "gradients stay on the device"),
    no_effect(f"{FSDP}.reshard_after_forward", "reference policy and critic free gathered parameters as the actor"),
    done(f"{FSDP}.{{seed,full_determinism}}", "trainer.seed seeds everything, and every run is repeatable"),
    no_effect(f"{FSDP}.{{use_torch_compile,turbo_config}}", _COMPILE),
    done(f"{FSDP}.{{forward_only,strategy}}", "it follows from the role"),
    done(f"{{{FSDP[1:-1]},{ACTOR}}}.qat.enable", "there is no quantization-aware training", "false"),
    refused(f"{{{FSDP[1:-1]},{ACTOR}}}.qat", "there is no quantization-aware training in this release; leave it out"),
    no_effect(f"{FSDP}.{{pad_to_length,pad_to_length_bucket}}", "sequences are packed or sorted"),
    renamed(f"{ACTOR}.fsdp_config.entropy_from_logits_chunk_size", _CHUNK),
    done(f"{FSDP}.{{entropy_from_logits_with_chunking,entropy_checkpointing}}", _ENTROPY),
    no_effect(f"{FSDP}.entropy_from_logits_chunk_size", "other models use the actor's"),
    renamed(f"{ACTOR}.ulysses_sequence_parallel_size", _ULYSSES),
    done(f"{{{OTHERS_FSDP[1:-1]},{REF},{CRITIC}}}.ulysses_sequence_parallel_size", _FOLLOW, same_as=_ULYSSES),
    no_effect(f"{{{OTHERS_FSDP[1:-1]},{REF},{CRITIC}}}.ulysses_sequence_parallel_size", _FOLLOW),
)

MEGATRON_ROWS: tuple[Row, ...] = (
    *(
        row
        for name in LAYOUT[1:-1].split(",")
        for row in (
            done(
                f"{{{REF},{CRITIC}}}.megatron.{name}",
                "reference policy and critic have the actor's layout",
                same_as=f"{ACTOR}.megatron.{name}",
            ),
            no_effect(f"{{{REF},{CRITIC}}}.megatron.{name}", f"reference policy and critic have the actor's {name}"),
        )
    ),
    renamed(f"{REF}.megatron.param_offload", f"{REF}.fsdp_config.param_offload"),
    done(f"{MEGATRON}.grad_offload", "gradients stay on the device", "false"),
    no_effect(f"{MEGATRON}.grad_offload", "gradients stay on the device"),
    done(f"{MEGATRON}.expert_tensor_parallel_size", "experts are whole", "1", "null"),
    no_effect(f"{MEGATRON}.expert_tensor_parallel_size", "experts are whole, not cut by tensor parallelism"),
    done(f"{MEGATRON}.{{use_mbridge,vanilla_mbridge}}", _BRIDGE),
    done(f"{MEGATRON}.{{use_dist_checkpointing,dist_checkpointing_path}}", "weights are read from model.path"),
    done(f"{MEGATRON}.{{seed,forward_only,load_weight,override_mcore_model_config}}", "it follows from other settings"),
    renamed(f"{ACTOR}.megatron.use_remove_padding", f"{MODEL}.use_remove_padding"),
    renamed(f"{ACTOR}.{_CORE}.recompute_granularity", f"{MODEL}.enable_gradient_checkpointing", **_FULL),
    renamed(f"{CRITIC}.{_CORE}.recompute_granularity", f"{CRITIC}.model.enable_gradient_checkpointing", **_FULL),
    no_effect(
        f"{ROLES}.{_CORE}.{{recompute_granularity,recompute_method,recompute_num_layers,recompute_modules}}",
        "activations of every layer are recomputed, or none: model.enable_gradient_checkpointing",
    ),
    done(f"{MEGATRON}.override_transformer_config.moe_router_dtype", "the router computes in float32", "fp32"),
    done(f"{ROLES}.{_CORE}.{{{_BALANCE}}}", "there is no auxiliary loss", "0", "null", "none"),
    refused(
        f"{ROLES}.{_CORE}.{{{_BALANCE}}}",
        "the router has no auxiliary loss in this release; set it to 0 or leave it out",
    ),
    no_effect(
        f"{MEGATRON}.override_transformer_config.{{moe_permute_fusion,moe_grouped_gemm,moe_token_dispatcher_type,"
        "moe_enable_deepep,moe_shared_expert_overlap,moe_flex_dispatcher_backend,moe_pad_expert_input_to_capacity,"
        "apply_rope_fusion,gradient_accumulation_fusion,use_flash_attn,use_fused_rotary_pos_emb,use_fused_swiglu,"
        "use_fused_rmsnorm,attention_backend,num_layers_in_first_pipeline_stage,num_layers_in_last_pipeline_stage,"
        "account_for_loss_in_pipeline_split,account_for_embedding_in_pipeline_split,pipeline_model_parallel_layout,"
        "masked_softmax_fusion,bias_activation_fusion,bias_dropout_fusion,cross_entropy_loss_fusion,"
        "cross_entropy_fusion_impl,deallocate_pipeline_outputs,persist_layer_norm,variable_seq_lengths,"
        "overlap_p2p_comm,batch_p2p_comm,cp_comm_type,context_parallel_size,tensor_model_parallel_size,"
        "sequence_parallel,swap_optimizer,distribute_saved_activations,fine_grained_activation_offloading}",
        _SPEED,
    ),
    done(f"{MEGATRON}.override_transformer_config", "nothing is overridden", "{}", "null"),
    refused(
        f"{MEGATRON}.override_transformer_config",
        "Megatron's transformer settings follow the model's own config; set actor_rollout_ref.model.override_config",
    ),
    no_effect(f"{MEGATRON}.override_ddp_config", "speed of Megatron's gradient reduction"),
    done(f"{MEGATRON}.use_megatron_fsdp", "Megatron's own sharding is the distributed optimizer's", "false"),
)

OPTIMIZER_ROWS: tuple[Row, ...] = (
    *(renamed(f"{role}.optim.clip_grad", f"{role}.grad_clip") for role in (ACTOR, CRITIC)),
    *(
        renamed(f"{role}.optim.{{warmup_style,lr_decay_style}}", f"{role}.optim.lr_scheduler_type")
        for role in (ACTOR, CRITIC)
    ),
    done(f"{TRAINED}.optim.{{total_training_steps,lr_decay_steps}}", "schedules end with the run's last step"),
    done(f"{TRAINED}.optim.optimizer", "the optimizer is AdamW", "adamw", "adam"),
    done(f"{TRAINED}.optim.optimizer_impl", "the optimizer is torch's AdamW", "torch.optim"),
    refused(f"{TRAINED}.optim.{{optimizer,optimizer_impl}}", "the optimizer is AdamW; leave it out"),
    done(f"{TRAINED}.optim.num_cycles", "cosine is half a cycle", "0.5"),
    done(f"{TRAINED}.optim.{{lr_warmup_init,min_lr}}", "warm-up starts above 0, decay ends at min_lr_ratio", "0"),
    refused(f"{TRAINED}.optim.min_lr", "the final learning rate is a share of the peak; set optim.min_lr_ratio"),
    refused(f"{TRAINED}.optim.{{num_cycles,lr_warmup_init}}", "the schedule has no such choice; leave it out"),
    done(f"{TRAINED}.optim.{{weight_decay_incr_style,lr_wsd_decay_style}}", "weight decay is constant", "constant"),
    done(f"{TRAINED}.optim.use_checkpoint_opt_param_scheduler", "a resumed run continues its schedule"),
    no_effect(
        f"{TRAINED}.optim.override_optimizer_config.{{optimizer_cpu_offload,optimizer_offload_fraction,"
        "overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer}",
        _OFFLOADED,
    ),
    done(f"{TRAINED}.optim.override_optimizer_config", "nothing is overridden", "{}", "null"),
    refused(f"{TRAINED}.optim.override_optimizer_config", "AdamW has the settings of section optim; leave it out"),
)

ACTOR_ROWS: tuple[Row, ...] = (
    refused(f"{ACTOR}.policy_loss.cppo", "CPPO is not in this release; loss_mode=dppo_tv has one limit for all tokens"),
    renamed(f"{ACTOR}.tau_pos", f"{ACTOR}.policy_loss.tau_pos"),
    renamed(f"{ACTOR}.tau_neg", f"{ACTOR}.policy_loss.tau_neg"),
    renamed(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_low", convert="at_most_one"),
    done(f"{ACTOR}.use_token_level_loss", "tokens are averaged over the batch", "true"),
    refused(f"{ACTOR}.use_token_level_loss", "set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
    done(f"{ACTOR}.calculate_entropy", "the entropy is always among the metrics"),
    *(
        renamed(key, f"{key}_per_gpu", convert="per_process")
        for name in (f"{TRAINED}.ppo_micro_batch_size", f"{{{REF},{ROLLOUT}}}.log_prob_micro_batch_size")
        for key in expanded(name)
    ),
    no_effect(
        "critic.{forward_micro_batch_size_per_gpu,forward_micro_batch_size,forward_max_token_len_per_gpu}", _FORWARD
    ),
    done(f"{TRAINED}.data_loader_seed", "trainer.seed seeds everything but the order of prompts"),
    done(f"{{{ACTOR},{REF},{CRITIC}}}.rollout_n", "it is actor_rollout_ref.rollout.n", same_as=f"{ROLLOUT}.n"),
    done("critic.ppo_epochs", "the critic makes as many passes as the actor", same_as=f"{ACTOR}.ppo_epochs"),
    refused("critic.ppo_epochs", "the critic makes as many passes as actor_rollout_ref.actor.ppo_epochs; leave it out"),
    done("critic.{loss_agg_mode,shuffle}", "the critic follows the actor", "token-mean", "false"),
    no_effect(f"{ROLES}.use_torch_compile", _COMPILE),
    renamed(f"{ACTOR}.use_fused_kernels", f"{MODEL}.use_fused_kernels"),
    no_effect(f"{ROLES}.use_fused_kernels", _ALL_ALIKE),
    done(f"{REF}.use_prefix_grouper", "it is the actor's", same_as=f"{ACTOR}.use_prefix_grouper"),
    no_effect("{actor_rollout_ref.ref,critic}.use_prefix_grouper", "actor.use_prefix_grouper is the whole policy's"),
    done(f"{ROLES}.{{entropy_from_logits_with_chunking,entropy_checkpointing}}", _ENTROPY),
    no_effect(f"{{{REF},{CRITIC}}}.entropy_from_logits_chunk_size", "other models use the actor's"),
    no_effect(f"{ROLES}.{{pad_to_length,pad_to_length_bucket}}", "sequences are packed or sorted"),
    done(f"{ACTOR}.use_remove_padding", "it is the model's", same_as=f"{MODEL}.use_remove_padding"),
    elsewhere(f"{ROLES}.checkpoint", _WHOLE),
    elsewhere("{actor_rollout_ref.actor,actor_rollout_ref.ref,actor_rollout_ref.rollout,critic}.profiler", PROFILER),
    renamed(f"{ACTOR}.{{megatron,veomni,fsdp_config}}.router_replay.mode", f"{ACTOR}.router_replay.mode"),
    done(f"{ROLES}.router_replay.{{record_file,replay_file}}", "routes are not stored in files", "null"),
    refused(f"{ROLES}.router_replay.{{record_file,replay_file}}", "routes are not stored in files; leave it out"),
    done("{actor_rollout_ref.ref,critic}.router_replay.mode", "only the actor replays experts", "disabled"),
    refused("{actor_rollout_ref.ref,critic}.router_replay", "only the actor replays experts; leave it out"),
    done(f"{REF}.model", "the reference policy is the policy at the start", "null"),
    refused(f"{REF}.model", "the reference policy is the policy at the start; leave it out"),
    done(f"{POLICY}.hybrid_engine", "actor and rollout share their workers", "true"),
    refused(
        f"{POLICY}.hybrid_engine", "set actor_rollout_ref.rollout.n_gpus_per_node to give the rollout its own pool"
    ),
    elsewhere(f"{POLICY}.nccl_timeout", "a call on workers may take trainer.call_timeout_s"),
)

MODEL_ROWS: tuple[Row, ...] = (
    *(renamed(f"{model}.use_rmpad", f"{model}.use_remove_padding") for model in (MODEL, "critic.model")),
    renamed(f"{MODEL}.enable_activation_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    renamed("critic.model.external_lib", f"{MODEL}.external_lib"),
    done("critic.model.trust_remote_code", "it is the policy's", same_as=f"{MODEL}.trust_remote_code"),
    renamed("critic.model.trust_remote_code", f"{MODEL}.trust_remote_code"),
    done(f"{MODELS}.tokenizer_path", "the tokenizer is the policy's", "null"),
    done(f"{MODELS}.tokenizer_path", "the tokenizer is the policy's", same_as=f"{MODEL}.path"),
    refused(f"{MODELS}.tokenizer_path", _ONE_TOKENIZER),
    done(f"{MODELS}.{{hf_config_path,custom_chat_template}}", "they are read from the model's directory", "null"),
    refused(f"{MODELS}.custom_chat_template", "write it into the tokenizer's directory, as chat_template.jinja"),
    refused(f"{MODELS}.hf_config_path", "the model's config is read from actor_rollout_ref.model.path"),
    elsewhere(f"{MODELS}.use_shm", "the model is read from its path"),
    no_effect("critic.model.use_fused_kernels", _ALL_ALIKE),
    no_effect(f"{MODELS}.{{use_liger,fused_kernel_options,tiled_mlp}}", _KERNELS),
    no_effect(f"{MODELS}.enable_activation_offload", "activations stay on the device or are recomputed"),
    done(f"{MODELS}.{{exclude_modules,lora.exclude_modules}}", "no layer is left out", "null", "[]"),
    refused(f"{MODELS}.{{exclude_modules,lora.exclude_modules}}", "name the layers in model.target_modules"),
    done(f"{MODELS}.mtp.enable", "there is no multi-token prediction", "false"),
    refused(f"{MODELS}.mtp", "multi-token prediction is not trained in this release; leave it out"),
    done("critic.model.{lora_rank,lora.rank}", "the critic is trained in full", "0"),
    refused("critic.model.{lora_rank,lora_alpha,lora_adapter_path,target_modules,lora}", _VALUE_ADAPTERS),
    *(renamed(f"{MODEL}.lora.{name}", f"{MODEL}.lora_{name}") for name in ("rank", "alpha", "adapter_path")),
    done(f"{MODEL}.lora.merge", "rollouts get merged weights", "true"),
    no_effect(
        f"{MODEL}.lora.merge",
        "rollouts get merged weights; actor_rollout_ref.rollout.weight_sync.lora=adapter sends the adapters alone",
    ),
    done(f"{MODEL}.lora.type", "adapters are LoRA's", "lora"),
    done(f"{MODEL}.lora.lora_A_init_method", "A starts as Kaiming's uniform", "kaiming"),
    done(f"{MODEL}.lora.lora_B_init_method", "B starts at zero", "zero"),
    done(f"{MODEL}.lora.dropout", "adapters have no dropout", "0"),
    done(f"{MODEL}.lora.dtype", "adapters are float32", "null"),
    done(
        f"{MODEL}.lora.{{freeze_vision_model,freeze_vision_projection,freeze_language_model}}", "adapters train alone"
    ),
    done(
        f"{MODEL}.lora.target_modules",
        "all linear layers have adapters",
        "[linear_qkv,linear_proj,linear_fc1,linear_fc2]",
        "all-linear",
    ),
    refused(
        f"{MODEL}.lora.target_modules", "name them as Hugging Face does, in actor_rollout_ref.model.target_modules"
    ),
    refused(f"{MODEL}.lora", "adapters have lora_rank, lora_alpha, target_modules and lora_adapter_path; leave it out"),
)

ROLLOUT_ROWS: tuple[Row, ...] = (
    renamed(f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
    renamed(f"{ROLLOUT}.response_length", "data.max_response_length"),
    renamed(f"{ROLLOUT}.seed", "trainer.seed"),
    renamed(
        f"{ROLLOUT}.{{checkpoint_engine.update_weights_bucket_megabytes,update_weights_bucket_megabytes}}",
        f"{ROLLOUT}.weight_sync.bucket_mb",
    ),
    no_effect(f"{ROLLOUT}.checkpoint_engine", "weight_sync.transport=auto chooses how weights are sent"),
    done(f"{ROLLOUT}.max_model_len", "the engine takes prompt and response", "null"),
    Row(f"{ROLLOUT}.max_model_len", RowKind.DONE, "the engine takes prompt and response", convert="covers_lengths"),
    refused(f"{ROLLOUT}.max_model_len", "it is data.max_prompt_length + data.max_response_length; lower these"),
    done(f"{ROLLOUT}.{{{_DIVISIONS}}}", "it is 1", "1"),
    no_effect(f"{ROLLOUT}.{{{_DIVISIONS}}}", "an engine is divided by tensor_model_parallel_size alone"),
    renamed(f"{ROLLOUT}.enable_prefix_caching", f"{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching"),
    done(f"{ROLLOUT}.cudagraph_capture_sizes", "vLLM chooses", "null"),
    no_effect(f"{ROLLOUT}.cudagraph_capture_sizes", "vLLM chooses the batch sizes of its CUDA graphs"),
    no_effect(f"{ROLLOUT}.{{scheduling_policy,multi_stage_wake_up}}", "vLLM's default"),
    done(f"{ROLLOUT}.{{load_format,layered_summon,layered_summon_param}}", "weights always come from the trainer"),
    elsewhere(f"{ROLLOUT}.{{disable_log_stats,trace}}", "generation metrics are in perf/ and timing_s/"),
    done(
        f"{ROLLOUT}.{{skip_tokenizer_init,full_determinism,router_config_path}}", "prompts and responses are token ids"
    ),
    done(f"{ROLLOUT}.do_sample", "training always samples", "true"),
    refused(
        f"{ROLLOUT}.do_sample", "training always samples; validation has actor_rollout_ref.rollout.val_kwargs.do_sample"
    ),
    done(f"{ROLLOUT}.logprobs_mode", "log-probs are those of the sampled distribution", "processed_logprobs"),
    refused(f"{ROLLOUT}.logprobs_mode", "log-probs are those of the sampled distribution; leave it out"),
    done(f"{ROLLOUT}.over_sample_rate", "nothing is generated beyond the batch", "0"),
    refused(
        f"{ROLLOUT}.over_sample_rate",
        "set data.gen_batch_size above data.train_batch_size, and algorithm.filter_groups.order=tail_batching",
    ),
    elsewhere(f"{ROLLOUT}.moe_load_balance_metrics_interval", "the load of experts is logged with router_replay.mode"),
    done(f"{ROLLOUT}.{{quantization,quantization_config_file,limit_images,mtp}}", "there is none", "null"),
    done(f"{ROLLOUT}.mtp.enable", "there is no multi-token prediction", "false"),
    refused(f"{ROLLOUT}.quantization", _GRIDS, "torchao", "ascend"),
    refused(f"{ROLLOUT}.quantization_config_file", _GRIDS),
    renamed(f"{ROLLOUT}.limit_images", "data.max_images_per_prompt"),
    refused(f"{ROLLOUT}.{{mtp,disaggregation}}", "this is not in this release; leave it out"),
    elsewhere(f"{ROLLOUT}.agent.num_workers", "the router has no workers of its own"),
    done(f"{ROLLOUT}.agent.{{agent_loop_config_path,custom_async_server}}", "there is none", "null"),
    refused(
        f"{ROLLOUT}.agent.agent_loop_config_path",
        "register the loop in a Python file: actor_rollout_ref.rollout.agent.path",
    ),
    done(f"{ROLLOUT}.multi_turn.enable", "a response has one turn", "false"),
    renamed(f"{ROLLOUT}.multi_turn.enable", f"{ROLLOUT}.mode", values={"true": "async"}),
    done(f"{ROLLOUT}.multi_turn.{{tool_config_path,max_user_turns,num_repeat_rollouts}}", "there is none", "null"),
    done(f"{ROLLOUT}.multi_turn.format", "tools are called as Hermes and Qwen models do", "hermes"),
    refused(
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"tools are Python functions; name their file in {ROLLOUT}.multi_turn.function_tool_path",
    ),
    refused(f"{ROLLOUT}.multi_turn", "write an agent loop of your own: actor_rollout_ref.rollout.agent.path"),
    renamed(f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.do_sample", when=("0",), values={"0": False}),
)

WORKER_ROWS = (*ENGINES, *FSDP_ROWS, *MEGATRON_ROWS, *OPTIMIZER_ROWS, *ACTOR_ROWS, *MODEL_ROWS, *ROLLOUT_ROWS)
