"""`python -m hybridrl.main_ppo key=value ...`: PPO, GRPO and their relatives.

Parse, check, map roles to worker classes and pools, run. This file is the map; what it points to does the work.
"""

import functools
import logging
import signal
import sys
from collections.abc import Callable, Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C within the seconds of the imports just ends it, without a traceback out of torch

from hybridrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hybridrl.algos.policy_losses import OWN_AGG_MODES, POLICY_LOSSES
from hybridrl.config import PPOConfig, check_config, load_config
from hybridrl.config.import_path import load_plugs
from hybridrl.driver.lifecycle import LIFE
from hybridrl.driver.program import run_front_end, set_up_logging
from hybridrl.driver.ray_cluster import start_local_cluster, start_ray
from hybridrl.driver.resume_command import note_command
from hybridrl.driver.supervisor import can_keep_running, keep_running
from hybridrl.errors import ObjectLost, PlacementError, WorkerLost
from hybridrl.rewards.load import load_reward_manager
from hybridrl.serving.agent_loop.manager import AgentLoopManager
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup
from hybridrl.trainer.checkpoint.store import newest_checkpoint
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.ppo.stages import uses_critic, uses_reference
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.recovery.master_link import watched
from hybridrl.trainer.recovery.step_snapshot import go_on_with, is_kept_running
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.trainer.run.report import report_run
from hybridrl.trainer.run.setup import claim_directory, own_checkpoint, run_directory, tell_what_is_left_out
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reward_model import RewardModelWorker

logger = logging.getLogger("hybridrl.main_ppo")  # __name__ is __main__ when this is the program
PROGRAM = "python -m hybridrl.main_ppo"
Workers = dict[Role, type]
WORKER_GROUPS = {"ray": RayWorkerGroup, "local": LocalWorkerGroup}
WAYS_OUT = {  # what to change when the cluster cannot hold a pool
    "rollout_pool": "Lower actor_rollout_ref.rollout.n_gpus_per_node or "
    "actor_rollout_ref.rollout.nnodes, or add nodes to the Ray cluster",
    "eval_pool": "Lower trainer.eval_n_gpus, or add nodes to the Ray cluster",
}


def main(
    argv: Sequence[str] | None = None,
    *,
    trainer_cls: type[RayPPOTrainer] = RayPPOTrainer,
    workers: Callable[[PPOConfig], Workers] | None = None,
    pools: Callable[[PPOConfig, Workers], ResourcePoolManager] | None = None,
) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code.

    trainer_cls, workers, pools: your own trainer, mapping of roles to worker classes, and placement of roles on pools;
    `worker_classes` and `resource_pools` are the built-in ones.
    """
    set_up_logging()
    directory: list[str] = []

    wanted: list[PPOConfig] = []

    def prepare() -> None:
        config = load_config(
            PPOConfig, sys.argv[1:] if argv is None else argv, program=PROGRAM, config_name="ppo_trainer"
        )
        if config is not None:
            check(config)
            directory.append(claim_directory(config.trainer))
            tell_what_is_left_out(config)
            if argv is None:
                note_command(directory[0])
            wanted.append(config)

    def work() -> None:
        [config] = wanted
        classes = (workers or worker_classes)(config)
        run(go_on_with(config), classes, (pools or resource_pools)(config, classes), trainer_cls=trainer_cls)

    def front_end(what: Callable[[], None]) -> int:
        return run_front_end(
            what, log_directory=lambda: directory[0] if directory else None, newest_checkpoint=newest_checkpoint
        )

    code = front_end(prepare)
    if code or not wanted:
        return code
    train = functools.partial(front_end, work)
    if argv is None and is_kept_running(wanted[0].trainer) and can_keep_running():
        return keep_running(train, start_cluster=start_local_cluster)
    return train()


def check(config: PPOConfig, *, with_inputs: bool = True) -> None:
    """Refuse what cannot be right, before anything starts. with_inputs: data and models have to be there."""
    load_plugs(config)
    check_config(
        config,
        known_estimators=ADVANTAGE_ESTIMATORS,
        group_estimators=[name for name, e in ADVANTAGE_ESTIMATORS.items() if e.needs_group],
        critic_estimators=[name for name, e in ADVANTAGE_ESTIMATORS.items() if e.needs_critic],
        known_losses=POLICY_LOSSES,
        own_agg_modes=OWN_AGG_MODES,
        with_inputs=with_inputs,
    )


def run(
    config: PPOConfig,
    workers: Workers,
    manager: ResourcePoolManager,
    *,
    trainer_cls: type[RayPPOTrainer] = RayPPOTrainer,
) -> None:
    """Train as configured, then write the report."""
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(
        model.path, key="actor_rollout_ref.model.path", trust_remote_code=model.trust_remote_code
    )
    reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
    val_reward_fn = load_reward_manager(config, tokenizer, num_examine=0, validate=True)
    if config.trainer.backend == "ray":
        start_ray(num_nodes=max(config.trainer.nnodes, config.actor_rollout_ref.rollout.nnodes))
    trainer = trainer_cls(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=workers,
        resource_pool_manager=manager,
        ray_worker_group_cls=WORKER_GROUPS[config.trainer.backend],
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
        **(
            {"agent_loops": AgentLoopManager(config, tokenizer)}
            if config.actor_rollout_ref.rollout.mode == "async"
            else {}
        ),
    )
    logger.info("loading %s into the workers", model.path)
    try:
        with watched(trainer):
            trainer.init_workers()
            trainer.fit()
    except (WorkerLost, ObjectLost, PlacementError) as error:
        if trainer.global_steps:
            LIFE.lost_the_job(str(error))
        raise
    finally:
        trainer.shutdown()
        reward_fn.close()
        val_reward_fn.close()
    written = {"rollouts": config.trainer.rollout_data_dir, "validation samples": config.trainer.validation_data_dir}
    sys.stdout.write(
        report_run(run_directory(config.trainer), checkpoint=own_checkpoint(config.trainer), written=written)
    )


def worker_classes(config: PPOConfig) -> Workers:
    """Which class works for which role. Add or replace entries to bring your own workers."""
    separated = config.actor_rollout_ref.rollout.n_gpus_per_node > 0
    workers: Workers = dict.fromkeys(
        (Role.Actor, Role.Rollout) if separated else (Role.ActorRollout,), ActorRolloutRefWorker
    )
    if uses_critic(config):
        workers[Role.Critic] = CriticWorker
    if uses_reference(config):
        workers[Role.RefPolicy] = ActorRolloutRefWorker
    if config.reward_model.enable:
        workers[Role.RewardModel] = RewardModelWorker
    if config.trainer.eval_n_gpus:
        workers[Role.Evaluator] = ActorRolloutRefWorker
    return workers


def resource_pools(config: PPOConfig, workers: Workers) -> ResourcePoolManager:
    """Where roles work: all on one pool of all devices, except a rollout and an evaluator with devices of their own."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys(workers, "global_pool")
    if rollout.n_gpus_per_node:
        spec["rollout_pool"] = [rollout.n_gpus_per_node] * rollout.nnodes
        mapping[Role.Rollout] = "rollout_pool"
    if trainer.eval_n_gpus:
        spec["eval_pool"] = [trainer.eval_n_gpus]
        mapping[Role.Evaluator] = "eval_pool"
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[trainer.device]
    return ResourcePoolManager(spec, mapping, use_gpu=use_gpu, backend=trainer.backend, ways_out=WAYS_OUT)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
