"""Rules on generation, for `rules.py`: engine, agent loops, weight sync, asynchrony."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridrl.config.capabilities import SAMPLING, SHAPES_SAMPLES, RolloutCapabilities, TransportCapabilities
from hybridrl.config.introspection import value_text
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import RolloutConfig

Problems = Iterator[str]

HTTP_AGENT, OUTSIDE_AGENT = "http_agent", "outside_agent"  # agent loops of programs: started, or asking for work
ENVIRONMENT_LOOPS = ("environment_agent", "verifiers_agent")
BY_POSITION = ("optimal_token_baseline", "tir_optimal_token_baseline")  # estimators


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


@dataclass(frozen=True)
class _Need:
    """A setting that a rollout can run only with one capability. fix: what to set instead."""

    setting: str
    value: object
    capability: str
    fix: str


def capability_problems(config: PPOConfig, capabilities: RolloutCapabilities) -> Problems:
    """Yield settings that need a capability which the rollout does not declare, and ranks it cannot share."""
    if capabilities.tensor_parallel:
        yield from _rollout_rank_problems(config)
    name = f"actor_rollout_ref.rollout.name={config.actor_rollout_ref.rollout.name}"
    for need in _needs(config):
        if not getattr(capabilities, need.capability):
            yield (
                f"{need.setting}={value_text(need.value)}: needs the capability {need.capability}, which {name} does "
                f"not declare; {need.fix}"
            )
    for key, value in _changed_sampling(config):
        parameter = key.rpartition(".")[2]
        if parameter not in capabilities.sampling:
            yield (
                f"{key}={value_text(value)}: {name} does not declare {parameter} in capabilities.sampling; leave it "
                "out, or use another rollout"
            )


def _needs(config: PPOConfig) -> Iterable[_Need]:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    size = rollout.tensor_model_parallel_size
    needs = (
        _Need(f"{key}.tensor_model_parallel_size", size, "tensor_parallel", f"use {key}.name=vllm, or 1"),
        _Need(f"{key}.mode", rollout.mode, "requests", "use sync"),
        _Need(f"{key}.calculate_log_probs", rollout.calculate_log_probs, "log_probs", "set it to false"),
        _Need(f"{key}.weight_sync.lora", rollout.weight_sync.lora, "adapters", "use merged"),
        _Need("trainer.partial_rollout", config.trainer.partial_rollout, "partial", "leave it out"),
        _Need("algorithm.filter_groups.order", config.algorithm.filter_groups.order, "partial", "use shortest"),
    )
    defers = config.algorithm.filter_groups.defers and rollout.mode == "sync"
    asked = (size > 1, rollout.mode == "async", rollout.calculate_log_probs, rollout.weight_sync.lora == "adapter")
    in_chunks = (config.trainer.partial_rollout, defers)
    return [need for need, is_asked in zip(needs, (*asked, *in_chunks), strict=True) if is_asked]


def _changed_sampling(config: PPOConfig) -> Iterator[tuple[str, object]]:
    """Yield the sampling parameters that a run would use with other values than their defaults."""
    rollout, defaults, key = config.actor_rollout_ref.rollout, RolloutConfig(), "actor_rollout_ref.rollout"
    for name in SAMPLING:
        if getattr(rollout, name) != getattr(defaults, name):
            yield f"{key}.{name}", getattr(rollout, name)
        if name in SHAPES_SAMPLES and rollout.val_kwargs.do_sample:
            value = getattr(rollout.val_kwargs, name, getattr(defaults, name))
            if value != getattr(defaults, name):
                yield f"{key}.val_kwargs.{name}", value


def _rollout_rank_problems(config: PPOConfig) -> Problems:
    """Yield pools that cannot be divided into engines whose ranks are on one machine."""
    chosen, trainer = config.actor_rollout_ref.rollout, config.trainer
    size, key = chosen.tensor_model_parallel_size, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if size == 1:
        return
    pools = {"actor_rollout_ref.rollout.n_gpus_per_node" if chosen.n_gpus_per_node else "trainer.n_gpus_per_node"}
    pools |= {"trainer.n_gpus_per_node"} if trainer.hybrid_rollout else set()
    pools |= {"trainer.eval_n_gpus"} if trainer.eval_n_gpus else set()
    sizes = {
        "actor_rollout_ref.rollout.n_gpus_per_node": chosen.n_gpus_per_node,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.eval_n_gpus": trainer.eval_n_gpus,
    }
    for pool in sorted(pools):
        if sizes[pool] % size:
            yield (
                f"{key}={size}: does not divide {pool}={sizes[pool]}, and an engine's ranks are on one "
                "machine; change either"
            )


def agent_problems(config: PPOConfig) -> Problems:
    """Yield agent-loop settings without effect, and transports that do not fit `mode=async`."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    defaults = RolloutConfig()
    given = {
        f"{key}.agent.{name}": value
        for name, value in vars(rollout.agent).items()
        if value != getattr(defaults.agent, name)
    }
    given |= {
        f"{key}.multi_turn.{n}": value
        for n, value in vars(rollout.multi_turn).items()
        if value != getattr(defaults.multi_turn, n)
    }
    for name in ("progress_timeout_s", "endpoint_port", "endpoint_host"):
        if getattr(rollout, name) != getattr(defaults, name):
            given[f"{key}.{name}"] = getattr(rollout, name)
    if rollout.mode == "sync":
        yield from (f"{name}={value}: has no effect without {key}.mode=async" for name, value in given.items())
        return
    if _serves_while_training(config) and rollout.weight_sync.lora == "adapter":
        yield f"{key}.weight_sync.lora=adapter: {_lost(config)} all weights of the last push; leave it out"
    if rollout.agent.default_agent_loop in (HTTP_AGENT, OUTSIDE_AGENT):
        yield from _program_problems(config)
    if rollout.agent.default_agent_loop in ENVIRONMENT_LOOPS:
        yield from _environment_problems(config)
    if rollout.endpoint_host != defaults.endpoint_host and not rollout.endpoint_port:
        yield f"{key}.endpoint_host={rollout.endpoint_host}: has no effect without {key}.endpoint_port"


def _program_problems(config: PPOConfig) -> Problems:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    loop = rollout.agent.default_agent_loop
    if loop == HTTP_AGENT and rollout.agent.program is None:
        yield f"{key}.agent.default_agent_loop={HTTP_AGENT}: there is no agent to start; set {key}.agent.program"
    if loop == OUTSIDE_AGENT and rollout.agent.timeout_s is None:
        yield (
            f"{key}.agent.default_agent_loop={OUTSIDE_AGENT}: a program that never ends its episode would end the run; "
            f"set {key}.agent.timeout_s, seconds from its beginning"
        )
    if not rollout.endpoint_port:
        yield f"{key}.agent.default_agent_loop={loop}: agents need the endpoint; set {key}.endpoint_port"
    if rollout.agent.train_branches and config.algorithm.adv_estimator in BY_POSITION:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}: compares the tokens of a group position by "
            f"position, and an agent's conversations are rows of their own; set {key}.agent.train_branches=false"
        )


def _environment_problems(config: PPOConfig) -> Problems:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    name = rollout.agent.default_agent_loop
    if rollout.multi_turn.interaction_config_path is None and rollout.agent.path is None:
        yield (
            f"{key}.agent.default_agent_loop={name}: there is no environment; name the file of their list in "
            f"{key}.multi_turn.interaction_config_path, or the file of your class in {key}.agent.path"
        )
    if name == "verifiers_agent" and not rollout.endpoint_port:
        yield f"{key}.agent.default_agent_loop={name}: it plays on the endpoint; set {key}.endpoint_port"


def _serves_while_training(config: PPOConfig) -> bool:
    """Return whether a rollout in processes of its own answers requests while the actor trains."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.mode == "async" and bool(rollout.n_gpus_per_node and (config.trainer.lag or rollout.endpoint_port))


def _lost(config: PPOConfig) -> str:
    lag, port = config.trainer.lag, config.actor_rollout_ref.rollout.endpoint_port
    why = f"trainer.lag={lag}" if lag else f"actor_rollout_ref.rollout.endpoint_port={port}"
    return f"with {why}, a rollout process that restarts while the actor trains needs"


def transport_problems(config: PPOConfig, transport: TransportCapabilities | None) -> Problems:
    """Yield settings that the transport contradicts. None: hybridrl chooses the transport."""
    chosen, key = config.actor_rollout_ref.rollout.weight_sync, "actor_rollout_ref.rollout.weight_sync"
    needs_directory = transport is not None and transport.needs_directory
    if transport is not None and transport.streaming and _serves_while_training(config):
        yield (
            f"{key}.transport={chosen.transport}: {_lost(config)} weights that the actor no longer has; use "
            "auto, object_store or disk"
        )
    if needs_directory and chosen.directory is None:
        yield f"{key}.transport={chosen.transport}: has no directory; set {key}.directory"
    if not needs_directory and chosen.directory is not None:
        yield f"{key}.directory={chosen.directory}: has no effect without {key}.transport=disk"


def weight_sync_problems(config: PPOConfig) -> Problems:
    """Yield transports that do not fit the placement of actor and rollout."""
    chosen, separated = (
        config.actor_rollout_ref.rollout.weight_sync,
        config.actor_rollout_ref.rollout.n_gpus_per_node > 0,
    )
    key = "actor_rollout_ref.rollout.weight_sync"
    if not separated and not chosen.by_placement:
        yield (
            f"{key}.transport={chosen.transport}: actor and rollout share their processes, so nothing is "
            "transported; leave it out, or give the rollout its own pool with "
            "actor_rollout_ref.rollout.n_gpus_per_node"
        )
    if separated and chosen.transport == "in_process":
        yield (
            f"{key}.transport=in_process: the rollout has processes of its own "
            "(actor_rollout_ref.rollout.n_gpus_per_node); use auto"
        )
    if chosen.lora == "adapter" and not config.actor_rollout_ref.model.uses_lora:
        yield f"{key}.lora=adapter: there are no adapters; set actor_rollout_ref.model.lora_rank, or leave it out"


def async_problems(config: PPOConfig) -> Problems:
    """Yield settings with which generation cannot run ahead, or would drop every token."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pool = rollout.n_gpus_per_node
    if pool and trainer.backend == "local":
        yield (
            f"actor_rollout_ref.rollout.n_gpus_per_node={pool}: trainer.backend=local has one process only; "
            "use trainer.backend=ray"
        )
    if not pool and rollout.nnodes > 1:
        yield (
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes}: has no effect without "
            "actor_rollout_ref.rollout.n_gpus_per_node"
        )
    if trainer.eval_n_gpus and trainer.backend == "local":
        yield (
            f"trainer.eval_n_gpus={trainer.eval_n_gpus}: trainer.backend=local has one process only; use "
            "trainer.backend=ray"
        )
    if not pool and trainer.lag and trainer.backend == "ray":
        yield (
            f"trainer.lag={trainer.lag}: generation and training cannot run concurrently in the same processes; give "
            "the rollout its own pool with actor_rollout_ref.rollout.n_gpus_per_node, or test it with "
            "trainer.backend=local"
        )
    yield from _hybrid_rollout_problems(config)
    if trainer.partial_rollout and trainer.lag < 2:
        yield (
            "trainer.partial_rollout=true: needs at least two versions of the weights; set trainer.lag=2 or "
            f"more, not {trainer.lag}"
        )
    bound = trainer.staleness
    if trainer.replay.groups and (bound is None or bound <= trainer.lag):
        yield (
            f"trainer.replay.groups={trainer.replay.groups}: limit the age of replayed samples with "
            f"trainer.staleness above trainer.lag={trainer.lag}, not {bound}"
        )
    reuses_samples = trainer.replay.groups or config.algorithm.filter_groups.chooses
    if bound is not None and bound > trainer.lag and not reuses_samples:
        yield f"trainer.staleness={bound}: no token gets older than trainer.lag={trainer.lag}; leave it out"
    if bound is not None and bound < trainer.lag and trainer.stale_tokens == "drop" and not trainer.partial_rollout:
        yield (
            f"trainer.staleness={bound} trainer.stale_tokens=drop: responses are trainer.lag={trainer.lag} versions "
            "old, so all of them would be dropped; use trainer.stale_tokens=wait, or trainer.partial_rollout=true"
        )


def _hybrid_rollout_problems(config: PPOConfig) -> Problems:
    """Yield settings with which the trainer's devices have nobody to help."""
    trainer, rollout, key = config.trainer, config.actor_rollout_ref.rollout, "trainer.hybrid_rollout=true"
    if not trainer.hybrid_rollout:
        return
    if not rollout.n_gpus_per_node:
        yield (
            f"{key}: without actor_rollout_ref.rollout.n_gpus_per_node the trainer's devices generate everything; set "
            "it, or leave this out"
        )
    elif not trainer.lag:
        yield (
            f"{key}: with trainer.lag=0 training and generation take turns, so all devices can do both; leave out "
            "actor_rollout_ref.rollout.n_gpus_per_node and this, or set trainer.lag=1"
        )
    if rollout.mode == "sync":
        yield (
            f"{key}: with actor_rollout_ref.rollout.mode=sync a batch is one call, which cannot be divided once it "
            "runs; use mode=async"
        )
