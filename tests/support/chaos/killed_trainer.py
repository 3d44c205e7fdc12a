"""`main_ppo` that kills itself with SIGKILL: KILL_STEP and KILL_BEFORE name a step and a stage, `commit` or `refill`.

`commit` is the middle of writing a checkpoint: the engines' files exist, the driver's do not. `refill` is the middle of
dynamic sampling: the second generation batch of the step is generated, and not scored.
"""

import os
import signal
import sys

from hybridrl import main_ppo
from hybridrl.framework import spec_of, stage
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

STEP, STAGE = int(os.environ.get("KILL_STEP", "-1")), os.environ.get("KILL_BEFORE", "")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledTrainer(RayPPOTrainer):
    def stages(self):
        stages = super().stages()
        if STAGE not in ("", "commit", "refill"):
            names = [spec_of(s).name for s in stages]
            stages.insert(names.index(STAGE), stage("kill")(self.kill))
        return stages

    def kill(self, ctx):
        # `next_batch` counts the step up.
        if self.global_steps + (STAGE == "next_batch") == STEP:
            die()

    def reward(self, ctx):
        if STAGE == "refill" and self.global_steps == STEP and "gen_batch" in ctx:
            die()
        super().reward(ctx)

    def trained_groups(self):
        groups = super().trained_groups()
        return groups | {"kill": self} if STAGE == "commit" and self.global_steps == STEP else groups

    def save_checkpoint(self, where):
        if isinstance(where, str):
            die()
        super().save_checkpoint(where)


if __name__ == "__main__":
    sys.exit(main_ppo.main(trainer_cls=KilledTrainer))
