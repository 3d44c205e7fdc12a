"""Add a method to a worker and call it on the whole group. Takes the arguments of `python -m hybridrl.main_ppo`.

python examples/custom_worker.py algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
"""

import sys

from hybridrl.main_ppo import main, worker_classes
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.roles import Role
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker


class MeasuredWorker(ActorRolloutRefWorker):
    """The policy's worker with a method that returns the norm of its weights."""

    @register(Dispatch.ONE_TO_ALL)
    def weight_norm(self) -> float:
        return sum(float(tensor.float().pow(2).sum()) for _, tensor in self.actor.weights()) ** 0.5


class MeasuringTrainer(RayPPOTrainer):
    def update_actor(self, ctx):
        super().update_actor(ctx)
        ctx.metrics["actor/weight_norm"] = self.policy.actor.weight_norm()[0]


def workers(config):
    return worker_classes(config) | {Role.ActorRollout: MeasuredWorker}


if __name__ == "__main__":
    sys.exit(main(trainer_cls=MeasuringTrainer, workers=workers))
