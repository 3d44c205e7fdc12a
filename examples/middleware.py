"""Change the loop from a file of your own, without a trainer of your own.

    python -m hybridrl.main_ppo trainer.middleware=[FILE:keep_what_teaches,FILE:log_stage_times] ...

FILE is examples/middleware.py.
"""

import sys
import time

from hybridrl.framework import stage


def keep_what_teaches(task, trainer):
    """Leave out of the update all prompts whose samples got the same reward: GRPO's gradient for them is zero."""

    @stage("keep_what_teaches", reads=("advantages", "reward_valid"), writes=("reward_valid",))
    def drop_rows_without_signal(ctx):
        columns = ctx.batch.batch
        teaches = (columns["advantages"] != 0).any(-1)
        columns["reward_valid"] = columns["reward_valid"] & teaches
        ctx.metrics["train/share_of_rows_that_teach"] = float(teaches.float().mean())

    task.insert_after("adv", drop_rows_without_signal)


def log_stage_times(task, trainer):
    """Print the slowest stage after every step."""

    def slowest(ctx):
        started = time.perf_counter()
        yield  # everything else runs here
        stages = {name: seconds for name, seconds in ctx.timing.items() if name not in ("step", "slowest")}
        name, seconds = max(stages.items(), key=lambda item: item[1])
        total = time.perf_counter() - started
        sys.stderr.write(f"step {trainer.global_steps}: {total:.2f} s, most of it {name} ({seconds:.2f} s)\n")

    task.insert_before("next_batch", stage("slowest")(slowest))
