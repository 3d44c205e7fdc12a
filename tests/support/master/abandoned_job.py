"""Starts a job on a cluster of its own, waits for its commit, and ends the cluster with it: FOLDER is the argument."""

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
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
