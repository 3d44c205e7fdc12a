"""A worker class whose workers call one another, without torch. `hops` are the roles to call, the next one first."""

import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

from hybridrl.master.jobs.job_handle import GroupHandle
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.invocation import Dispatch, Invocation, register
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup
from hybridrl.single_controller.worker import Worker

PLANTED = "planted in the last hop"


class Caller(Worker):
    def __init__(self) -> None:
        self.groups: dict[str, RayWorkerGroup[Any]] = {}
        self.relayed: Any = None

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, groups: dict[str, GroupHandle]) -> None:
        self.groups = {role: handle.to_group() for role, handle in groups.items()}

    @register(Dispatch.ONE_TO_ALL)
    def attach(self, names: list[str]) -> None:
        RayWorkerGroup.from_detached(worker_names=names, timeout_s=30)

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def relay(self, hops: Sequence[str], method: str, *args: Any) -> Any:
        """Call `relay` of the next hop and wait for it; the last hop's `method` is called instead."""
        call = (method, *args) if len(hops) == 1 else ("relay", hops[1:], method, *args)
        self.relayed = self.groups[hops[0]].execute_rank_zero(*call)
        return self.relayed

    @register(Dispatch.ONE_TO_ALL, timeout_s=30, concurrency=2)
    def relay_meanwhile(self, hops: Sequence[str], method: str) -> Any:
        return self.relay(hops, method)

    def last_relayed(self) -> Any:
        return self.relayed

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def relay_and_work(self, hops: Sequence[str], seconds: float, wait: bool = False) -> Any:
        """Start `relay` on the next hop, work for `seconds`, and only then wait for it, or not at all."""
        group = self.groups[hops[0]]
        reference = group.execute_rank_zero_async("relay", hops[1:], "weights")
        time.sleep(seconds)
        return group.fetch([reference]) if wait else "worked"

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def sleep_and_relay(self, seconds: float, other: str) -> Any:
        """Work for `seconds`, then wait for the other role's weights."""
        time.sleep(seconds)
        return self.groups[other].execute_rank_zero("weights")

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> str:
        return f"weights of {self.rank}"

    @register(Dispatch.ONE_TO_ALL, concurrency=2)
    def weights_meanwhile(self) -> str:
        time.sleep(1.5)  # longer than it takes until a wait is checked
        return f"weights of {self.rank}"

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError(PLANTED)

    def unmarked(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, name="renamed")
    def original(self) -> str:
        return "original"

    @register(Dispatch.ONE_TO_ALL)
    def export(self, name: str) -> None:
        endpoints.export(name, exported)

    @register(Dispatch.ONE_TO_ALL)
    def loaded(self, modules: Sequence[str]) -> tuple[list[str], float]:
        """Return which of these modules the process has loaded, and its largest resident size in MiB."""
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return [module for module in modules if module in sys.modules], mib


async def exported(value: int) -> int:
    return value * 100


EXPORTED = Invocation(Dispatch.ONE_TO_ALL, name="exported")
