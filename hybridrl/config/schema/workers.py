"""Settings of the worker roles: model, engine, optimizer, actor, reference, rollout, critic, reward model.

Keys and defaults follow verl where verl has them. "per_gpu" means per worker process, whatever its device.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from hybridrl.config.fields import MAX_NODES, MAX_SLOTS, plug, section, setting
from hybridrl.config.plugs import ENGINES, REWARD_MANAGERS
from hybridrl.config.schema.engine import EngineSettings

MICRO = "Rows of one micro-batch per process; null means as many as fit its token budget."
DYNAMIC = "Cut micro-batches by token budget and ignore the number of rows."
BUDGET = "Token budget of one micro-batch per process, a hard cap, used unless rows are set."
MCORE = "Takes effect with strategy=megatron only."
SHAPES = "Log-probs are computed without it."
KL_KINDS = tuple(kind + suffix for suffix in ("", "+") for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"))
QUANTIZATION = ("fp8", "int8", "int4")
PATH_OR_NULL = "Directory, Hugging Face name or GGUF file of the model"


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = setting(None, f"{PATH_OR_NULL}, with its tokenizer.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")
    external_lib: list[str] = setting(
        [], "Python files or modules that register models; imported in every process before a model is loaded."
    )
    override_config: dict = setting({}, "Values that replace entries of the model's own config.", free=True)
    enable_gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    use_remove_padding: bool = setting(False, "Pack sequences end to end instead of sorting and padding them.")
    use_fused_kernels: bool = setting(
        True, "Compute log-probs and entropy from hidden states in parts, so that logits never exist whole."
    )
    lora_rank: int = setting(
        0, "Rank of LoRA adapters, which are then all that is trained; 0: none. Rollouts get merged weights.", ge=0
    )
    lora_alpha: float = setting(16.0, "Adapters are scaled by lora_alpha / lora_rank.", gt=0)
    target_modules: list[str] = setting(
        ["all-linear"], "Last names of the linear layers that get adapters, or all-linear."
    )
    lora_adapter_path: str | None = setting(
        None, "Directory of an adapter in peft's format to continue from; it has its own rank, alpha and layers."
    )

    @property
    def uses_lora(self) -> bool:
        """Return whether adapters are trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = setting(None, f"{PATH_OR_NULL}; null means the actor's.")
    enable_gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    use_remove_padding: bool = setting(False, "Pack sequences end to end instead of sorting and padding them.")


@dataclass(frozen=True)
class RewardModelPath:
    path: str | None = setting(
        None, "Directory or Hugging Face name of the model, an AutoModelForSequenceClassification with one label."
    )


@dataclass(frozen=True)
class OptimConfig:
    lr: float = setting(1e-6, "Peak learning rate.", gt=0, le=1000)
    lr_scheduler_type: str = setting(
        "constant", "Shape of the learning rate after warm-up.", choices=("constant", "cosine", "linear")
    )
    lr_warmup_steps: int = setting(-1, "Optimizer steps of linear warm-up; negative means use the ratio.", ge=-1)
    lr_warmup_steps_ratio: float = setting(0.0, "Warm-up as a share of all optimizer steps.", ge=0, le=1)
    min_lr_ratio: float = setting(0.0, "Final learning rate as a share of the peak (cosine, linear).", ge=0, le=1)
    weight_decay: float = setting(0.01, "AdamW weight decay.", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW betas.", ge=0, lt=1)


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    lr: float = setting(1e-5, "Peak learning rate.", gt=0, le=1000)


@dataclass(frozen=True)
class RefFSDPConfig:
    param_offload: bool = setting(False, "Keep parameters in host memory between calls.")


@dataclass(frozen=True)
class CriticFSDPConfig(RefFSDPConfig):
    optimizer_offload: bool = setting(False, "Keep optimizer state in host memory between calls.")


@dataclass(frozen=True)
class FSDPConfig(CriticFSDPConfig, EngineSettings):
    supports_lora = True
    supports_shared_prefixes = True
    supports_token_terms = True
    supports_routing_replay = True
    supports_images = True
    dtype: str = setting(
        "auto", "Compute dtype; auto is bfloat16 on CUDA, float32 on CPU.", choices=("auto", "float32", "bfloat16")
    )
    reshard_after_forward: bool = setting(
        True, "Free the gathered parameters after forward (ZeRO-3) or keep them (ZeRO-2)."
    )
    ulysses_sequence_parallel_size: int = setting(
        1, "Processes that share the tokens of a micro-batch, for long sequences; reference and critic follow.", ge=1
    )

    @property
    def model_parallel_size(self) -> int:
        """Return the number of processes that get the same rows."""
        return self.ulysses_sequence_parallel_size

    def single_process(self) -> Self:
        """Return the settings with whole sequences in one process."""
        return replace(self, ulysses_sequence_parallel_size=1)


@dataclass(frozen=True)
class MegatronConfig(EngineSettings):
    supports_lora = True
    supports_shared_prefixes = True
    supports_routing_replay = True
    tensor_model_parallel_size: int = setting(1, f"Tensor-parallel ranks. {MCORE}", ge=1)
    pipeline_model_parallel_size: int = setting(1, f"Pipeline stages. {MCORE}", ge=1)
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, f"Parts of the model per pipeline stage; null: one. {MCORE}", ge=2
    )
    context_parallel_size: int = setting(1, f"Ranks that share one sequence. {MCORE}", ge=1)
    expert_model_parallel_size: int = setting(1, f"Expert-parallel ranks. {MCORE}", ge=1)
    sequence_parallel: bool = setting(False, f"Shard the norms' activations over tensor-parallel ranks. {MCORE}")
    use_distributed_optimizer: bool = setting(True, f"Shard optimizer state over data-parallel ranks. {MCORE}")
    dtype: str = setting(
        "auto",
        f"Compute dtype; auto is bfloat16 on CUDA, float32 on CPU. {MCORE}",
        choices=("auto", "float32", "bfloat16"),
    )
    param_offload: bool = setting(False, f"Keep parameters in host memory between calls. {MCORE}")
    optimizer_offload: bool = setting(False, f"Keep optimizer state in host memory between calls. {MCORE}")

    @property
    def model_parallel_size(self) -> int:
        """Return the number of processes that share one copy of the model and get the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def rank_unit(self) -> int:
        """Return the number that must divide the number of processes: dense and expert layers have a layout each."""
        experts = self.pipeline_model_parallel_size * self.expert_model_parallel_size
        return math.lcm(self.model_parallel_size, experts)

    def single_process(self) -> Self:
        """Return the settings with a layout for one process."""
        return replace(
            self,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            sequence_parallel=False,
        )


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = setting("vanilla", "Policy loss by its registered name; algorithm.path registers your own.")
    tau_pos: float = setting(1.0, "Temperature of sapo's gate where the advantage is positive.", gt=0)
    tau_neg: float = setting(1.05, "Temperature of sapo's gate where the advantage is negative.", gt=0)
    dro_beta: float | None = setting(None, "Weight of dro's quadratic penalty, which dro requires.", gt=0)
    clip_cov_ratio: float = setting(0.0002, "Share of a step's tokens that clip_cov leaves out.", gt=0, le=1)
    clip_cov_lb: float = setting(1.0, "clip_cov chooses among tokens with a covariance above this.", ge=0)
    clip_cov_ub: float = setting(5.0, "clip_cov chooses among tokens with a covariance below this.", gt=0)
    kl_cov_ratio: float = setting(0.0002, "Share of a step's tokens that kl_cov penalises.", gt=0, le=1)
    ppo_kl_coef: float = setting(0.1, "Weight of kl_cov's penalty.", ge=0)


@dataclass(frozen=True)
class RouterReplayConfig:
    mode: str = setting(
        "disabled",
        "Train a mixture of experts with the experts that the pass for old_log_probs (R2) or the rollout (R3) chose.",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = plug("fsdp", "Training engine.", ENGINES)
    ppo_mini_batch_size: int = setting(256, "Prompts of one optimizer step, each with its trained samples.", gt=0)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    use_dynamic_bsz: bool = setting(False, DYNAMIC)
    ppo_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    freeze_vision_tower: bool = setting(
        False, "Do not train the part of the model that computes images, its projection to the text's states included."
    )
    use_prefix_grouper: bool = setting(
        False, "Compute first tokens that rows of a micro-batch have in common once, in policy, reference and teachers."
    )
    ppo_epochs: int = setting(1, "Passes over the batch of one step.", ge=1)
    shuffle: bool = setting(False, "Shuffle rows before cutting mini-batches.")
    clip_ratio: float = setting(0.2, "PPO clip range, both sides, unless low or high is given.", ge=0)
    clip_ratio_low: float | None = setting(None, "Lower clip range; null means clip_ratio.", ge=0, le=1)
    clip_ratio_high: float | None = setting(None, "Upper clip range; null means clip_ratio.", ge=0)
    clip_ratio_c: float = setting(3.0, "Dual-clip bound for negative advantages.", gt=1)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Which policy loss.")
    loss_agg_mode: str = setting(
        "token-mean",
        "How token losses become one number; gspo, geo_mean and sapo always use seq-mean-token-mean.",
        choices=("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    )
    loss_scale_factor: int | None = setting(
        None, "Divisor of seq-mean-token-sum-norm; null means data.max_response_length.", ge=1
    )
    positive_nll_coef: float = setting(
        0.0, "Weight of the negative log-likelihood of responses with a score above 0 (VAPO).", ge=0
    )
    entropy_coeff: float = setting(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = setting(False, "Add a KL term to the reference policy to the loss.")
    kl_loss_coef: float = setting(0.001, "Weight of the KL loss.", ge=0)
    kl_loss_type: str = setting("low_var_kl", "KL estimator of the loss.", choices=KL_KINDS)
    grad_clip: float = setting(1.0, "Largest global gradient norm.", gt=0)
    entropy_from_logits_chunk_size: int | None = setting(
        None,
        "At most as many logits exist at a time as those of this many tokens; null chooses by the device.",
        ge=1,
    )
    calculate_sum_pi_squared: bool | None = setting(
        None,
        "Compute the sum of squared probabilities with the log-probs; null means: if the advantage estimator needs it.",
    )
    calculate_old_log_probs: bool | None = setting(
        None,
        "Compute old_log_probs in a pass before the update; null means: unless one optimizer step does without them.",
    )
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning-rate schedule.")
    router_replay: RouterReplayConfig = section(RouterReplayConfig, "Replay of the experts' choice.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "FSDP2 engine.")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-core engine.")
    engine_config: dict = setting(
        {}, "Settings of an engine of your own (strategy is an import path); its `Config` validates them.", free=True
    )


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    log_prob_use_dynamic_bsz: bool = setting(False, DYNAMIC)
    log_prob_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    fsdp_config: RefFSDPConfig = section(
        RefFSDPConfig, "Offload of the reference policy; all other settings are the actor's."
    )


@dataclass(frozen=True)
class ValKwargs:
    n: int = setting(1, "Samples per validation prompt.", ge=1)
    do_sample: bool = setting(False, "Sample in validation; false is greedy.")
    temperature: float = setting(1.0, "Temperature in validation, when sampling.", gt=0)
    top_k: int = setting(-1, "Top-k in validation; -1 is off.", ge=-1)
    top_p: float = setting(1.0, "Top-p in validation.", gt=0, le=1)
    min_p: float = setting(0.0, "Min-p in validation; 0 is off.", ge=0, le=1)


TRANSPORTS_BY_PLACEMENT = ("auto", "in_process")
"""Values of `weight_sync.transport` that name no transport."""


@dataclass(frozen=True)
class WeightSyncConfig:
    transport: str = setting(
        "auto",
        "How new weights are sent to rollout processes; auto: in_process if actor and rollout share them, "
        "object_store if generation runs ahead of training, else shared_memory on one machine and broadcast between "
        "several. Also disk, or a class of your own, as package.module:Name or path/to/file.py:Name.",
    )
    lora: str = setting(
        "merged",
        "With LoRA, a push contains merged weights, or, after a first full push, the adapters alone; the rollout "
        "then keeps the base weights in host memory and merges the adapters itself.",
        choices=("merged", "adapter"),
    )
    bucket_mb: int = setting(
        64, "Size in MB of the buckets in which weights are sent; a sender allocates one or two of them.", ge=1
    )
    directory: str | None = setting(
        None, "Where transport=disk writes weights: a directory or URL that all machines can access."
    )

    @property
    def by_placement(self) -> bool:
        """Whether the placement of actor and rollout decides the transport, if there is any."""
        return self.transport in TRANSPORTS_BY_PLACEMENT


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: str = setting(
        "single_turn_agent", "Agent loop that generates responses (mode=async), unless a row has an agent_name."
    )
    path: str | None = setting(None, "Python file or module that registers agent loops of your own (mode=async).")
    program: str | None = setting(
        None,
        "What the agent loop http_agent starts for each row: a Python function (file.py:name or package.module:name), "
        "or a command.",
    )
    timeout_s: float | None = setting(
        None,
        "Seconds for one response of an agent loop, which fails after that (mode=async), without those in which it "
        "waits for new weights; null: only trainer.call_timeout_s limits all of them together. outside_agent needs it.",
        gt=0,
    )
    train_branches: bool = setting(
        True,
        "Train every conversation of an agent, also those of sub-agents, parallel calls and before a compaction "
        "(mode=async); false: the main one only.",
    )
    min_group_share: float = setting(
        0.5,
        "Share of a batch's sample groups that a step needs (mode=async); the others are left out because their agent "
        "loops failed.",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class MultiTurnConfig:
    function_tool_path: str | None = setting(
        None, "Python file; agents may call its functions marked @function_tool (mode=async)."
    )
    max_assistant_turns: int | None = setting(
        None, "Turns of the policy in one response; null: as many as fit (mode=async).", ge=1
    )
    interaction_config_path: str | None = setting(
        None, "YAML or JSON file of the environments that rows name (agent loop environment_agent or verifiers_agent)."
    )


@dataclass(frozen=True)
class RolloutConfig:
    name: str = setting(
        "vllm",
        "Generation engine: vllm, hf, or a class of your own, as package.module:Name or path/to/file.py:Name.",
    )
    mode: str = setting(
        "sync",
        "One batched call per step; async: requests through agent loops and a router.",
        choices=("sync", "async"),
    )
    nnodes: int = setting(1, "Machines of the rollout's own pool, if it has one.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = setting(
        0, "Rollout processes per machine in a pool of their own; 0: in the trainer's processes.", ge=0, le=MAX_SLOTS
    )
    n: int = setting(1, "Samples per prompt.", ge=1, le=100_000)
    temperature: float = setting(1.0, "Softmax temperature, also of the training log-probs.", gt=0)
    top_k: int = setting(-1, "Keep the k most likely tokens; -1 is off.", ge=-1)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability mass.", gt=0, le=1)
    min_p: float = setting(
        0.0, "Keep tokens with at least this share of the likeliest one's probability; 0 is off.", ge=0, le=1
    )
    repetition_penalty: float = setting(
        1.0, f"Divides logits of tokens in prompt and response; 1 is off. {SHAPES}", gt=0, le=2
    )
    presence_penalty: float = setting(0.0, f"Subtracted from logits of tokens in the response. {SHAPES}", ge=-2, le=2)
    frequency_penalty: float = setting(
        0.0, f"Subtracted from logits for each occurrence in the response. {SHAPES}", ge=-2, le=2
    )
    min_tokens: int = setting(0, "Minimum number of tokens of a response.", ge=0)
    stop: list[str] = setting([], "Strings that end a response, which includes them (one or a list).")
    stop_token_ids: list[int] = setting(
        [], "Tokens that end a response in addition to the model's own, also with ignore_eos.", ge=0
    )
    ignore_eos: bool = setting(False, "Continue to generate after the end-of-sequence token.")
    dtype: str = setting(
        "auto",
        "Dtype of generation; auto is bfloat16 on CUDA, float32 on CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = setting(
        None,
        "Generate with weights of one byte per value (fp8: e4m3) and a scale per block of 128 x 128; null: as trained.",
        choices=QUANTIZATION,
    )
    calculate_log_probs: bool = setting(
        True, "Return the sampled tokens' log-probs and log their difference to the trainer's."
    )
    enable_rollout_routing_replay: bool = setting(
        False, "Return the experts of every token (column routed_experts), which router_replay.mode=R3 needs."
    )
    max_num_seqs: int = setting(1024, "Sequences generated at the same time per process.", ge=1)
    max_num_batched_tokens: int = setting(8192, "Tokens of one vLLM engine step.", ge=1)
    gpu_memory_utilization: float = setting(0.5, "Share of device memory for vLLM (CUDA).", gt=0, le=1)
    kv_cache_memory_mb: int = setting(128, "Memory of vLLM's KV cache in MB (CPU).", gt=0)
    tensor_model_parallel_size: int = setting(
        1, "Worker processes that share one generation engine (vLLM, on one machine).", ge=1
    )
    enforce_eager: bool = setting(True, "Do not capture CUDA graphs.")
    engine_kwargs: dict = setting(
        {},
        "Further arguments of vLLM's engine, also as engine_kwargs.vllm.KEY, or of a rollout of your own.",
        free=True,
    )
    free_cache_engine: bool = setting(
        True, "Free weights and KV cache between generation phases; on CPU the KV cache of vLLM."
    )
    enable_chunked_prefill: bool = setting(True, "Mix prefill and decode in one vLLM step.")
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    log_prob_use_dynamic_bsz: bool = setting(False, DYNAMIC)
    log_prob_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    progress_timeout_s: float = setting(
        300.0, "Seconds without an answer after which a process counts as stuck (mode=async).", gt=0
    )
    endpoint_port: int = setting(
        0,
        "Port on the driver's machine of an OpenAI-compatible endpoint to the current policy (mode=async); 0 means "
        "none.",
        ge=0,
        le=65535,
    )
    endpoint_host: str = setting(
        "127.0.0.1",
        "Address on which the endpoint listens; 0.0.0.0 means all of the machine's. Clients need a key only if the "
        "environment variable HYBRIDRL_API_KEY sets one.",
    )
    agent: AgentConfig = section(AgentConfig, "Agent loops.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Responses of several turns.")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.")
    weight_sync: WeightSyncConfig = section(WeightSyncConfig, "Transport of the actor's weights to the rollout.")


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = section(ModelConfig, "The policy.")
    actor: ActorConfig = section(ActorConfig, "Training of the policy.")
    ref: RefConfig = section(RefConfig, "The reference policy.")
    rollout: RolloutConfig = section(RolloutConfig, "Generation.")


@dataclass(frozen=True)
class CriticConfig:
    enable: bool | None = setting(None, "Train a critic; null means: if the advantage estimator needs one.")
    strategy: str = plug("fsdp", "Training engine.", ENGINES)
    ppo_mini_batch_size: int | None = setting(None, "Prompts of one optimizer step; null means the actor's.", gt=0)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    use_dynamic_bsz: bool = setting(False, DYNAMIC)
    ppo_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    cliprange_value: float = setting(0.5, "Value clip range.", gt=0)
    grad_clip: float = setting(1.0, "Largest global gradient norm.", gt=0)
    model: CriticModelConfig = section(CriticModelConfig, "The value model.")
    optim: CriticOptimConfig = section(CriticOptimConfig, "Optimizer and learning-rate schedule.")
    fsdp_config: CriticFSDPConfig = section(
        CriticFSDPConfig, "Offload of the critic; all other settings are the actor's."
    )
    engine_config: dict = setting(
        {}, "Settings that differ from actor_rollout_ref.actor.engine_config, with an engine of your own.", free=True
    )


@dataclass(frozen=True)
class OverlongBufferConfig:
    enable: bool = setting(False, "Penalise responses that come near the length limit (reward_manager=dapo).")
    len: int = setting(0, "Tokens before the limit where the penalty starts.", ge=0)
    penalty_factor: float = setting(1.0, "Penalty at the limit.", ge=0)


@dataclass(frozen=True)
class SandboxFusionConfig:
    url: str | None = setting(
        None,
        "Where programs of responses run: a server with SandboxFusion's interface, such as http://HOST:8080/run_code; "
        "null: a sandbox of this machine. See docs/sandbox.md.",
    )
    max_concurrent: int = setting(64, "Requests to that server at the same time, of all reward processes.", ge=1)
    memory_limit_mb: int = setting(1024, "Memory of each program, in MB.", ge=64)
    timeout_s: float = setting(
        4.0, "Wall-clock limit of a program on one test case, in seconds; at most half of reward_model.timeout_s.", gt=0
    )


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = setting(
        False,
        "Score with a reward model (a sequence classifier with one output). A custom_reward_function gets its score "
        "in extra_info['rm_score'] and returns the final one. Validation uses rules, except for rows with "
        "reward_model.style=model.",
    )
    reward_manager: str = plug("naive", "How rule scores are computed.", REWARD_MANAGERS)
    num_processes: int | None = setting(
        None, "Processes that run reward functions and can be killed; null means one per core, at most 4.", ge=1
    )
    timeout_s: float = setting(10.0, "Wall-clock limit of one reward call, in seconds.", gt=0)
    limits: dict = setting(
        {},
        "Further limits of each process that runs reward functions: memory_mb (default: half of the machine's, divided "
        "by num_processes), file_mb (4096), processes (64), output_mb (16); env lists variables that it may see "
        "besides those that programs need.",
        free=True,
    )
    micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    forward_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    length_reward_coef: float = setting(
        0.0, "Weight of a reward in training for responses shorter than others to their prompt (Kimi k1.5).", ge=0
    )
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "Soft length penalty.")
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, "The sandbox of responses that are programs.")
    model: RewardModelPath = section(RewardModelPath, "The reward model.")
