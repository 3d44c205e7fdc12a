"""Role trainer: the training loop. It calls the other roles, commits after each step, and survives lost processes."""

from collections.abc import Mapping

from examples.openrlhf_ppo import remote_call
from examples.openrlhf_ppo.utils.experience_maker import ExperienceMaker
from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.errors import WorkerLost
from hybridrl.master.jobs.job_handle import JobHandle
from hybridrl.trainer.checkpoint.reading import verify_manifest
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.ppo.policy.cross_process_sync import CrossProcessWeightSync

KEPT_CHECKPOINTS = 2


class PPOTrainerActor:
    """Trains policy and critic with PPO (arXiv:1707.06347)."""

    def __init__(self, job: JobHandle):
        self.job, self.args = job, job.config
        self.maker = ExperienceMaker(self.args)
        self.metrics: Mapping[str, float] = {}  # of the last step, for `hybridrl job status`
        self.store = CheckpointStore(self.args["save_path"], keep=KEPT_CHECKPOINTS)
        self.weights = CrossProcessWeightSync(
            job.groups["actor"],
            job.groups["rollout"],
            WeightSyncConfig(transport=self.args["weight_transport"]),
            overlaps_training=False,
        )

    def run(self) -> None:
        """Train until `num_steps`. A loss of a process takes the training back to the last commit."""
        step: int | None = None  # completed steps; None: to be found out
        while step is None or step < self.args["num_steps"]:
            try:
                step = self.resume() if step is None else self.fit_step(step + 1)
            except WorkerLost as lost:
                print(f"lost a process: {lost}", flush=True)
                step = None
                self.recover(lost)
        self.finish(step)

    def resume(self) -> int:
        """Bring every role to the last commit, on which a new run begins, too; return its step."""
        remote_call.init_all()
        newest = self.store.latest()
        step = 0 if newest is None else verify_manifest(newest)
        if newest is None:
            self.commit(0)
        else:
            remote_call.load_checkpoint(newest)
            print(f"resumed from {newest}", flush=True)
        self.broadcast(step)
        return step

    def fit_step(self, step: int) -> int:
        """Take one step of PPO and commit it."""
        self.job.report_step(step, self.metrics)
        experiences, metrics = self.maker.make_experience(step)
        remote_call.append_experience(experiences)
        [actor, *_], [critic, *_] = remote_call.wait_for(remote_call.actor_update(), remote_call.critic_update())
        self.broadcast(step)
        self.commit(step)
        self.report(step, metrics, actor=actor, critic=critic)
        return step

    def broadcast(self, version: int) -> None:
        """Push the actor's weights to the rollout, and verify that it holds them."""
        self.weights.push(version).wait()

    def commit(self, step: int) -> None:
        """Write a checkpoint that appears complete, and report it, so that the next trainer finds it."""
        self.job.report_commit(step, self.store.commit(step, remote_call.save_checkpoint))

    def recover(self, lost: WorkerLost) -> None:
        """Get new processes for the lost ones. Raises WorkerLost if a role was lost too often."""
        self.weights.cancel(str(lost))
        self.weights.reset()
        self.job.recover(lost)

    def report(
        self, step: int, metrics: Mapping[str, float], *, actor: Mapping[str, float], critic: Mapping[str, float]
    ) -> None:
        self.metrics = {name: metrics[name] for name in ("score", "kl")}
        print(
            f"step {step:3d}  score {metrics['score']:.3f}  kl {metrics['kl']:6.3f}  grad norms: actor "
            f"{actor['grad_norm']:.3f}, critic {critic['grad_norm']:.3f}  updates {actor['num_updates']}",
            flush=True,
        )

    def finish(self, step: int) -> None:
        remote_call.end_job()
        print(f"done: {step} steps, checkpoint {self.store.latest()}", flush=True)
