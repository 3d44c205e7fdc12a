"""Middleware that plants faults into a real run: `trainer.middleware=[tests/support/chaos/faults.py:plant]`, told what
by the environment.

FAULTS: JSON, a list of {"step", "stage", "role", "rank", "kind", "method", "after_s"}. When that stage of that step
begins the process is told, once, and does it to itself when it has been in `method` for so many seconds: "" is when it
does nothing, None at once whatever it does. kind: see `victim.py`, which has to be in
`actor_rollout_ref.model.external_lib`. The role "trainer" is the driver; "master" knows nothing of this and is killed
from here.

FAULTS_LOG: a file that gets one JSON line for everything that happens, with "at" (`time.time`) and "what":
    hit      a fault, as it was told, with "pid" and what the process was "doing"
    stage    a stage begins: "step", "name", and the "pids" of all workers
    said     the library said "text"
    back     Ray has started the master again: "pid"
"""

import functools
import json
import logging
import os
import signal
import socket
import threading
import time

import ray

from hybridrl.driver.lifecycle import LIFE
from hybridrl.framework.stage import spec_of
from hybridrl.master.service.client import masters
from tests.support.chaos import victim

TO_COME = json.loads(os.environ.get("FAULTS", "[]"))
"""This module outlives the loop, which is made anew after a loss: what was planted once is not planted again. It
does not outlive the
driver; the next one reads in the log what has happened.
"""
LIBRARY = logging.getLogger("hybridrl")
STARTS_WITHIN_S = 10.0


def plant(task, trainer):
    if LIFE.number > 1:
        TO_COME[:] = [fault for fault in TO_COME if fault not in happened()]
    if not any(isinstance(handler, Listener) for handler in LIBRARY.handlers):
        LIBRARY.addHandler(Listener())
    task.use_wrapper(lambda fn: with_faults(fn, trainer))


def happened():
    """The faults in the log."""
    with open(os.environ["FAULTS_LOG"]) as log:
        entries = [json.loads(line) for line in log]
    return [{name: entry[name] for name in TO_COME[0]} for entry in entries if entry["what"] == "hit"]


class Listener(logging.Handler):
    def emit(self, record):
        note("said", at=record.created, text=record.getMessage())


def note(what, **entry):
    with open(os.environ["FAULTS_LOG"], "a") as log:
        log.write(json.dumps({"what": what, "at": time.time()} | entry) + "\n")


def with_faults(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        step = trainer.global_steps + (name == "next_batch")  # that stage counts it
        note(
            "stage", step=step, name=name, pids=[pid for group in trainer.groups.values() for pid in group.process_ids]
        )
        now = {
            (one["role"], one["rank"]): one for one in reversed(TO_COME) if (one["step"], one["stage"]) == (step, name)
        }
        for fault in now.values():  # one for each process; another for the same one is for the next time
            TO_COME.remove(fault)
            tell(fault, trainer)
        return fn(ctx)

    return run


def tell(fault, trainer):
    if fault["role"] == "master":
        timer = threading.Timer(fault["after_s"], kill_master, (fault, masters()[trainer.job]))
        timer.daemon = True  # a job may end before its master is back
        timer.start()
        return
    order = fault | {"log": os.environ["FAULTS_LOG"]}
    if fault["role"] == "trainer":
        threading.Thread(target=victim.carry_out, args=(order,), daemon=True).start()
        return
    pid = trainer.groups[fault["role"]].process_ids[fault["rank"]]
    send(pid, json.dumps(order).encode())


def kill_master(fault, master):
    while (pid := process_of(master)) is None:  # it is on its way back from the fault before
        time.sleep(0.01)
    note("hit", **fault, pid=pid)
    os.kill(pid, signal.SIGKILL)
    while (its := process_of(master)) in (None, pid):
        time.sleep(0.01)
    note("back", pid=its)


def process_of(master):
    """Its process id, or None while it is away."""
    try:
        return ray.get(master.describe.remote(), timeout=60)["pid"]
    except ray.exceptions.RayError:
        return None


def send(pid, order):
    until = time.monotonic() + STARTS_WITHIN_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        while True:
            try:
                return outbox.sendto(order, victim.address(pid))
            except ConnectionRefusedError:  # a process that was started anew and has not loaded its model yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
