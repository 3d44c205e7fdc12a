"""A training run with a node for each process, that loses nodes and gets others later.

    python -m tests.support.chaos.returning_node FOLDER MODEL NODES EVENTS [SETTING=VALUE ...]

EVENTS is `-`, or a list of STEP:EVENT, each before the generation of its step: `7:lose,11:return`.

    lose            the node of the actor's last rank is removed
    lose_rollout    that of the rollout is
    return          a node joins; the generation waits until Ray has reserved a missing slot there

Prints JSON lines: what was done, the events of the master's journal, and the exit code.
"""

import functools
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from hybridrl import main_ppo
from hybridrl.framework.stage import spec_of
from hybridrl.master.service.journal import history
from hybridrl.system.process_stat import read_process_stat
from tests.support.chaos.lost_node import OBJECT_STORE_BYTES, emit

SIZE = {"object_store_memory": OBJECT_STORE_BYTES}
RESERVED_TIMEOUT_S = 300.0
ENDED_TIMEOUT_S = 60.0
planned: dict[int, str] = {}  # step -> what happens before its generation
cluster: Cluster


def plant(task, trainer):
    task.use_wrapper(lambda fn: with_changes(fn, trainer))


def with_changes(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        main = sys.modules["__main__"]  # the middleware is loaded by path, as a second copy of this module
        change = main.planned.pop(trainer.global_steps, None) if name == "gen" else None
        if change is not None:
            main.EVENTS[change](trainer)
        return fn(ctx)

    return run


def lose(trainer):
    remove(trainer, trainer.policy.actor)


def lose_rollout(trainer):
    remove(trainer, trainer.policy.rollout)


def remove(trainer, group):
    """Remove the node of the group's last process.

    Returns when the process has ended, so that this step misses it.
    """
    node_id, process_id = group.processes.nodes[-1], group.processes.process_ids[-1]
    emit(lost=node_id, step=trainer.global_steps)
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == node_id), allow_graceful=False)
    until = time.monotonic() + ENDED_TIMEOUT_S
    while read_process_stat(process_id).state:
        if time.monotonic() > until:
            sys.exit(f"process {process_id} did not end within {ENDED_TIMEOUT_S:g} s of the loss of its node")
        time.sleep(0.01)


def return_node(trainer):
    cluster.add_node(num_cpus=1, **SIZE)
    until = time.monotonic() + RESERVED_TIMEOUT_S
    while not trainer.rank_policy.can_grow():
        if time.monotonic() > until:
            sys.exit("the missing slot was not reserved on the new node")
        time.sleep(0.1)
    emit(returned=True, step=trainer.global_steps)


EVENTS = {"lose": lose, "lose_rollout": lose_rollout, "return": return_node}

if __name__ == "__main__":
    folder, model, num_nodes, events, *changes = sys.argv[1:]
    pairs = [event.split(":") for event in events.split(",") if event != "-"]
    planned = {int(step): name for step, name in pairs}
    from tests.support.end_to_end.runs import settings

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SIZE})
    for _ in range(int(num_nodes)):
        cluster.add_node(num_cpus=1, **SIZE)
    cluster.wait_for_nodes()
    ray.init(cluster.address, log_to_driver=False)
    start = {"trainer__middleware": f"[{__file__}:plant]", "trainer__backend": "ray", "trainer__master": True}
    code = main_ppo.main([*settings(Path(folder), Path(model), **start), *changes])
    ray.shutdown()
    cluster.shutdown()
    for journal in (Path(folder) / "run/master").glob("*"):
        for entry in history(str(journal)):
            emit(event=type(entry.event).__name__, written_at=entry.at, **vars(entry.event))
    emit(code=code)
    sys.exit(code)
