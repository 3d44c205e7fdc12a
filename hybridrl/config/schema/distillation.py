"""Settings of on-policy distillation: the teachers, and what the student learns from them.

Keys and defaults follow verl's `distillation.*`, except for `log_prob_min_clamp`, which is off.
"""

from dataclasses import dataclass

from hybridrl.config.fields import MAX_NODES, MAX_SLOTS, section, setting
from hybridrl.config.schema.workers import KL_KINDS

TOP_MODES = ("forward_kl_topk", "reverse_kl_topk")
FULL_MODES = ("forward_kl", "reverse_kl")
TEACHER_FIELDS = ("key", "model_path")
OTHER_TEACHER_FIELDS = ("num_replicas", "inference")
"""Entries of verl's teachers that only tune another implementation: they are accepted and change nothing."""


@dataclass(frozen=True)
class DistillationLossConfig:
    loss_mode: str = setting(
        "k3",
        "Divergence of student and teacher: an estimate from the sampled token (k1, k2, k3 and relatives), or the KL "
        "over the teacher's topk tokens, or over the whole vocabulary (forward_kl, reverse_kl).",
        choices=(*KL_KINDS, *TOP_MODES, *FULL_MODES),
    )
    topk: int = setting(128, "Tokens of the teacher that a topk mode compares; all others count as one.", ge=1)
    use_task_rewards: bool = setting(
        True, "Also train on the rewards; false: responses are not scored and only the teacher is learned from."
    )
    use_policy_gradient: bool = setting(
        True,
        "The negative divergence of the sampled token is added to its advantage; false: the divergence is a loss with "
        "a gradient of its own.",
    )
    distillation_loss_coef: float = setting(1.0, "Weight of the divergence beside task rewards.", gt=0)
    loss_max_clamp: float | None = setting(
        10.0, "Limit of a token's divergence, both sides; beyond it a loss has no gradient. null: none.", gt=0
    )
    log_prob_min_clamp: float | None = setting(
        None, "Lower limit of log-probs in the topk and whole-vocabulary modes; null: none.", lt=0
    )


@dataclass(frozen=True)
class DistillationConfig:
    enabled: bool = setting(False, "Distil: teachers score the tokens that the policy samples.")
    nnodes: int = setting(1, "Machines of the teachers' own pool, if they have one.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = setting(
        0, "Teacher processes per machine in a pool of their own; 0: in the trainer's processes.", ge=0, le=MAX_SLOTS
    )
    teacher_models: dict = setting(
        {},
        "Teachers by a name of your own, as teacher_models.NAME.model_path=PATH. Several teachers also have a key: the "
        "value of teacher_key in their rows.",
        free=True,
    )
    teacher_key: str = setting("data_source", "Column of the data that selects the teacher, if there are several.")
    distillation_loss: DistillationLossConfig = section(
        DistillationLossConfig, "What is compared, and how it is trained on."
    )

    @property
    def samples_only(self) -> bool:
        """Return whether the sampled tokens' log-probs are all that is needed of the teacher."""
        return self.distillation_loss.loss_mode in KL_KINDS

    @property
    def in_advantages(self) -> bool:
        """Return whether the divergence is part of the advantages."""
        return self.enabled and self.distillation_loss.use_policy_gradient

    @property
    def in_loss(self) -> bool:
        """Return whether the divergence is a term of the loss."""
        return self.enabled and not self.distillation_loss.use_policy_gradient

    @property
    def task_rewards(self) -> bool:
        """Return whether the rewards are trained on; without distillation always."""
        return not self.enabled or self.distillation_loss.use_task_rewards

    @property
    def coefficient(self) -> float:
        """Return the weight of the divergence: 1 if nothing else is trained on."""
        loss = self.distillation_loss
        return loss.distillation_loss_coef if loss.use_task_rewards else 1.0

    def teachers(self) -> dict[str, str]:
        """Return key -> path of every teacher's model.

        A single teacher's key is its name if it has none.
        """
        return {str(entry.get("key") or name): entry["model_path"] for name, entry in self.teacher_models.items()}
