"""Turn the role requests of a builder into the roles and pools of a `JobSpec`: processes per node, shared devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.plan.spec import MAX_RESTART, RESTART_TIMEOUT_S, PoolSpec, Resource, RoleSpec


@dataclass
class RoleRequest:
    """The settings of a role, collected by a builder. None: not set."""

    name: str
    entry: str = ""
    total: int | None = None
    per_node: int | None = None
    num_nodes: int | None = None
    resource: Resource | None = None
    env: dict[str, str] = field(default_factory=dict)
    strategy: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    max_restart: int = MAX_RESTART
    restart: str = "role"
    restart_label: str = ""
    restart_timeout_s: float = RESTART_TIMEOUT_S
    is_driver: bool | None = None
    backend: str = "simple"
    sees_node_devices: bool = False
    without_effect: dict[str, Any] = field(default_factory=dict)


def assign_pools(
    requests: Mapping[str, RoleRequest], together: Sequence[tuple[str, ...]]
) -> tuple[tuple[RoleSpec, ...], tuple[PoolSpec, ...]]:
    """Return the roles and their pools: one pool per set of collocated roles, and one per other role.

    Args:
        requests: Role -> request.
        together: Sets of roles that share devices.

    Raises:
        ConfigError: If counts or placement requests contradict each other.
    """
    shared = {name for names in together for name in names}
    sets = [*together] + [(name,) for name in requests if name not in shared]
    pool_of = {name: "+".join(names) for names in sets for name in names}
    pools, roles = [], {}
    for names in sets:
        own = [requests[name] for name in names]
        on_nodes = _on_nodes(own)
        nodes = max(map(len, on_nodes.values()))
        slots = tuple(max(counts[node] for counts in on_nodes.values() if node < len(counts)) for node in range(nodes))
        pools.append(_pool(pool_of[names[0]], own, slots, pool_of))
        for request in own:
            resource = request.resource or Resource()
            if request.resource is not None and len(own) == 1 and resource.accelerator is None:
                # resource() without accelerator, on a pool of its own: no device.
                resource = Resource(resource.cpu, resource.memory_mb, 0.0, resource.more)
            elif len(own) == 1 and resource.accelerator is None:
                resource = Resource(accelerator=1.0)
            roles[request.name] = _role(request, pool_of[request.name], on_nodes[request.name], resource)
    return tuple(roles[name] for name in requests), tuple(pools)


def _role(request: RoleRequest, pool: str, on_nodes: tuple[int, ...], resource: Resource) -> RoleSpec:
    losses = (request.max_restart, request.restart, request.restart_label, request.restart_timeout_s)
    return RoleSpec(
        request.name,
        pool,
        on_nodes,
        request.entry,
        resource,
        request.env,
        *losses,
        is_driver=request.is_driver is not False,
        backend=request.backend,
        sees_node_devices=request.sees_node_devices,
        without_effect=request.without_effect,
    )


def _on_nodes(requests: Sequence[RoleRequest]) -> dict[str, tuple[int, ...]]:
    """Return role -> processes per node, for the roles of one pool.

    Roles without per_node() are spread evenly over the nodes of those with it.
    """
    if "strict_pack" in {request.strategy for request in requests}:
        return {request.name: (_total(request),) for request in requests}
    num_nodes = {
        request.name: math.ceil(_total(request) / request.per_node)
        for request in requests
        if request.per_node is not None
    }
    if len(set(num_nodes.values())) > 1:
        counts = ", ".join(f"{name} on {count}" for name, count in num_nodes.items())
        raise ConfigError(
            f"collocated roles are on different numbers of nodes: {counts}; set total() and per_node() so "
            "that they agree"
        )
    nodes = next(iter(num_nodes.values()), max(map(_total, requests)))
    return {
        request.name: _split_over_nodes(_total(request), request.per_node or math.ceil(_total(request) / nodes))
        for request in requests
    }


def _split_over_nodes(total: int, per_node: int) -> tuple[int, ...]:
    remainder = total % per_node
    return (per_node,) * (total // per_node) + ((remainder,) if remainder else ())


def _total(request: RoleRequest) -> int:
    """Return the number of processes of a role: total(), or nnodes() times nproc_per_node().

    Each is 1 if not set.
    """
    if request.num_nodes is None:
        return request.total or request.per_node or 1
    total = request.num_nodes * (request.per_node or 1)
    if request.total is not None and request.total != total:
        raise ConfigError(
            f"role {request.name!r}: total({request.total}), but nnodes({request.num_nodes}) with "
            f"{request.per_node or 1} each is {total}; "
            "leave out one of them"
        )
    return total


def _pool(name: str, requests: Sequence[RoleRequest], slots: tuple[int, ...], pool_of: Mapping[str, str]) -> PoolSpec:
    strategies = {request.strategy: request.name for request in requests if request.strategy is not None}
    if len(strategies) > 1:
        raise ConfigError(f"collocated roles request different strategies: {strategies}; set it for one of them")
    labels: dict[str, str] = {}
    for request in requests:
        for key, value in request.labels.items():
            if labels.setdefault(key, value) != value:
                raise ConfigError(
                    f"collocated roles request nodes with {key}={labels[key]} and {key}={value}; set one value for both"
                )
    roles = ", ".join(request.name for request in requests)
    apart = []
    for request in requests:
        for other in request.apart_from:
            if other not in pool_of:
                raise ConfigError(
                    f"role {request.name!r}: anti_affinity({other!r}), but the only roles are {', '.join(pool_of)}"
                )
            if pool_of[other] == name:
                raise ConfigError(
                    f"role {request.name!r}: anti_affinity({other!r}), but they share devices; leave out one of the two"
                )
            apart.append(pool_of[other])
    hint = f"Ask for less with total(), per_node() or resource() of {roles}"
    return PoolSpec(name, slots, "device", next(iter(strategies), "pack"), labels, tuple(dict.fromkeys(apart)), hint)
