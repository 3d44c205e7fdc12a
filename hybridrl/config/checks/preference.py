"""Rules over several settings of `main_dpo` and `main_rm`.

The names and settings of losses are arguments, because this package does not import the registry.
"""

from collections.abc import Mapping
from typing import Any

from hybridrl.config.build import Problems, raise_problems
from hybridrl.config.checks.rules import supervised_problems
from hybridrl.config.schema.preference import DPOConfig, PreferenceLossConfig, RMConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.unknown_keys import suggest_name


def check_dpo_config(config: DPOConfig, *, losses: Mapping[str, Any]) -> None:
    """Raise one ConfigError with all contradictions in `config`; return if there are none.

    Args:
        config: The config.
        losses: Registered losses by name, each with `settings`, the names that it reads, and `is_paired`.
    """
    problems = [*supervised_problems(config), *loss_problems(config, losses)]
    loss = losses.get(config.loss.loss_type)
    problems += pair_budget_problems(config, rows=1 if loss is not None and not loss.is_paired else 2)
    raise_problems(problems)


def check_rm_config(config: RMConfig) -> None:
    """Raise one ConfigError with all contradictions in `config`; return if there are none."""
    problems = [*supervised_problems(config), *pair_budget_problems(config, rows=2)]
    if config.model.uses_lora:
        path = config.model.lora_adapter_path
        what = f"lora_rank={config.model.lora_rank}" if path is None else f"lora_adapter_path={path}"
        problems.append(
            f"model.{what}: main_rm trains a new score head, which adapters would leave frozen; leave it out"
        )
    raise_problems(problems)


def loss_problems(config: DPOConfig, losses: Mapping[str, Any]) -> Problems:
    """Yield an unknown loss, its settings without effect, and data that it cannot use."""
    name = config.loss.loss_type
    if name not in losses:
        yield f"loss.loss_type={name}: there is no such loss; {suggest_name(name, losses)}"
        return
    if unknown := sorted(losses[name].settings - vars(PreferenceLossConfig()).keys()):
        yield f"loss.loss_type={name}: reads {', '.join(unknown)}, which are no settings of section loss"
    for key, default in vars(PreferenceLossConfig()).items():
        value = getattr(config.loss, key)
        if key != "loss_type" and value != default and key not in losses[name].settings:
            readers = sorted(other for other, loss in losses.items() if key in loss.settings)
            yield f"loss.{key}={value}: has no effect with loss.loss_type={name}, only with {', '.join(readers)}"
    if not losses[name].needs_reference and config.ref.fsdp_config.param_offload:
        yield f"ref.fsdp_config.param_offload=true: loss.loss_type={name} has no reference policy; leave it out"
    elif config.model.uses_lora and config.ref.fsdp_config.param_offload:
        yield (
            "ref.fsdp_config.param_offload=true: with adapters (model.lora_rank, model.lora_adapter_path) the "
            "reference policy is the model without them, so there is no second copy to offload; leave it out"
        )
    if not losses[name].is_paired and config.data.train_batch_size < 2:
        yield (
            f"data.train_batch_size={config.data.train_batch_size}: loss.loss_type={name} compares each prompt with "
            "the response of another row of the batch; set 2 or more"
        )


def pair_budget_problems(config: SupervisedConfig, *, rows: int) -> Problems:
    """Yield a token budget below the two sequences of a pair, which stay in one micro-batch."""
    data = config.data
    by_tokens = data.use_dynamic_bsz or data.micro_batch_size_per_gpu is None
    if rows == 2 and by_tokens and data.max_length <= data.max_token_len_per_gpu < 2 * data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}: both sequences of a pair stay in one "
            f"micro-batch, 2 * data.max_length = {2 * data.max_length} tokens; raise it"
        )
