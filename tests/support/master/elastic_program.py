"""A program and functions that the processes of an elastic role run.

As a program: writes its world into the directory `--out`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT")


def write_world(folder):
    file = Path(folder, f"rank-{os.environ['RANK']}")
    with file.open("a") as lines:
        lines.write(" ".join(os.environ[name] for name in WORLD) + "\n")


def kill_self_when(written):
    """Kill this process when its peer, which is ended with it, has written its world."""
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def works(config):
    time.sleep(0.1)
    write_world(config["out"])


def raises(config):
    write_world(config["out"])
    raise ArithmeticError("an error in the elastic role")


def is_killed_once(config):
    """Rank 0 is killed while it runs, the first time."""
    write_world(config["out"])
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        kill_self_when(Path(config["out"], "rank-1"))


def is_killed_before_it_joins(config):
    """Rank 1 is killed the first time, before it meets the others."""
    import torch.distributed as dist

    write_world(config["out"])
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        kill_self_when(Path(config["out"], "rank-0"))
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


def waits_for_a_file(config):
    write_world(config["out"])
    while not Path(config["out"], "gate").exists():
        time.sleep(0.05)


def writes_resources(config):
    import ray

    resources = ray.get_runtime_context().get_assigned_resources()
    Path(config["out"], f"rank-{os.environ['RANK']}").write_text(f"WR {resources.get('WR')}, MR {resources.get('MR')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--test", type=int)
    arguments = parser.parse_args()
    write_world(arguments.out)
    raise SystemExit(arguments.test)
