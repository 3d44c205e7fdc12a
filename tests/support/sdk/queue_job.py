"""Roles that pass samples through `DataQueue`s, and a role that loads data with worker processes."""

import os
import signal
import time
from pathlib import Path

from hybridrl.errors import CallTimeout, ConfigError, WorkerLost
from hybridrl.sdk import DataQueue, RoleGroup, current_worker, rpc

LARGE = 300_000  # bytes; goes through the object store


class Holder:
    """Holds the queue, and is busy while others use it."""

    def __init__(self):
        if current_worker().actor_info.rank == 0:
            self.queue = DataQueue("samples", size=4, is_master=True)

    @rpc()
    def works_until(self, file):
        while not Path(file).exists():
            time.sleep(0.05)
        return os.getpid()

    @rpc()
    def takes(self, count):
        return self.queue.get(count, timeout_s=30)

    @rpc()
    def holds_another(self):
        try:
            DataQueue("samples", is_master=True)
        except ConfigError as error:
            return str(error)


class Producer:
    """Puts samples while it runs."""

    def run(self):
        queue = DataQueue("samples")
        for number in range(10):
            queue.put((number, bytes(LARGE)))


class Trainer:
    def run(self):
        queue, holder = DataQueue("samples"), RoleGroup("holder")
        out = current_worker().job_info.user_config.out
        busy = holder.call("works_until", f"{out}.gate")
        first = queue.get(3, timeout_s=60)
        answers_while_busy = not busy.done()
        while queue.qsize() < 4:  # the producer fills it, and waits
            time.sleep(0.05)
        full = queue.qsize()
        Path(f"{out}.gate").write_text("")
        rest = [queue.get(1, timeout_s=60)[0] for _ in range(5)]
        last = holder[0].call("takes", 2).result()
        results = [
            [number for number, _ in (*first, *rest, *last)],
            {len(data) for _, data in (*first, *rest, *last)},
            answers_while_busy,
            full,
            queue.get_nowait(5),
            holder[1].call("holds_another").result(),
        ]
        try:
            queue.get(1, timeout_s=0.3)
        except CallTimeout as error:
            results.append(str(error))
        try:
            DataQueue("mine", is_master=True)
        except ConfigError as error:
            results.append(str(error))
        [pid, _] = busy.result()
        queue.put((99, b""))
        os.kill(pid, signal.SIGKILL)
        results.append(self.after_the_loss(queue))
        Path(out).write_text(repr(results))

    def after_the_loss(self, queue):
        """Return what the queue has after its process was replaced."""
        for _ in range(20):
            try:
                queue.put((7, b"again"), timeout_s=30)
                return queue.get_nowait(9)
            except WorkerLost:
                time.sleep(1.0)


def loads_data(config):
    """A role that reads a data set with two worker processes of torch's DataLoader."""
    import ray
    from torch.utils.data import DataLoader

    assert ray.get_runtime_context().get_actor_id() is not None
    loader = DataLoader(Numbers(), batch_size=10, num_workers=2)
    batches = [(rows.tolist(), readers.tolist()) for rows, readers in loader]
    Path(config["out"]).write_text(repr((os.getpid(), batches)))


class Numbers:
    """A hundred rows: the row's number, and which process read it."""

    def __len__(self):
        return 100

    def __getitem__(self, row):
        return row, os.getpid()
