"""An own stage of the training step. `trainer.middleware` in config.yaml names the function that inserts it."""

from hybridrl.framework import stage


def log_right_answers(task, trainer):
    """Log how many prompts of the step had at least one right answer."""

    @stage("right_answers", reads=())
    def right_answers(ctx):
        uids, right = ctx.batch.non_tensor_batch["uid"], ctx.reward_extra["acc"]
        solved = {uid for uid, value in zip(uids, right, strict=True) if value}
        ctx.metrics["train/share_of_prompts_solved"] = len(solved) / len({*uids})

    task.insert_after("reward", right_answers)
