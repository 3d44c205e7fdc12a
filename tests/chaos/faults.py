"""Middleware that plants faults into a real run: `trainer.middleware=[tests/chaos/faults.py:plant]`, told what by the environment.

FAULTS: JSON, a list of {"step", "stage", "after_s", "role", "rank", "signal"}. So many seconds after that stage of that step has begun, the
process is hit, once. FAULTS_LOG: a file that gets one JSON line per hit, {"pid", "at"} (`time.time`) and what was asked for.
"""

import functools
import json
import os
import threading
import time

from hybridrl.framework.stage import spec_of

TO_COME = json.loads(os.environ.get("FAULTS", "[]"))
"""This module outlives the loop, which is made anew after a loss: what was planted once is not planted again."""


def plant(task, trainer):
    task.use_wrapper(lambda fn: with_faults(fn, trainer))


def with_faults(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        step = trainer.global_steps + (name == "next_batch")  # that stage counts it
        now = {(one["role"], one["rank"]): one for one in reversed(TO_COME) if (one["step"], one["stage"]) == (step, name)}
        for fault in now.values():  # one for each process; another for the same one is for the next time
            TO_COME.remove(fault)
            hit_later(fault, trainer)
        return fn(ctx)

    return run


def hit_later(fault, trainer):
    if not fault["after_s"]:
        hit(fault, trainer)
        return
    threading.Timer(fault["after_s"], hit, (fault, trainer)).start()


def hit(fault, trainer):
    pid = trainer.groups[fault["role"]].process_ids[fault["rank"]]
    with open(os.environ["FAULTS_LOG"], "a") as log:
        log.write(json.dumps(fault | {"pid": pid, "at": time.time()}) + "\n")
    os.kill(pid, fault["signal"])
