"""Settings of the worker roles: model, engine, optimizer, actor, reference, critic, reward model.

Keys and defaults follow verl where verl has them. "per_gpu" means per worker process, whatever its device.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from hybridrl.config.fields import plug, section, setting
from hybridrl.config.plugs import ENGINES, REWARD_MANAGERS
from hybridrl.config.schema.engine import BUDGET, DYNAMIC, MICRO, EngineSettings
from hybridrl.config.schema.rollout import RolloutConfig

OWN_ENGINE = "Settings of an engine of your own (strategy is an import path); its `Config` validates them."
MCORE = "Takes effect with strategy=megatron only."
KL_KINDS = tuple(kind + suffix for suffix in ("", "+") for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"))
FREEZE = "Do not train the part of the model that computes images, its projection to the text's states included."
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
    freeze_vision_tower: bool = setting(False, FREEZE)
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
        None, "At most as many logits exist at a time as those of this many tokens; null chooses by the device.", ge=1
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
    engine_config: dict = setting({}, OWN_ENGINE, free=True)


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    log_prob_use_dynamic_bsz: bool = setting(False, DYNAMIC)
    log_prob_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    fsdp_config: RefFSDPConfig = section(
        RefFSDPConfig, "Offload of the reference policy; all other settings are the actor's."
    )


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
