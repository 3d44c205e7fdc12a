"""`WorkerHost`: the one Ray actor class of this library. A process that holds the workers of one or several roles.

It is made empty, so that making it cannot fail for a user's reason; `setup` then places it in its group and constructs the
workers, and an error there reaches the caller with its own type.
"""

import os
import socket
import time
from typing import Any

from hybridrl.single_controller.worker import WorkerPlace
from hybridrl.single_controller.worker_group import ClassWithInitArgs, free_port


class WorkerHost:
    def __init__(self, recipes: dict[str, ClassWithInitArgs]):
        self.recipes = recipes
        self.workers: dict[str, Any] = {}
        self.busy_s: dict[str, float] = {}

    def rendezvous(self) -> tuple[str, int]:
        """Return an address of this node and a free port, where rank 0 of a group may listen."""
        return _node_address(), free_port()

    def setup(self, place: WorkerPlace, environment: dict[str, str]) -> int:
        """Enter the group and construct this process's workers, in the order of the recipes. Returns the process id."""
        os.environ.update(environment | place.environment())
        self.workers = {role: recipe() for role, recipe in self.recipes.items()}
        return os.getpid()

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of one role's worker. References among the arguments arrive as their values."""
        start = time.perf_counter()
        try:
            return getattr(self.workers[role], method)(*args, **kwargs)
        finally:
            name = f"{role}.{method}"
            self.busy_s[name] = self.busy_s.get(name, 0.0) + time.perf_counter() - start

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds spent inside each `role.method` so far: what is left of a step's time is the controller's."""
        return self.busy_s


def _node_address() -> str:
    """The address of the interface that leads outside; the loopback on a machine without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # TEST-NET-1: no packet is sent by connecting a datagram socket
            return s.getsockname()[0]
        except OSError:
            return "127.0.0.1"
