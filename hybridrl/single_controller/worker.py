"""`Worker`: the base class of all worker classes.

It has a rank in its group, and does not use Ray.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.single_controller.invocation import Dispatch, Execute, register

PROCESS_GROUP_SIZE = "PROCESS_GROUP_SIZE"  # environment variable: adjacent ranks that share a torch process group


@dataclass(frozen=True)
class RankInfo:
    """Rank and world of a worker process, and the environment variables that torch.distributed reads them from.

    Attributes:
        num_peers: adjacent ranks, this one among them, that share a torch process group; 0 for all. The first of them
            listens at the address.
        extra: further variables from the process's pool or plan.
        devices: devices to see, by Ray's name of their resource; None for those that Ray reserved for the process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    num_peers: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Sequence[str]] | None = None

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
            **({PROCESS_GROUP_SIZE: str(self.num_peers)} if self.num_peers else {}),
        }


RANK_VARIABLES = frozenset(RankInfo(0, 1, 0, 1, "", 0, num_peers=1).environment())
"""Environment variables that every worker process gets from its rank."""


def _entry(value: Any, mesh_name: str) -> Any:
    """Return a mapping's entry of a mesh, or its only entry; any other value unchanged."""
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        return next(iter(value.values()))
    if mesh_name not in value:
        raise KeyError(f"there is no position on mesh {mesh_name!r}, only on {sorted(value) or 'none'}")
    return value[mesh_name]


class Worker:
    """One member of a worker group.

    Subclasses only store in `__init__` and do their work in registered methods, such as `init_model`. Before `__init__`
    runs, the environment holds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    # role -> worker, of all roles in this process; set after all of them are constructed.
    fused_worker_dict: Mapping[str, "Worker"] = {}

    @classmethod
    def num_peers(cls, *args: Any, **kwargs: Any) -> int:
        """Return how many adjacent ranks share a torch process group; 0 for all of the group.

        Called in the driver with the constructor's arguments. Only such ranks communicate with each other, and they
        can be restarted without the others.
        """
        return 0

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
        """Announce this worker's data-parallel rank on a mesh, and whether its output is collected.

        Raises:
            ValueError: The worker announced another position on this mesh. The same one may be announced again, as a
                worker with several engines of one layout does.
        """
        positions = self.__dict__.setdefault("_mesh_positions", {})
        if positions.setdefault(mesh_name, (dp_rank, is_collect)) != (dp_rank, is_collect):
            raise ValueError(
                f"{type(self).__name__} announced mesh {mesh_name!r} with {positions[mesh_name]} (rank, is_collect), "
                f"and now with {(dp_rank, is_collect)}; announce each mesh once, or name the second one differently"
            )

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: int | Mapping[str, int], collect_dp_rank: bool | Mapping[str, bool]
    ) -> None:
        """Announce a position on a mesh.

        `set_dispatch_collect(mesh, **other.get_dispatch_collect())` takes over the position of another worker in this
        process: of a mapping from meshes, the entry of `mesh_name` is taken, or the only one.

        Raises:
            KeyError: A mapping has several meshes, and not this one.
        """
        dp_rank = _entry(dispatch_dp_rank, mesh_name)
        self._register_dispatch_collect_info(mesh_name, dp_rank, _entry(collect_dp_rank, mesh_name))

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
