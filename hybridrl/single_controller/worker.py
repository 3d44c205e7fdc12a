"""`Worker`: the base class of all worker classes. It has a rank in its group, and does not use Ray."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.single_controller.invocation import Dispatch, Execute, register


@dataclass(frozen=True)
class RankInfo:
    """Rank and world of a worker process, and the environment variables that torch.distributed reads them from.

    Attributes:
        extra: further variables from the process's pool or plan.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    extra: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {
            **self.extra,
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

    Subclasses only store in `__init__` and do their work in registered methods, such as `init_model`. Before `__init__`
    runs, the environment holds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    # role -> worker, of all roles in this process; set after all of them are constructed.
    fused_worker_dict: Mapping[str, "Worker"] = {}

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return the address and port at which rank 0 of the group listens."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES; empty on a CPU worker."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Announce this worker's data-parallel rank on a mesh, and whether its output is collected."""
        self.__dict__.setdefault("_mesh_positions", {})[mesh_name] = (dp_rank, is_collect)

    def set_dispatch_collect(self, mesh_name: str, dispatch_dp_rank: int, collect_dp_rank: bool) -> None:
        """Announce a position on a mesh, as returned by `get_dispatch_collect` of another worker in this process."""
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank, collect_dp_rank)

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return {"dispatch_dp_rank": {mesh: rank}, "collect_dp_rank": {mesh: is_collect}} of all announced meshes."""
        positions = self.__dict__.get("_mesh_positions", {})
        return {
            "dispatch_dp_rank": {mesh: dp_rank for mesh, (dp_rank, _) in positions.items()},
            "collect_dp_rank": {mesh: is_collect for mesh, (_, is_collect) in positions.items()},
        }

    @register(Dispatch.ONE_TO_ALL)
    def query_mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Return (dp_rank, is_collect) on a mesh; raise KeyError for a mesh that was not announced."""
        positions = self.__dict__.get("_mesh_positions", {})
        if mesh_name not in positions:
            raise KeyError(
                f"{type(self).__name__} announced no mesh {mesh_name!r}; it announced {sorted(positions) or 'none'}"
            )
        return positions[mesh_name]

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(worker, *args, **kwargs)` on this worker's chunk of a batch."""
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)` on rank 0 only."""
        return func(*args, **kwargs)
