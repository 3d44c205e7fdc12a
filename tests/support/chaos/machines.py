"""Simulated machines: each has a network, process ids and shared memory of its own, and can be disconnected.

Needs root and iproute2.

    with Switch() as switch:
        machine = switch.add_machine()
        machine.start_ray(f"{switch.host}:6379", num_cpus=1, object_store_bytes=100 * 1024**2)
        machine.disconnect()        # its processes run on, but no packet arrives and no connection is closed
        machine.reconnect()
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

END_TIMEOUT_S = 20


def can_simulate() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Switch:
    """A bridge that connects simulated machines; `host` is this machine's address on it."""

    def __init__(self) -> None:
        self.name, self.network, self.machines = f"hrl{os.getpid()}", f"10.77.{os.getpid() % 256}", []
        self.host = f"{self.network}.1"

    def __enter__(self) -> "Switch":
        ip("link", "add", self.name, "type", "bridge")
        ip("addr", "add", f"{self.host}/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.end()
        ip("link", "del", self.name)

    def add_machine(self) -> "Machine":
        number = len(self.machines) + 2
        machine = Machine(self.name, f"{self.network}.{number}", number)
        self.machines.append(machine)
        return machine


class Machine:
    def __init__(self, switch: str, address: str, number: int) -> None:
        self.address, self._name, self._cable = address, f"{switch}-{number}", f"{switch}c{number}"
        self._ray: subprocess.Popen | None = None
        ip("netns", "add", self._name)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        ip("link", "set", self._cable, "master", switch, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self._name, *words)

    @property
    def ray_pid(self) -> int:
        """Process id of what starts Ray on the machine, as seen from here; all of its processes are below it."""
        return self._ray.pid if self._ray is not None else 0

    def is_ray_gone(self) -> bool:
        """Return whether Ray has ended: it does so when the cluster has declared its node dead."""
        return self._ray is None or self._ray.poll() is not None

    def start_ray(self, head: str, *, num_cpus: int, object_store_bytes: int, wait: bool = True) -> None:
        """Start Ray on the machine and connect it to a cluster; returns when Ray runs.

        Args:
            head: Address of the cluster.
            num_cpus, object_store_bytes: Resources of the machine.
            wait: False returns at once.
        """
        ray = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            f"--address={head}",
            f"--node-ip-address={self.address}",
        ]
        size = [f"--num-cpus={num_cpus}", f"--object-store-memory={object_store_bytes}"]
        apart = ["ip", "netns", "exec", self._name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        apart += ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}  # its only network interface
        output_to = subprocess.PIPE if wait else subprocess.DEVNULL
        self._ray = subprocess.Popen(
            [*apart, *ray, *size], env=environment, stdout=output_to, stderr=subprocess.STDOUT, text=True
        )
        if not wait:
            return
        output = []
        for line in self._ray.stdout or ():  # start one after the other: they choose names in the same directory
            output.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError("".join(output))

    def disconnect(self) -> None:
        ip("link", "set", self._cable, "down")

    def reconnect(self) -> None:
        ip("link", "set", self._cable, "up")

    def kill_ray(self) -> None:
        """Kill all processes of the machine: `unshare` ends its process namespace with itself."""
        if self._ray is not None:
            self._ray.kill()
            self._ray.wait(END_TIMEOUT_S)

    def end(self) -> None:
        self.kill_ray()
        ip("netns", "del", self._name)
