"""Rules on what runs beside training, and on how many processes: agent loops, generation ahead, transports, ranks.

`rules.py` loads them only if the settings name one of these.
"""

from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.config.engines import SECTIONS, rank_unit
from hybridrl.config.schema.ppo import PPOConfig

HTTP_AGENT, OUTSIDE_AGENT = "http_agent", "outside_agent"  # agent loops of programs: started, or asking for work
ENVIRONMENT_LOOPS = ("environment_agent", "verifiers_agent")
BY_POSITION = ("optimal_token_baseline", "tir_optimal_token_baseline")  # estimators
ASYNC_SETTINGS = ("agent", "multi_turn", "progress_timeout_s", "endpoint_port", "endpoint_host")  # of rollout


def agent_problems(config: PPOConfig) -> Problems:
    """Yield agent-loop settings without effect, and transports that do not fit `mode=async`."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.mode == "sync":
        idle = (f"{key}.{name}" for name in ASYNC_SETTINGS)
        yield from idle_problems(config, *idle, why=f"without {key}.mode=async")
        return
    if rollout.agent.default_agent_loop in (HTTP_AGENT, OUTSIDE_AGENT):
        yield from _program_problems(config)
    if rollout.agent.default_agent_loop in ENVIRONMENT_LOOPS:
        yield from _environment_problems(config)
    if not rollout.endpoint_port:
        yield from idle_problems(config, f"{key}.endpoint_host", why=f"without {key}.endpoint_port")


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


def weight_sync_problems(config: PPOConfig, transport: TransportCapabilities | None) -> Problems:
    """Yield transports that do not fit the placement of actor and rollout. None: hybridrl chooses the transport."""
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.rollout.weight_sync"
    chosen, pool = policy.rollout.weight_sync, "actor_rollout_ref.rollout.n_gpus_per_node"
    needs_directory = transport is not None and transport.needs_directory
    if needs_directory and chosen.directory is None:
        yield f"{key}.transport={chosen.transport}: has no directory; set {key}.directory"
    if not needs_directory and chosen.directory is not None:
        yield f"{key}.directory={chosen.directory}: has no effect without {key}.transport=disk"
    if not policy.rollout.n_gpus_per_node and not chosen.by_placement:
        yield (
            f"{key}.transport={chosen.transport}: actor and rollout share their processes, so nothing is "
            f"transported; leave it out, or give the rollout its own pool with {pool}"
        )
    if policy.rollout.n_gpus_per_node and chosen.transport == "in_process":
        yield f"{key}.transport=in_process: the rollout has processes of its own ({pool}); use auto"
    if chosen.lora == "adapter" and not policy.model.uses_lora:
        yield f"{key}.lora=adapter: there are no adapters; set actor_rollout_ref.model.lora_rank, or leave it out"


def ahead_problems(config: PPOConfig) -> Problems:
    """Yield settings with which generation cannot run ahead, or would drop every token."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pool = rollout.n_gpus_per_node
    if not pool:
        why = "without actor_rollout_ref.rollout.n_gpus_per_node"
        yield from idle_problems(config, "actor_rollout_ref.rollout.nnodes", why=why)
    if not pool and trainer.lag and trainer.backend == "ray":
        yield (
            f"trainer.lag={trainer.lag}: generation and training cannot run concurrently in the same processes; give "
            "the rollout its own pool with actor_rollout_ref.rollout.n_gpus_per_node, or test it with "
            "trainer.backend=local"
        )
    bound = trainer.staleness
    if trainer.partial_rollout and trainer.rollout_lag < 2:
        name, value = ("lag", trainer.lag) if trainer.lag < 2 else ("staleness", bound)
        yield f"trainer.partial_rollout=true: needs two weight versions; set trainer.{name}=2 or more, not {value}"
    if trainer.partial_rollout and rollout.mode == "sync":
        yield (
            "trainer.partial_rollout=true: actor_rollout_ref.rollout.mode=sync generates each batch in one call, which "
            "cannot wait for new weights; set actor_rollout_ref.rollout.mode=async"
        )
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


def elastic_problems(config: PPOConfig) -> Problems:
    """Yield why the run could not go on with fewer ranks (`trainer.min_ranks`)."""
    trainer, least = config.trainer, config.trainer.min_ranks
    size, strategy = trainer.nnodes * trainer.n_gpus_per_node, config.actor_rollout_ref.actor.strategy
    if not least:
        return
    key = f"trainer.min_ranks={least}"
    if least > size:
        yield f"{key}: the run has {size} ranks (trainer.nnodes * trainer.n_gpus_per_node); set at most that"
    if strategy not in SECTIONS:
        yield (
            f"{key}: actor_rollout_ref.actor.strategy={strategy} is not built in, and its checkpoints may not load "
            "into another number of ranks; use fsdp or megatron, or leave it out"
        )
    elif least % (unit := rank_unit(config)):
        yield (
            f"{key}: {unit} processes share a model (tensor, pipeline, context and expert parallel sizes of engine and "
            f"rollout), so the number of ranks is a multiple of {unit}; set {-(-least // unit) * unit}"
        )
    if trainer.save_freq < 0:
        yield f"{key}: a lost machine takes its snapshots with it; set trainer.save_freq"
    if not trainer.snapshot_freq:
        yield f"{key}: with trainer.snapshot_freq=0 a lost process ends the run; set it to 1 or more"
