"""`python -m hybridrl.main_ppo key=value ...`: PPO, GRPO and their relatives.

Loads and validates the settings, maps roles to worker classes and pools, and trains. Runs in the driver, and under a
supervisor in its parent, too. The work is done by what this file refers to.
"""

from hybridrl.driver.entry import start  # isort: split

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import hybridrl
from hybridrl import algos, driver, master, rewards, single_controller
from hybridrl.algos.signatures import check_signature
from hybridrl.config import PPOConfig, check_config, load_config
from hybridrl.config.plugs import load_plugins
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.run_context import RunContext
from hybridrl.driver.terminal import show
from hybridrl.errors import ObjectLost, PlacementError, WorkerLost
from hybridrl.framework.status import reporting
from hybridrl.trainer import ppo, recovery
from hybridrl.trainer import run as run_files
from hybridrl.trainer.checkpoint.store import newest_checkpoint
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers import engine, rollout, weight_transfer

logger = logging.getLogger("hybridrl.main_ppo")  # not __name__, which is __main__ in the program
PROGRAM, PRESET = "python -m hybridrl.main_ppo", "ppo_trainer"
WorkerClasses = dict[Role, type]
CAPACITY_HINTS = {  # by pool: what to change if the cluster cannot hold it
    "rollout_pool": "Lower actor_rollout_ref.rollout.n_gpus_per_node or "
    "actor_rollout_ref.rollout.nnodes, or add nodes to the Ray cluster",
    "teacher_pool": "Lower distillation.n_gpus_per_node or distillation.nnodes, or add nodes to the Ray cluster",
    "eval_pool": "Lower trainer.eval_n_gpus, or add nodes to the Ray cluster",
}


def main(
    argv: Sequence[str] | None = None,
    *,
    trainer_cls: "type[hybridrl.RayPPOTrainer] | None" = None,
    workers: Callable[[PPOConfig], WorkerClasses] | None = None,
    pools: Callable[[PPOConfig, WorkerClasses], ResourcePoolManager] | None = None,
    program: str = PROGRAM,
    preset: str = PRESET,
) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code.

    Args:
        argv: Arguments. With None the program also saves its command and runs the driver under a supervisor.
        trainer_cls: Your own trainer; built in is `RayPPOTrainer`.
        workers: Your own mapping of roles to worker classes; built in is `worker_classes`.
        pools: Your own placement of roles on pools; built in is `resource_pools`.
        program: The program as the user typed it.
        preset: Preset used without `--config-name`.
    """
    set_up_logging()
    context = RunContext()
    guarded = functools.partial(run_program, context=context, newest_checkpoint=newest_checkpoint)
    with contextlib.ExitStack() as held:  # the lock of the run's directory
        load = functools.partial(load_config, PPOConfig, argv, program=program, config_name=preset)
        code = guarded(lambda: _prepare(context, held, load, keep_command=argv is None))
        if code or context.config is None:
            return code
        train = functools.partial(guarded, lambda: _train(context, trainer_cls, workers, pools))
        if argv is not None or not (recovery.is_supervisable(context.config.trainer) and driver.can_supervise()):
            return train()
        report_end = functools.partial(
            recovery.report_final_decision, context.config.trainer, num_nodes=num_nodes(context.config)
        )
        if code := guarded(load_driver):
            return code
        return driver.supervise(
            train, context.lifecycle, start_cluster=driver.start_local_cluster, report_end=report_end
        )


def _prepare(
    context: RunContext, held: contextlib.ExitStack, load: Callable[[], PPOConfig | None], *, keep_command: bool
) -> None:
    """Read and check the settings, and prepare the run's directory."""
    config = load()
    if config is None:  # the settings were shown
        return
    validate_config(config)
    context.directory = held.enter_context(run_files.prepared_run_directory(config.trainer))
    run_files.warn_about_disabled_outputs(config)
    if keep_command:
        driver.save_command(context.directory)
    context.config = config


def _train(
    context: RunContext,
    trainer_cls: "type[hybridrl.RayPPOTrainer] | None",
    workers: Callable[[PPOConfig], WorkerClasses] | None,
    pools: Callable[[PPOConfig, WorkerClasses], ResourcePoolManager] | None,
) -> None:
    classes = (workers or worker_classes)(context.config)
    manager = (pools or resource_pools)(context.config, classes)
    config = recovery.with_resume_overrides(context.config, context.lifecycle)
    run(config, classes, manager, trainer_cls=trainer_cls, context=context)


def load_driver() -> None:
    """Import what a driver on Ray needs.

    Every fork of this process is then a driver that is ready.
    """
    _ = hybridrl.RayPPOTrainer, hybridrl.ActorRolloutRefWorker, rewards.load_reward_manager, run_files.report_run
    _ = single_controller.RayWorkerGroup, single_controller.launch, master.plan_job, driver.start_ray
    _ = recovery.run_under_master, recovery.load_surviving_state, recovery.StepRetry, engine.check_model


def validate_config(config: PPOConfig, *, with_inputs: bool = True) -> None:
    """Raise ConfigError for settings that cannot work, before anything starts.

    Args:
        config: Settings.
        with_inputs: Also require that data, models and packages are on this machine.
    """
    load_plugins(config)
    chosen, data = config.actor_rollout_ref.rollout, config.data
    sync = chosen.weight_sync
    rollout_cls, name = rollout.rollout_class(chosen.name), config.algorithm.adv_estimator
    estimator = algos.ADVANTAGE_ESTIMATORS.get(name)
    check_config(
        config,
        known_estimators=algos.ADVANTAGE_ESTIMATORS,
        group_estimators=[name] if estimator and estimator.needs_group else [],
        critic_estimators=[name] if estimator and estimator.needs_critic else [],
        known_losses=algos.POLICY_LOSSES,
        own_agg_modes=algos.OWN_AGG_MODES,
        rollout=rollout_cls.capabilities,
        transport=None if sync.by_placement else weight_transfer.transport_capabilities(sync.transport),
        plug_problems=[
            *rollout_cls.setting_problems(chosen, max_length=data.max_prompt_length + data.max_response_length),
            *(rollout_cls.package_problems() if with_inputs else ()),
        ],
        with_inputs=with_inputs,
    )
    _check_own_loss(config)


def _check_own_loss(config: PPOConfig) -> None:
    """Raise ConfigError if a policy loss of the user's own cannot be called."""
    settings = config.actor_rollout_ref.actor.policy_loss
    name, losses = settings.loss_mode, algos.POLICY_LOSSES
    if name in losses and name not in losses.builtins:
        fn = losses.lookup(name)
        columns = [parameter for parameter in inspect.signature(fn).parameters if parameter.endswith("_BT")]
        check_signature(
            fn,
            what=f"the policy loss {name!r}",
            positional=("log_probs_BT", "old_log_probs_BT", "advantages_BT", "response_mask_BT"),
            offered=("clip_low", "clip_high", "clip_c", *asdict(settings), *columns),
        )


def run(
    config: PPOConfig,
    workers: WorkerClasses,
    manager: ResourcePoolManager,
    *,
    trainer_cls: "type[hybridrl.RayPPOTrainer] | None" = None,
    compute_score: Callable[..., Any] | None = None,
    context: RunContext | None = None,
) -> None:
    """Train as configured, then write the report.

    Args:
        config: Settings that `validate_config` accepts.
        workers: Role -> worker class.
        manager: Placement of the roles.
        trainer_cls: Your own trainer; built in is `RayPPOTrainer`.
        compute_score: Reward function of the calling program; None takes the one that the settings name.
        context: The run's state in this process.
    """
    context = context or RunContext()
    model = config.actor_rollout_ref.model
    assert model.path is not None  # `check` demands it
    tokenizer = load_tokenizer(
        model.path, key="actor_rollout_ref.model.path", trust_remote_code=model.trust_remote_code
    )
    check_models(config, tokenizer)
    if config.distillation.enabled:
        ppo.check_teachers(config, tokenizer)
    load_rewards = functools.partial(rewards.load_reward_manager, config, tokenizer, compute_score=compute_score)
    reward_fn, val_reward_fn = load_rewards(), load_rewards(validate=True)
    if config.trainer.backend == "ray":
        driver.start_ray(num_nodes=num_nodes(config), lifecycle=context.lifecycle)
    is_async = config.actor_rollout_ref.rollout.mode == "async"
    groups = single_controller.RayWorkerGroup if config.trainer.backend == "ray" else single_controller.LocalWorkerGroup
    trainer = (trainer_cls or hybridrl.RayPPOTrainer)(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=workers,
        resource_pool_manager=manager,
        ray_worker_group_cls=groups,
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
        agent_loops=hybridrl.AgentLoopManager(config, tokenizer) if is_async else None,
        context=context,
    )
    logger.info("loading %s into the workers", model.path)
    try:
        with trainer.monitored():
            with reporting("loading the models"):
                trainer.init_workers()
            trainer.fit()
    except (WorkerLost, ObjectLost, PlacementError) as error:
        if trainer.global_steps:
            context.lifecycle.request_new_job(str(error))
        raise
    finally:
        trainer.shutdown()
        reward_fn.close()
        val_reward_fn.close()
    written = {"rollouts": config.trainer.rollout_data_dir, "validation samples": config.trainer.validation_data_dir}
    show(
        run_files.report_run(
            run_files.run_directory(config.trainer),
            checkpoint=run_files.newest_checkpoint_of_run(config.trainer),
            written=written,
            trained=not config.trainer.val_only,
        )
    )


def check_models(config: PPOConfig, tokenizer: Any) -> None:
    """Raise ConfigError for a model whose files are damaged or whose vocabulary is smaller than the tokenizer's."""
    actor, mode = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.router_replay.mode
    if mode != "disabled" and actor.path is not None:
        key = f"actor_rollout_ref.actor.router_replay.mode={mode}"
        engine.check_routing(actor.path, key=key, trust_remote_code=actor.trust_remote_code)
    others = {"critic.model": config.critic.model.path if ppo.uses_critic(config) else None}
    others["reward_model.model"] = config.reward_model.model.path if config.reward_model.enable else None
    for name, path in {"actor_rollout_ref.model": actor.path, **others}.items():
        if path is not None:
            engine.check_model(
                path,
                key=f"{name}.path",
                tokenizer=tokenizer,
                trust_remote_code=actor.trust_remote_code,
                override_config=actor.override_config if path == actor.path else None,
            )


def num_nodes(config: PPOConfig) -> int:
    """Return how many machines the job needs."""
    teachers = config.distillation.nnodes if config.distillation.enabled else 1
    return max(config.trainer.nnodes, config.actor_rollout_ref.rollout.nnodes, teachers)


def worker_classes(config: PPOConfig) -> WorkerClasses:
    """Return role -> worker class. Add or replace entries to use your own workers.

    An actor with adapters is its own reference policy.
    """
    scores: WorkerClasses = {Role.RewardModel: hybridrl.RewardModelWorker} if config.reward_model.enable else {}
    if config.only_generates:
        return {Role.Rollout: hybridrl.ActorRolloutRefWorker} | scores
    separated = config.actor_rollout_ref.rollout.n_gpus_per_node > 0
    policy = (Role.Actor, Role.Rollout) if separated else (Role.ActorRollout,)
    workers: WorkerClasses = dict.fromkeys(policy, hybridrl.ActorRolloutRefWorker)
    if ppo.uses_critic(config):
        workers[Role.Critic] = hybridrl.CriticWorker
    if ppo.uses_reference(config) and not config.actor_rollout_ref.model.uses_lora:
        workers[Role.RefPolicy] = hybridrl.ActorRolloutRefWorker
    if config.distillation.enabled:
        workers[Role.TeacherModel] = hybridrl.ActorRolloutRefWorker
    workers |= scores
    if config.trainer.eval_n_gpus:
        workers[Role.Evaluator] = hybridrl.ActorRolloutRefWorker
    return workers


def resource_pools(config: PPOConfig, workers: WorkerClasses) -> ResourcePoolManager:
    """Return the placement of roles on pools.

    One pool for all roles, except for rollout, teachers and evaluator with devices of their own.
    """
    trainer, rollout, teachers = config.trainer, config.actor_rollout_ref.rollout, config.distillation
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys(workers, "global_pool")
    if rollout.n_gpus_per_node:
        spec["rollout_pool"] = [rollout.n_gpus_per_node] * rollout.nnodes
        mapping[Role.Rollout] = "rollout_pool"
    if teachers.enabled and teachers.n_gpus_per_node:
        spec["teacher_pool"] = [teachers.n_gpus_per_node] * teachers.nnodes
        mapping[Role.TeacherModel] = "teacher_pool"
    if trainer.eval_n_gpus:
        spec["eval_pool"] = [trainer.eval_n_gpus]
        mapping[Role.Evaluator] = "eval_pool"
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[trainer.device]
    return ResourcePoolManager(spec, mapping, use_gpu=use_gpu, backend=trainer.backend, hints=CAPACITY_HINTS)


if __name__ == "__main__":
    start(main)
