"""Defaults of verl 0.9.1 that differ here and decide results, duration or memory.

`.ci/verl_defaults.py` prints all differences from verl's installed package. `import-verl` writes these values into its
command, `main_ppo` names them when it takes over a command line of verl, and docs/coming_from.md has them as a table.
"""

from collections.abc import Mapping

MEGATRON = "actor_rollout_ref.actor.megatron"
DEFAULTS: Mapping[str, tuple[str, str]] = {
    "trainer.total_epochs": ("30", "a run without it ends after one pass"),
    "trainer.n_gpus_per_node": ("8", "a run without it uses one device"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("true", "off it is faster and needs more memory"),
    "actor_rollout_ref.model.use_remove_padding": ("true", "packed rows need a kernel for them to be fast"),
    f"{MEGATRON}.sequence_parallel": ("true", "it is another layout of activations with tensor parallelism only"),
    "actor_rollout_ref.rollout.enforce_eager": ("false", "CUDA graphs are captured on request"),
    "actor_rollout_ref.rollout.max_num_seqs": ("256", "a larger batch is faster if memory allows it"),
    "critic.model.enable_gradient_checkpointing": ("true", "as for the policy"),
    "critic.model.use_remove_padding": ("true", "as for the policy"),
    "critic.ppo_max_token_len_per_gpu": ("32768", "as for the policy"),
    "distillation.distillation_loss.topk": ("32", "more of the teacher's distribution is compared"),
    "distillation.distillation_loss.use_policy_gradient": ("false", "k3 is added to the advantage"),
    "distillation.distillation_loss.loss_max_clamp": ("null", "a limit keeps single tokens from deciding a step"),
}
"""verl's default of each key, and why ours is another."""

NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "critic": {"algorithm.adv_estimator": ("gae",), "critic.enable": ("true",)},
    "distillation": {"distillation.enabled": ("true",)},
}
"""First part of a key to the settings of which one must have one of these values for the key to matter."""


def differing_defaults(words: Mapping[str, str]) -> dict[str, str]:
    """Return verl's defaults that differ here, that matter, and that no word sets.

    Args:
        words: Values on the command line by key, in lower case.
    """
    return {key: value for key, (value, _) in DEFAULTS.items() if key not in words and _matters(key, words)}


def _matters(key: str, words: Mapping[str, str]) -> bool:
    if key == f"{MEGATRON}.sequence_parallel":
        return words.get(f"{MEGATRON}.tensor_model_parallel_size", "1") != "1"
    if key.endswith(".topk") and "topk" not in words.get("distillation.distillation_loss.loss_mode", ""):
        return False
    if key.endswith(".enforce_eager"):  # a rollout without CUDA graphs is the only one that tells its experts
        return words.get("actor_rollout_ref.rollout.enable_rollout_routing_replay", "").lower() != "true"
    needs = NEEDS.get(key.partition(".")[0], {"": ("",)})
    has_critic = key.startswith("critic") and "algorithm.adv_estimator" not in words  # gae is the default
    return has_critic or any(words.get(name, "").lower() in values for name, values in needs.items())
