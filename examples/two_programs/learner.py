"""Trains on what `collector.py` sends, and sends it weights.

They are two programs on one Ray cluster, started in any order.

ray start --head --port 6379
export RAY_ADDRESS=127.0.0.1:6379
cd examples/two_programs; python learner.py & python collector.py; wait
ray stop
"""

import time

from hybridrl.framework import OnlineRLContext, Parallel, task


def main():
    with task.start(ctx=OnlineRLContext()):
        batches = []
        task.on("batch", batches.append)

        def train(ctx):
            while batches:
                batches.pop()
                ctx.train_iter += 1
            task.emit("weights", {"weight": ctx.train_iter}, newest_only=True)
            ctx.finish = ctx.train_iter >= 20  # ends the collector's run, too
            time.sleep(0.01)

        task.use(train).run()
        return task.ctx.train_iter


[num_batches] = Parallel.runner(1, name="learner")(main)
print("the learner trained on", num_batches, "batches")
