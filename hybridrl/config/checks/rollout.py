"""Rules on generation, for `rules.py`: engine, agent loops, weight sync, asynchrony."""

from collections.abc import Iterator
from importlib.util import find_spec

from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import RolloutConfig

Problems = Iterator[str]


def rollout_problems(config: PPOConfig) -> Problems:
    """Yield settings with which the generation engine cannot run."""
    chosen = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    yield from _rollout_rank_problems(config)
    if chosen.name == "vllm" and find_spec("vllm") is None:
        yield f"{prefix}.name=vllm: vLLM is not installed; in the checkout: pip install -e '.[vllm]' (CUDA), or use hf"
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
    longest = config.data.max_prompt_length + config.data.max_response_length
    if chosen.name == "vllm" and not chosen.enable_chunked_prefill and chosen.max_num_batched_tokens < longest:
        yield (
            f"{prefix}.max_num_batched_tokens={chosen.max_num_batched_tokens}: without "
            f"{prefix}.enable_chunked_prefill a step must hold "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens; raise it"
        )
    if chosen.val_kwargs.n > 1 and not chosen.val_kwargs.do_sample:
        yield (
            f"{prefix}.val_kwargs.n={chosen.val_kwargs.n}: greedy samples are identical; set "
            f"{prefix}.val_kwargs.do_sample=true"
        )


def _rollout_rank_problems(config: PPOConfig) -> Problems:
    """Yield pools that cannot be divided into engines whose ranks are on one machine."""
    chosen, trainer = config.actor_rollout_ref.rollout, config.trainer
    size, key = chosen.tensor_model_parallel_size, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if size == 1:
        return
    if chosen.name != "vllm":
        yield f"{key}={size}: {chosen.name} generates on one device; use actor_rollout_ref.rollout.name=vllm, or 1"
        return
    if chosen.mode == "async":
        yield f"{key}={size}: each request is served by a single process; use actor_rollout_ref.rollout.mode=sync, or 1"
    pools = {"actor_rollout_ref.rollout.n_gpus_per_node" if chosen.n_gpus_per_node else "trainer.n_gpus_per_node"}
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
    defaults, lag = RolloutConfig(), config.trainer.lag
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
    sync, serves_while_training = rollout.weight_sync, rollout.n_gpus_per_node and (lag or rollout.endpoint_port)
    why = f"trainer.lag={lag}" if lag else f"{key}.endpoint_port={rollout.endpoint_port}"
    lost = f"with {why}, a rollout process that restarts while the actor trains needs"
    if serves_while_training and sync.transport in ("shared_memory", "broadcast"):
        yield (
            f"{key}.weight_sync.transport={sync.transport}: {lost} weights that the actor no longer has; use "
            "auto, object_store or disk"
        )
    if serves_while_training and sync.lora == "adapter":
        yield f"{key}.weight_sync.lora=adapter: {lost} all weights of the last push; leave it out"
    if rollout.endpoint_host != defaults.endpoint_host and not rollout.endpoint_port:
        yield f"{key}.endpoint_host={rollout.endpoint_host}: has no effect without {key}.endpoint_port"


def weight_sync_problems(config: PPOConfig) -> Problems:
    """Yield transports that do not fit the placement of actor and rollout."""
    chosen, separated = (
        config.actor_rollout_ref.rollout.weight_sync,
        config.actor_rollout_ref.rollout.n_gpus_per_node > 0,
    )
    key = "actor_rollout_ref.rollout.weight_sync"
    if not separated and chosen.transport not in ("auto", "in_process"):
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
    if chosen.lora == "adapter" and not config.actor_rollout_ref.model.lora_rank:
        yield f"{key}.lora=adapter: there are no adapters; set actor_rollout_ref.model.lora_rank, or leave it out"
    if chosen.transport == "disk" and chosen.directory is None:
        yield f"{key}.transport=disk: has no directory; set {key}.directory"
    if chosen.transport != "disk" and chosen.directory is not None:
        yield f"{key}.directory={chosen.directory}: has no effect without {key}.transport=disk"


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
    if bound is not None and bound > trainer.lag and not trainer.replay.groups:
        yield f"trainer.staleness={bound}: no token gets older than trainer.lag={trainer.lag}; leave it out"
    if bound is not None and bound < trainer.lag and trainer.stale_tokens == "drop" and not trainer.partial_rollout:
        yield (
            f"trainer.staleness={bound} trainer.stale_tokens=drop: responses are trainer.lag={trainer.lag} versions "
            "old, so all of them would be dropped; use trainer.stale_tokens=wait, or trainer.partial_rollout=true"
        )
    if config.algorithm.rollout_correction.rollout_is and not rollout.calculate_log_probs:
        yield (
            f"algorithm.rollout_correction.rollout_is={config.algorithm.rollout_correction.rollout_is}: needs the "
            "rollout's log-probs; set actor_rollout_ref.rollout.calculate_log_probs=true"
        )
