"""A Ray cluster of simulated machines for one run, with links that can be cut.

The head has no cores, so that all workers of the run are on the other machines (`tests/support/chaos/machines.py`). A
machine whose node was declared dead starts Ray anew, as a service of a real machine would do.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.blind.processes import Process
from tests.support.chaos.machines import END_TIMEOUT_S, Machine, Switch

OBJECT_STORE_BYTES = 100 * 1024**2
PORT = 6379
NETWORKS = Path("/run/netns")  # where `ip` keeps the names of network namespaces
RAY_FILES = Path("/tmp/ray")  # where Ray writes logs and sockets, and the address of the last cluster of the machine
WORKERS = ("ray::WorkerHost", "ray::JobMaster", "ray::SnapshotStore", "ray::JobSupervisor")


class DrillCluster:
    """Runs from `with` on, in namespaces of a stage's own; Ray's files are in `ray` of the stage's folder.

    Attributes:
        address: HOST:PORT of the head.
    """

    def __init__(self, num_machines: int, environment: Mapping[str, str], folder: Path):
        self._num_machines, self._environment, self._files = num_machines, dict(environment), folder / "ray"
        self._switch = Switch()
        self._head: subprocess.Popen | None = None
        self._lost: list[Machine] = []
        self.address = f"{self._switch.host}:{PORT}"

    def __enter__(self) -> "DrillCluster":
        NETWORKS.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(NETWORKS)], check=True, timeout=END_TIMEOUT_S)
        self._files.mkdir(exist_ok=True)
        RAY_FILES.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", str(self._files), str(RAY_FILES)], check=True, timeout=END_TIMEOUT_S)
        # The run gets the environment of its stage. Its driver demands a token of the other machines' raylets.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.update(self._environment | token)
        self._switch.__enter__()
        for _ in range(self._num_machines):
            self._switch.add_machine()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            self._head.kill()
            self._head.wait(END_TIMEOUT_S)
        self._switch.__exit__()

    def _start(self) -> None:
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=0"]
        size = [f"--port={PORT}", f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false"]
        command = [*ray, *size, f"--node-ip-address={self._switch.host}", "--disable-usage-stats"]
        self._head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output = []
        for line in self._head.stdout or ():
            output.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise RuntimeError("".join(output))
        for machine in self._switch.machines:
            machine.start_ray(self.address, num_cpus=1, object_store_bytes=OBJECT_STORE_BYTES)

    def restart_lost(self) -> list[str]:
        """Start Ray anew where it has ended, but not on lost machines; return the addresses of these machines."""
        gone = [machine for machine in self._switch.machines if machine not in self._lost and machine.is_ray_gone()]
        for machine in gone:
            machine.start_ray(self.address, num_cpus=1, object_store_bytes=OBJECT_STORE_BYTES, wait=False)
        return [machine.address for machine in gone]

    def cut_link(self, draw: float, below: Mapping[int, Process]) -> tuple[str, Callable[[], None]]:
        """Cut the link of a machine; return its address and what ends this.

        Args:
            draw: Number in [0, 1) that chooses one of the machines with workers of the run, if there are any.
            below: All processes of the run and of the cluster.
        """
        machine = self._choose(draw, below)
        machine.disconnect()
        return machine.address, machine.reconnect

    def lose_machine(self, draw: float, below: Mapping[int, Process]) -> tuple[str, Callable[[], None]]:
        """Kill all processes of a machine at once; return its address and what brings the machine back.

        For the arguments see `cut_link`.
        """
        machine = self._choose(draw, below)
        self._lost.append(machine)
        machine.kill_ray()
        return machine.address, lambda: self._lost.remove(machine)

    def _choose(self, draw: float, below: Mapping[int, Process]) -> Machine:
        machines = [machine for machine in self._switch.machines if machine not in self._lost]
        chosen = [machine for machine in machines if _has_workers(machine, below)] or machines
        return chosen[int(draw * len(chosen))]

    def is_own(self, pid: int, below: Mapping[int, Process]) -> bool:
        """Return whether this process is one of the cluster, and not of the run that uses it."""
        roots = [machine.ray_pid for machine in self._switch.machines]
        roots += [self._head.pid] if self._head is not None else []
        return not below[pid].command.startswith(WORKERS) and any(_is_below(pid, root, below) for root in roots)


def _has_workers(machine: Machine, below: Mapping[int, Process]) -> bool:
    return any(
        process.command.startswith(WORKERS[0]) and _is_below(pid, machine.ray_pid, below)
        for pid, process in below.items()
    )


def _is_below(pid: int, root: int, below: Mapping[int, Process]) -> bool:
    while pid in below and pid != root:
        pid = below[pid].parent
    return pid == root
