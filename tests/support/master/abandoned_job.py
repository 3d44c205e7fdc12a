"""Starts a job on a cluster of its own, waits for its commit, and ends the cluster with it.

Arguments: FOLDER, and `kill` to end every process of the cluster, and this one, by SIGKILL.
"""

import os
import signal
import sys
import time
from pathlib import Path

import ray

from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.service.journal import replay
from tests.support.master.sample_job import goes_on_at_its_commit


def main(folder: Path) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 1024**2)
    config = {"out": str(folder / "out"), "gate": str(folder / "gate")}
    builder = DLJobBuilder().device_type("CPU").config(config).trainer(goes_on_at_its_commit).resource(cpu=0.25)
    builder.workload("actor", "tests.support.master.sample_job:Adder").resource(cpu=0.25)
    running = builder.build().submit("abandoned", blocking=False, journal=str(folder / "journals"))
    while replay(running.journal)[0].step < 7:
        time.sleep(0.1)
    if sys.argv[2:] == ["kill"]:
        for pid in [*descendants(os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    ray.shutdown()


def descendants(pid: int) -> list[int]:
    """The processes that this one started, and theirs, before any of them ends."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [one for child in children for one in descendants(child)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
