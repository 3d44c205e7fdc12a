"""Progress of long calls: a worker counts what it has done, and the driver asks while it waits.

Rollouts and engines report, in the process that works. `framework/status.py` asks, in the driver: its own process, and
the job's master, which has it from the workers' heartbeats.
"""

from hybridrl.single_controller.monitoring.process import PROCESS, WorkDone, ask_master

TIMEOUT_S = 2.0  # of the master's answer; without one the line has no numbers


def report_work(done: int, total: int, unit: str) -> None:
    """Say how far the call in progress has come."""
    PROCESS.work = WorkDone(done, total, unit)


def forget_work() -> None:
    """Drop what an earlier call in this process has counted."""
    PROCESS.work = None


def ask_work() -> WorkDone | None:
    """Return what this process and the workers of its job have done, summed.

    None if none of them counts. Processes that count another unit than the first are left out. The ranks of one engine
    count the same tokens: the share is right, the numbers are theirs together.
    """
    of_workers = ask_master("work_done", timeout_s=TIMEOUT_S) or []
    found = [WorkDone(*work) for work in [PROCESS.work, *of_workers] if work is not None]
    same = [one for one in found if one.unit == found[0].unit]
    return WorkDone(sum(w.done for w in same), sum(w.total for w in same), same[0].unit) if same else None
