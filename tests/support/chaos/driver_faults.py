"""Middleware that ends the driver itself: `trainer.middleware=[tests/support/chaos/driver_faults.py:plant]`.

The environment says what to do:

DRIVER_FAULTS: JSON, a list of {"step", "stage", "after_s", "how"}, how: SIGKILL, SIGSTOP, exit, cluster (kill the
process that holds the Ray cluster), or worker (do nothing to the driver). "after_s" counts from the stage's first call,
once every rank has it; in a push of weights, and if it is 0, from the stage's start. A fault with a "role" kills rank 0
of that role "before_s" seconds before.
DRIVER_FAULTS_LOG: a file that gets a JSON line per fault; the next attempt of the driver reads there what was planted.
"""

import functools
import json
import os
import signal
import threading
import time

from hybridrl.framework.stage import spec_of
from hybridrl.single_controller import RayWorkerGroup

LOG = os.environ.get("DRIVER_FAULTS_LOG", "")
PLANTING = threading.Lock()  # stages may start at the same time, and one kill counts for one fault


def plant(task, trainer):
    task.use_wrapper(lambda fn: with_faults(fn, trainer))


def with_faults(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        step = trainer.global_steps + (name == "next_batch")  # that stage counts it up
        with PLANTING:
            for number, fault in enumerate(json.loads(os.environ["DRIVER_FAULTS"])):
                if (fault["step"], fault["stage"]) == (step, name) and number not in planted():
                    entry = {"number": number, "pids": worker_pids(trainer), **fault}
                    if fault["after_s"] == 0:  # a timer's thread may start when the next stage runs
                        log_fault(entry)
                        hit(fault, trainer)
                    elif name == "update_weights":
                        hit_later(entry, fault, trainer)
                    else:
                        after_next_call(functools.partial(hit_later, entry, fault, trainer))
        return fn(ctx)

    return run


def planted():
    if not os.path.exists(LOG):
        return []
    with open(LOG) as log:
        return [json.loads(line)["number"] for line in log]


def log_fault(entry):
    with open(LOG, "a") as log:
        log.write(json.dumps(entry | {"at": time.time() + entry["after_s"]}) + "\n")


def hit_later(entry, fault, trainer):
    log_fault(entry)
    threading.Timer(fault["after_s"], hit, (fault, trainer)).start()


def after_next_call(act):
    """Act when the next call of a group has been sent to all its ranks.

    A driver that dies between two of them leaves one rank waiting for the other, which costs their processes.
    """
    send = RayWorkerGroup.start_calls

    @functools.wraps(send)
    def start_calls(self, *args, **kwargs):
        RayWorkerGroup.start_calls = send
        references = send(self, *args, **kwargs)
        act()
        return references

    RayWorkerGroup.start_calls = start_calls


def worker_pids(trainer):
    return sorted({pid for group in trainer.groups.values() for pid in group.process_ids})


def hit(fault, trainer):
    if "role" in fault:
        os.kill(trainer.groups[fault["role"]].process_ids[0], signal.SIGKILL)
        time.sleep(fault["before_s"])
    if fault["how"] == "worker":
        return
    if fault["how"] == "exit":
        os._exit(3)
    if fault["how"] == "cluster":
        parent = os.getppid()
        with open(f"/proc/{parent}/task/{parent}/children") as children:
            [holder] = {int(pid) for pid in children.read().split()} - {os.getpid()}
        os.kill(holder, signal.SIGKILL)
        return
    os.kill(os.getpid(), getattr(signal, fault["how"]))
