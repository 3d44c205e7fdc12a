"""Middleware that plants faults into a real run: `trainer.middleware=[tests/support/chaos/faults.py:plant]`.

The environment says which:

FAULTS: JSON, a list of {"step", "stage", "role", "rank", "kind", "method", "after_s"}. When that stage of that step
starts, the process receives the fault once, and applies it to itself after `after_s` seconds in `method`: "" means
while idle, None at once. kind: see `victim.py`, which has to be in `actor_rollout_ref.model.external_lib`. The role
"trainer" is the driver; "master" is killed from here.

FAULTS_LOG: a file that gets one JSON line for everything that happens, with "at" (`time.time`) and "what":
    hit      a fault, as planted, with "pid" and what the process was "doing"
    stage    a stage starts: "step", "name", the "pids" of all workers and the "cpu_s" that each has used
    said     the library logged "text"
    back     Ray has restarted the master: "pid"
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

from hybridrl.framework.stage import spec_of
from hybridrl.master.service.client import list_masters
from hybridrl.system.process_stat import read_process_stat
from tests.support.chaos import victim

PENDING = json.loads(os.environ.get("FAULTS", "[]"))
"""Faults not planted yet. Outlives the loop (rebuilt after a loss) but not the driver: the next one reads the log."""
LIBRARY = logging.getLogger("hybridrl")
START_TIMEOUT_S = 10.0


def plant(task, trainer):
    if trainer.context.lifecycle.attempt > 1:
        PENDING[:] = [fault for fault in PENDING if fault not in planted_before()]
    if not any(isinstance(handler, LogRecorder) for handler in LIBRARY.handlers):
        LIBRARY.addHandler(LogRecorder())
    task.use_wrapper(lambda fn: with_faults(fn, trainer))


def planted_before():
    """Return the faults in the log."""
    with open(os.environ["FAULTS_LOG"]) as log:
        entries = [json.loads(line) for line in log]
    return [{name: entry[name] for name in PENDING[0]} for entry in entries if entry["what"] == "hit"]


class LogRecorder(logging.Handler):
    def emit(self, record):
        log_event("said", at=record.created, text=record.getMessage())


def log_event(what, **entry):
    with open(os.environ["FAULTS_LOG"], "a") as log:
        log.write(json.dumps({"what": what, "at": time.time()} | entry) + "\n")


def with_faults(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        step = trainer.global_steps + (name == "next_batch")  # that stage counts it up
        pids = [pid for group in trainer.groups.values() for pid in group.process_ids]
        cpu_s = [read_process_stat(pid).cpu_s for pid in pids]
        log_event("stage", step=step, name=name, pids=pids, cpu_s=cpu_s)
        now = {
            (one["role"], one["rank"]): one for one in reversed(PENDING) if (one["step"], one["stage"]) == (step, name)
        }
        for fault in now.values():  # one per process; a second one is for the next start of the stage
            PENDING.remove(fault)
            plant_fault(fault, trainer)
        return fn(ctx)

    return run


def plant_fault(fault, trainer):
    if fault["role"] == "master":
        timer = threading.Timer(fault["after_s"], kill_master, (fault, list_masters()[trainer.job]))
        timer.daemon = True  # a job may end before its master is restarted
        timer.start()
        return
    message = fault | {"log": os.environ["FAULTS_LOG"]}
    if fault["role"] == "trainer":
        threading.Thread(target=victim.apply, args=(message,), daemon=True).start()
        return
    pid = trainer.groups[fault["role"]].process_ids[fault["rank"]]
    send(pid, json.dumps(message).encode())


def kill_master(fault, master):
    while (pid := process_of(master)) is None:  # Ray still restarts it after the previous fault
        time.sleep(0.01)
    log_event("hit", **fault, pid=pid)
    os.kill(pid, signal.SIGKILL)
    while (new_pid := process_of(master)) in (None, pid):
        time.sleep(0.01)
    log_event("back", pid=new_pid)


def process_of(master):
    """Return the master's process id, None while Ray restarts it."""
    try:
        return ray.get(master.describe.remote(), timeout=60)["pid"]
    except ray.exceptions.RayError:
        return None


def send(pid, message):
    """Plant a fault in a process, and return when it waits there: a late one would meet a later call."""
    until = time.monotonic() + START_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.bind("")  # the kernel chooses an address for the answer
        outbox.settimeout(START_TIMEOUT_S)
        while True:
            try:
                outbox.sendto(message, victim.address(pid))
                return outbox.recv(64)
            except ConnectionRefusedError:  # a restarted process that has not loaded its model yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
