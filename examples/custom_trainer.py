"""Change one stage and add another, without copying the loop. Takes the arguments of `python -m hybridrl.main_ppo`.

python examples/custom_trainer.py algorithm.adv_estimator=grpo data.train_files=... actor_rollout_ref.model.path=...
"""

import sys

from hybridrl.framework import spec_of, stage
from hybridrl.main_ppo import main
from hybridrl.trainer.ppo.trainer import RayPPOTrainer


class ClippedAdvantageTrainer(RayPPOTrainer):
    """GRPO with clipped advantages that also logs the share of rows with a non-zero advantage."""

    def stages(self):
        stages = super().stages()
        names = [spec_of(s).name for s in stages]
        stages.insert(names.index("adv") + 1, stage("signal", reads=("advantages",))(self.signal))
        return stages

    def advantage(self, ctx):
        super().advantage(ctx)
        ctx.batch.batch["advantages"] = ctx.batch.batch["advantages"].clamp(-2, 2)

    def signal(self, ctx):
        ctx.metrics["train/rows_with_signal"] = float((ctx.batch.batch["advantages"] != 0).any(-1).float().mean())


if __name__ == "__main__":
    sys.exit(main(trainer_cls=ClippedAdvantageTrainer))
