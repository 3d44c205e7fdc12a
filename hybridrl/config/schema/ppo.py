"""The schema of `python -m hybridrl.main_ppo`."""

from dataclasses import dataclass

from hybridrl.config.fields import section, setting
from hybridrl.config.schema.data import DataConfig, ImportPath
from hybridrl.config.schema.distillation import DistillationConfig
from hybridrl.config.schema.rollout_correction import RolloutCorrectionConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import KL_KINDS, ActorRolloutRefConfig, CriticConfig, RewardModelConfig


@dataclass(frozen=True)
class KLCtrlConfig:
    type: str = setting(
        "fixed", "Constant coefficient, or one that is controlled to reach target_kl.", choices=("fixed", "adaptive")
    )
    kl_coef: float = setting(0.001, "KL coefficient at the start.", ge=0)
    horizon: float = setting(10000, "Samples over which the adaptive controller reacts.", gt=0)
    target_kl: float = setting(0.1, "Target KL per sequence of the adaptive controller.", gt=0)


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = setting(
        False, "Drop groups whose samples all have the same reward, and generate more until the batch is full."
    )
    metric: str | None = setting(
        None,
        "What the samples of a group are compared by; acc as the reward function returns it, null means seq_reward.",
        choices=("seq_reward", "seq_final_reward", "score", "acc"),
    )
    max_num_gen_batches: int = setting(
        0, "Generation batches of one step; a step that needs more ends the run. 0 means no limit.", ge=0
    )
    order: str = setting(
        "drawn",
        "Which groups are trained if a step has more than data.train_batch_size: the first ones, or those that were "
        "complete first, after the fewest tokens (shortest); also without enable. tail_batching (rollout.mode=async): "
        "generation ends when these are complete, and the other prompts are generated in later rounds of their own.",
        choices=("drawn", "shortest", "tail_batching"),
    )

    @property
    def chooses(self) -> bool:
        """Whether a step trains on some of the groups that it generates.

        It may keep others for the next step.
        """
        return self.enable or self.order == "shortest"

    @property
    def fills_batches(self) -> bool:
        """Whether every step trains data.train_batch_size prompts, also at the end of an epoch."""
        return self.chooses or self.defers

    @property
    def defers(self) -> bool:
        """Whether a step sets prompts with long responses aside and trains them in a later one."""
        return self.order == "tail_batching"


@dataclass(frozen=True)
class SelectSamplesConfig:
    k: int | None = setting(
        None, "Samples of each prompt that a step trains on, of rollout.n that are scored; null means all.", ge=1
    )
    method: str = setting(
        "max_variance",
        "Which ones: those with the largest variance of scores (PODS), the highest scores (best of n), or random ones.",
        choices=("max_variance", "max_reward", "random"),
    )


@dataclass(frozen=True)
class PFPPOConfig:
    reweight_method: str = setting(
        "pow",
        "Weight of a row: a power of its score; 1 for the highest and lowest score and 0 else; or 0.4 for the highest "
        "and 0.1 else.",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = setting(2.0, "Exponent of reweight_method=pow.", ge=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = setting("gae", "Advantage estimator by its registered name.")
    path: list[str] = setting([], "Python files or modules that register estimators and policy losses of your own.")
    gamma: float = setting(1.0, "Discount.", ge=0, le=1)
    lam: float = setting(1.0, "GAE lambda.", ge=0, le=1)
    lam_alpha: float = setting(0.05, "Vapo's lambda of a response of l tokens is 1 - 1 / (lam_alpha l).", gt=0)
    norm_adv_by_std_in_grpo: bool = setting(
        True, "Divide GRPO's advantages by the group's standard deviation; false is Dr. GRPO."
    )
    gdpo_reward_keys: list[str] = setting(
        [], "Rewards that gdpo normalises one by one: keys of what the reward function returns, also score."
    )
    gdpo_reward_weights: list[float] = setting([], "Weight of each of gdpo_reward_keys; none means 1.")
    normalize_reward: bool = setting(
        False, "Normalise scores by mean and standard deviation of all scores of the run so far."
    )
    use_kl_in_reward: bool = setting(False, "Subtract the KL to the reference policy from the reward.")
    kl_penalty: str = setting("kl", "KL estimator of the reward.", choices=KL_KINDS)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Coefficient of the KL in the reward.")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction for samples from other weights or another engine."
    )
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig, "Dynamic sampling: train on groups with different rewards only (DAPO)."
    )
    select_samples: SelectSamplesConfig = section(
        SelectSamplesConfig, "Train on some of the samples of each prompt: PODS, best of n."
    )
    use_pf_ppo: bool = setting(False, "Draw the rows of the updates again, with weights by score (PF-PPO).")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "Weights of PF-PPO.")


@dataclass(frozen=True)
class CustomRewardConfig(ImportPath):
    name: str = setting("compute_score", "Its name in that file.")
    kwargs: dict = setting({}, "Keyword arguments added to every call.", free=True)


@dataclass(frozen=True)
class PPOConfig:
    data: DataConfig = section(DataConfig, "Files, prompts and lengths.")
    actor_rollout_ref: ActorRolloutRefConfig = section(
        ActorRolloutRefConfig, "Policy, reference policy and generation."
    )
    critic: CriticConfig = section(CriticConfig, "Value model.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "Reward model and reward managers.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, "Your own compute_score function.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages and KL.")
    distillation: DistillationConfig = section(DistillationConfig, "Teachers, and what is learned from them.")
    trainer: TrainerConfig = section(TrainerConfig, "The loop, its machines, checkpoints and logs.")

    @property
    def only_generates(self) -> bool:
        """Whether the job only validates a model as it is, and needs no actor.

        So there is no checkpoint to load, and there are no adapters.
        """
        policy, trainer = self.actor_rollout_ref, self.trainer
        is_plain = not policy.model.uses_lora and policy.rollout.n_gpus_per_node == 0
        return is_plain and trainer.val_only and trainer.resume_mode == "disable"
