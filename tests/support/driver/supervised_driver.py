"""A supervised program for tests: `python -m tests.support.driver.supervised_driver SCENARIO [FILE]`.

Each scenario is one driver function; it prints what every attempt does.
"""

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hybridrl.driver import supervisor
from hybridrl.driver.cluster import holder
from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.system.child_guard import children_of

LIFECYCLE = DriverLifecycle()


def emit(*words: object) -> None:
    print(*words, flush=True)


def killed_twice() -> int:
    emit("attempt", LIFECYCLE.attempt, LIFECYCLE.run_id, LIFECYCLE.restarted_by)
    if LIFECYCLE.attempt < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 5


def killed_always() -> int:
    emit("attempt", LIFECYCLE.attempt)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def reports_its_end() -> int:
    emit("attempt", LIFECYCLE.attempt, LIFECYCLE.run_id)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def killed_once_a_step() -> int:
    emit("attempt", LIFECYCLE.attempt)
    LIFECYCLE.report_step(LIFECYCLE.attempt)
    if LIFECYCLE.attempt < 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def exits_without_report() -> int:
    if LIFECYCLE.attempt == 1:
        os._exit(9)
    return 0


def raises() -> int:
    emit("attempt", LIFECYCLE.attempt)
    raise ValueError("a mistake")


def requests_a_new_job() -> int:
    emit("attempt", LIFECYCLE.attempt, LIFECYCLE.run_id, LIFECYCLE.restarted_by)
    LIFECYCLE.report_step(4)
    LIFECYCLE.request_new_job("no machine is left")
    return 1


def stops_its_program() -> int:
    """Stop the supervisor, send it what it will not read, and wait."""
    os.kill(os.getppid(), signal.SIGSTOP)
    LIFECYCLE.report_step(1)
    emit(os.getpid())
    time.sleep(60)
    return 0


def kills_its_program_and_ends() -> int:
    """End well after the supervisor, before this process kills itself for that."""
    supervisor_id = os.getppid()
    LIFECYCLE.on_orphaned = lambda: time.sleep(10)
    os.kill(supervisor_id, signal.SIGKILL)
    while os.getppid() == supervisor_id:
        time.sleep(0.01)
    return 0


def freezes() -> int:
    emit("attempt", LIFECYCLE.attempt)
    if LIFECYCLE.attempt == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    return 0


def freezes_for_ever() -> int:
    emit(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
    return 0


def waits_for_signal() -> int:
    """End 1.5 s after the first signal."""
    received: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
    emit("pid", os.getpid())
    until = time.monotonic() + 60
    while not received and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.5)
    emit(*received)
    return 143


def leaves_a_stopped_cluster() -> int:
    """End well; the process that holds the cluster no longer runs."""
    LIFECYCLE.ray_address()
    time.sleep(0.5)
    emit(os.getpid())
    return 0


def waits_for_a_frozen_cluster() -> int:
    emit("attempt", LIFECYCLE.attempt, LIFECYCLE.ray_address())
    return 0


def loses_its_cluster_while_it_exits() -> int:
    """End with an error; the cluster's process is then killed, and this one waits for it."""
    LIFECYCLE.ray_address()
    [holding] = {*children_of(os.getppid())} - {os.getpid()}
    atexit.register(time.sleep, 60)
    atexit.register(os.kill, holding, signal.SIGKILL)
    sys.stderr.write("error: found before\n")
    return 1


def start_cluster_that_freezes_once() -> str:
    """Freeze, unless the file that the program was given exists."""
    mark = Path(sys.argv[2])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return "an address"


def start_cluster_that_stops() -> str:
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGSTOP]).start()
    return "an address"


def pause_supervisor() -> None:
    """Let the supervisor wait between reading a driver's reports and deciding what follows, as a busy machine does."""
    check = holder.HeldCluster.kill_if_frozen

    def check_and_wait(cluster: holder.HeldCluster) -> None:
        check(cluster)
        time.sleep(0.3)

    holder.HeldCluster.kill_if_frozen = check_and_wait


if __name__ == "__main__":
    holder.STOP_TIMEOUT_S = 2.0
    if sys.argv[1] == "loses_its_cluster_while_it_exits":
        pause_supervisor()
    reports = sys.argv[1] == "reports_its_end"
    report_end = (lambda run_id, decision: emit("end", run_id, decision)) if reports else (lambda *_: None)
    start_cluster = start_cluster_that_freezes_once if len(sys.argv) > 2 else start_cluster_that_stops
    supervise = supervisor.supervise
    sys.exit(supervise(globals()[sys.argv[1]], LIFECYCLE, start_cluster=start_cluster, report_end=report_end))
