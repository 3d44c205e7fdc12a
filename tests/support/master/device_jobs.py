"""Prints the devices that each process of some jobs sees, on a cluster of its own with eight GPUs that do not exist.

A line has the job, and of each process by rank: local rank, what Ray reserved for it, CUDA_VISIBLE_DEVICES.
"""

import os
import sys
import tempfile
from pathlib import Path

import ray

from hybridrl.errors import PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder

NUM_GPUS = 8


def write_devices(config, role):
    """What every process runs."""
    own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    words = [os.environ["LOCAL_RANK"], *own, os.environ.get("CUDA_VISIBLE_DEVICES", "nothing")]
    Path(config["out"], f"{role}-{os.environ['RANK']}").write_text(" ".join(words))


class Devices:
    """A worker that says what it sees, and whose processes end on request."""

    def devices(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def die(self):
        os.kill(os.getpid(), 9)


def loses_a_process(job):
    """A trainer that loses rank 1 and recovers it."""
    from hybridrl.errors import WorkerLost

    group = job.groups["r"]
    before = [group.execute_rank(rank, "devices") for rank in range(2)]
    try:
        group.execute_rank(1, "die")
    except WorkerLost as lost:
        job.recover(lost)
    after = [group.execute_rank(rank, "devices") for rank in range(2)]
    Path(job.config["out"], "r-0").write_text(f"{before} {after}")


def submit(name, describe):
    with tempfile.TemporaryDirectory() as folder:
        builder = DLJobBuilder().config({"out": folder})
        job = describe(builder).build()
        if name == "rank_based":
            job.workloads["r"].rank_based_gpu_selection = True
        try:
            job.submit(name)
            answers = [path.read_text() for path in sorted(Path(folder).iterdir())]
        except PlacementError as error:
            answers = [str(error)]
        print(name, *answers, sep=" | ", flush=True)


def four(builder):
    return builder.role("r").run(write_devices).total(4).per_node(2)


def main(names):
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=NUM_GPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024**2,
    )
    jobs = {
        "own": four,
        "disabled": lambda builder: four(builder).disable_ray_auto_visible_device(),
        "enabled": lambda builder: four(builder).disable_ray_auto_visible_device().enable_ray_auto_visible_device(),
        "rank_based": four,
        "shared": lambda builder: (
            builder.role("r").run(write_devices).total(2).per_node(2).resource(accelerator=0.5)
        ).disable_ray_auto_visible_device(),
        "restarted": lambda builder: (
            (builder.trainer(loses_a_process).resource(cpu=1).role("r").run(Devices).total(2).per_node(2))
            .restart("process")
            .disable_ray_auto_visible_device()
        ),
    }
    for name in names:
        submit(name, jobs[name])


if __name__ == "__main__":
    main(sys.argv[1:])
