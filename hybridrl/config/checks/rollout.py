"""Rules on generation, for `rules.py`: the rollout, its sampling, and what it declares that it can do."""

from hybridrl.config.build import Problems
from hybridrl.config.capabilities import SAMPLING, SHAPES_SAMPLES, RolloutCapabilities
from hybridrl.config.introspection import changed, value_text
from hybridrl.config.schema.ppo import PPOConfig

NO_ROUTES = "use hf or vllm, or actor_rollout_ref.actor.router_replay.mode=R2 and leave this out"


def rollout_problems(config: PPOConfig) -> Problems:
    """Yield settings with which the generation engine cannot run."""
    chosen = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    for key, sampling in ((prefix, chosen), (f"{prefix}.val_kwargs", chosen.val_kwargs)):
        if sampling.top_k == 0:
            yield f"{key}.top_k=0: would keep no token; -1 keeps all"
    if chosen.stop and chosen.ignore_eos:
        yield (
            f"{prefix}.ignore_eos=true: contradicts {prefix}.stop={list(chosen.stop)}, which ends responses; leave "
            "out one of them"
        )
    if chosen.min_tokens > config.data.max_response_length:
        limit = config.data.max_response_length
        yield (
            f"{prefix}.min_tokens={chosen.min_tokens}: responses have at most data.max_response_length={limit} "
            "tokens; lower it"
        )
    if chosen.val_kwargs.n > 1 and not chosen.val_kwargs.do_sample:
        yield (
            f"{prefix}.val_kwargs.n={chosen.val_kwargs.n}: greedy samples are identical; set "
            f"{prefix}.val_kwargs.do_sample=true"
        )


def capability_problems(config: PPOConfig, capabilities: RolloutCapabilities) -> Problems:
    """Yield settings that need a capability which the rollout does not declare, and ranks it cannot share."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    size, name = rollout.tensor_model_parallel_size, f"{key}.name={rollout.name}"
    if capabilities.tensor_parallel:
        yield from _rollout_rank_problems(config)
    needs = (  # setting, value, whether it needs a capability, which one, what to set instead
        (f"{key}.tensor_model_parallel_size", size, size > 1, "tensor_parallel", f"use {key}.name=vllm, or 1"),
        (f"{key}.mode", rollout.mode, rollout.mode == "async", "requests", "use sync"),
        (f"{key}.calculate_log_probs", True, rollout.calculate_log_probs, "log_probs", "set it to false"),
        (f"{key}.enable_rollout_routing_replay", True, rollout.enable_rollout_routing_replay, "routes", NO_ROUTES),
        (f"{key}.weight_sync.lora", "adapter", rollout.weight_sync.lora == "adapter", "adapters", "use merged"),
    )
    for setting, value, is_needed, capability, fix in needs:
        if is_needed and not getattr(capabilities, capability):
            yield (
                f"{setting}={value_text(value)}: needs the capability {capability}, which {name} does not declare; "
                f"{fix}"
            )
    if rollout.quantization is not None:
        yield from _quantization_problems(config, capabilities)
    sampling = [f"{key}.{parameter}" for parameter in SAMPLING]
    if rollout.val_kwargs.do_sample:
        sampling += [f"{key}.val_kwargs.{parameter}" for parameter in SHAPES_SAMPLES]
    for setting, value in changed(config, *sampling).items():
        parameter = setting.rpartition(".")[2]
        if parameter not in capabilities.sampling:
            yield (
                f"{setting}={value_text(value)}: {name} does not declare {parameter} in capabilities.sampling; leave "
                "it out, or use another rollout"
            )


def _quantization_problems(config: PPOConfig, capabilities: RolloutCapabilities) -> Problems:
    """Yield why the rollout cannot compute with quantised weights."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    chosen = f"{key}.quantization={rollout.quantization}"
    if rollout.quantization not in capabilities.quantization:
        yield (
            f"{chosen}: {key}.name={rollout.name} does not declare it in capabilities.quantization; use {key}.name=hf, "
            "or leave it out"
        )
    if config.only_generates:
        yield f"{chosen}: only what an actor pushes is quantised, and here weights are read from disk; leave it out"
    if rollout.weight_sync.lora == "adapter":
        yield f"{chosen}: merged weights are quantised; set {key}.weight_sync.lora=merged"


def _rollout_rank_problems(config: PPOConfig) -> Problems:
    """Yield pools that cannot be divided into engines whose ranks are on one machine."""
    chosen, trainer = config.actor_rollout_ref.rollout, config.trainer
    size, key = chosen.tensor_model_parallel_size, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    pools = {
        "actor_rollout_ref.rollout.n_gpus_per_node": chosen.n_gpus_per_node,
        "trainer.eval_n_gpus": trainer.eval_n_gpus,
        "trainer.n_gpus_per_node": 0 if chosen.n_gpus_per_node else trainer.n_gpus_per_node,
    }
    for pool, number in pools.items():
        if number % size:
            yield (
                f"{key}={size}: does not divide {pool}={number}, and an engine's ranks are on one "
                "machine; change either"
            )
