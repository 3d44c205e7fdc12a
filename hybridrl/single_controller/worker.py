"""`Worker`: what every worker class inherits. It knows its place in the group and nothing about Ray."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.single_controller.invocation import Dispatch, Execute, register


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its group, told through the environment as torch.distributed expects it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    more: Mapping[str, str] = field(default_factory=dict)  # what its pool or plan says besides

    def environment(self) -> dict[str, str]:
        return {
            **self.more,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "RAY_LOCAL_RANK": str(self.local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class Worker:
    """One member of a worker group.

    Subclasses store in `__init__` and work in a registered method (`init_model`). Before `__init__` runs, the
    environment holds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    # The workers of all roles in this process, by role, once all of them are made: {"actor": self, "critic": its
    # neighbour}.
    fused_worker_dict: Mapping[str, "Worker"] = {}

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return the address and port where rank 0 of the group listens."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """Return the devices this process may see, as CUDA names them; empty on a CPU worker."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Announce this worker's data-parallel rank on a mesh, and whether its answer is the one collected."""
        self.__dict__.setdefault("_mesh_places", {})[mesh_name] = (dp_rank, is_collect)

    def set_dispatch_collect(self, mesh_name: str, dispatch_dp_rank: int, collect_dp_rank: bool) -> None:
        """Announce a place on a mesh as `get_dispatch_collect` of another worker in this process returned it."""
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank, collect_dp_rank)

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return {"dispatch_dp_rank": {mesh: rank}, "collect_dp_rank": {mesh: whether collected}} of all announced
        meshes.
        """
        places = self.__dict__.get("_mesh_places", {})
        return {
            "dispatch_dp_rank": {mesh: dp_rank for mesh, (dp_rank, _) in places.items()},
            "collect_dp_rank": {mesh: is_collect for mesh, (_, is_collect) in places.items()},
        }

    @register(Dispatch.ONE_TO_ALL)
    def query_mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Return (dp_rank, is_collect) on a mesh; an unknown mesh is a KeyError naming the known ones."""
        places = self.__dict__.get("_mesh_places", {})
        if mesh_name not in places:
            raise KeyError(
                f"{type(self).__name__} announced no mesh {mesh_name!r}; it announced {sorted(places) or 'none'}"
            )
        return places[mesh_name]

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the caller's function on this worker's share of a batch: `func(worker, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the caller's function on the first worker only: `func(*args, **kwargs)`."""
        return func(*args, **kwargs)
