"""Sends batches to `learner.py`, until that ends the run."""

import time

from hybridrl.framework import OnlineRLContext, Parallel, task


def main():
    with task.start(ctx=OnlineRLContext()):
        weights = {}
        task.on("weights", weights.update)

        def collect(ctx):
            task.emit("batch", [1, 2, 3])
            time.sleep(0.01)

        task.use(collect).run()
        return weights


[weights] = Parallel.runner(1, name="collector", attach_to=["learner"])(main)
print("the collector received", weights)
