"""`plan_job`: decides which process of a job runs where.

A pure function from a `JobSpec` to a `Plan`.

Slots of a pool are numbered per node. Roles take them in turn: each role starts behind the one before it, and wraps
around to the first slot. So the numbers of processes per slot differ by at most one. Roles on one slot share its
device: in equal parts, or as `resource(accelerator=...)` requests.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.errors import ConfigError
from hybridrl.master.plan.spec import ANY_DEVICE, DEVICE_TYPES, TRAINER, JobSpec, PoolSpec, Resource, RoleSpec
from hybridrl.single_controller.placement.feasibility import NodeCapacity, check_feasible
from hybridrl.single_controller.placement.plan import DriverPlan, Plan, PoolPlan, ProcessPlan, Reservation

logger = logging.getLogger(__name__)
MB = 2**20
RESOURCE_UNITS = 10_000  # per whole resource: Ray's smallest fraction is 0.0001
Slots = tuple[tuple[int, int], ...]


def plan_job(spec: JobSpec, job: str, *, worker_env: Mapping[str, str] | None = None) -> Plan:
    """Return the plan of a job.

    Args:
        spec: The job.
        job: Prefix of all names.
        worker_env: Variables of every process; they override the spec's own.

    Raises:
        ConfigError: If the roles of a slot request more than one device together.
    """
    processes: list[ProcessPlan] = []
    pools: list[PoolPlan] = []
    for pool in spec.pools:
        own = _processes(spec, pool)
        processes += own
        pools.append(_pool_plan(spec, pool, own, job))
    order = {role.name: number for number, role in enumerate(spec.roles)}
    processes.sort(key=lambda process: order[process.roles[0]])
    return Plan(job, tuple(processes), tuple(pools), {**spec.env, **(worker_env or {})}, _driver(spec, job))


def check_declared_size(spec: JobSpec, plan: Plan) -> None:
    """Check that the job fits on its declared `node_num` machines of `device_per_node` devices.

    Raises:
        PlacementError: If it needs more.
    """
    if spec.node_num is None and spec.device_per_node is None:
        return
    device = spec.device_type
    wanted = [
        replace(
            one,
            bundles=tuple({device: bundle[device]} if device in bundle else {} for bundle in one.bundles),
            labels={},
            hint=f"{one.hint}, or raise node_num() or device_per_node()",
        )
        for pool in plan.pools
        for one in pool.reservations
    ]
    devices = math.inf if spec.device_per_node is None else spec.device_per_node
    count = spec.node_num or len(wanted)
    check_feasible(
        wanted, [NodeCapacity(f"machine {number} of node_num={count}", {device: devices}) for number in range(count)]
    )


def choose_device(spec: JobSpec, nodes: Sequence[NodeCapacity]) -> JobSpec:
    """Return the spec with the kind of device that these nodes have, if it leaves the choice open."""
    if spec.device_type != ANY_DEVICE:
        return spec
    found = [kind for kind in DEVICE_TYPES if kind != "CPU" and any(node.resources.get(kind, 0) for node in nodes)]
    chosen = found[0] if found else "CPU"
    if not found:
        logger.warning(
            "the job runs with device_type('CPU'), because the cluster has no accelerator; a device is a core"
        )
    return replace(spec, device_type=chosen)


# -- slots of roles


def slots_of_roles(roles: Sequence[RoleSpec], pool: PoolSpec) -> dict[str, Slots]:
    """Return role -> slot of every rank, as (node, slot on that node)."""
    num_given: dict[tuple[bool, int], int] = {}
    found: dict[str, Slots] = {}
    for role in roles:
        no_device = role.resource.accelerator == 0
        positions = []
        for node, count in enumerate(role.on_nodes):
            first = num_given.get((no_device, node), 0)
            positions += [(node, (first + i) % pool.slots[node]) for i in range(count)]
            num_given[no_device, node] = first + count
        found[role.name] = tuple(positions)
    return found


def _processes(spec: JobSpec, pool: PoolSpec) -> list[ProcessPlan]:
    roles = spec.roles_on(pool.name)
    if pool.colocate == "process":
        return [_one_process(spec, pool, roles)] if roles else []
    slots = slots_of_roles(roles, pool)
    parts = _device_parts(pool, roles, slots)
    shared = tuple(role.name for role in roles) if len(roles) > 1 else ()
    return [
        ProcessPlan(
            pool.name,
            (role.name,),
            slots[role.name],
            _amounts(role.resource, parts[role.name], spec.device_type),
            min(parts[role.name], 1.0) or 1 / len(roles),
            dict(role.env),
            shared,
            role.sees_node_devices,
        )
        for role in roles
    ]


def _one_process(spec: JobSpec, pool: PoolSpec, roles: Sequence[RoleSpec]) -> ProcessPlan:
    """Return the plan of one process per slot that has all roles.

    It takes the whole slot.
    """
    environment: dict[str, str] = {}
    for role in roles:
        for name, value in role.env.items():
            if environment.setdefault(name, value) != value:
                raise ConfigError(
                    f"role {role.name!r}: env({name!r}: {value!r}), but another role in its process has "
                    f"{environment[name]!r}; give each role its own process with colocate='device'"
                )
    resource = _combine([role.resource for role in roles])
    slots = tuple((node, slot) for node, count in enumerate(pool.slots) for slot in range(count))
    amounts = _amounts(resource, 1.0 if resource.accelerator is None else resource.accelerator, spec.device_type)
    return ProcessPlan(pool.name, tuple(role.name for role in roles), slots, amounts, 1.0, environment)


def _combine(resources: Sequence[Resource]) -> Resource:
    """Combine the resources of roles in one process: cores and memory are added, devices are shared."""
    cpus = [one.cpu for one in resources if one.cpu is not None]
    memories = [one.memory_mb for one in resources if one.memory_mb is not None]
    devices = [one.accelerator for one in resources if one.accelerator is not None]
    more = {name: max(one.more.get(name, 0) for one in resources) for one in resources for name in one.more}
    whole = None in [one.accelerator for one in resources] or not devices
    return Resource(
        sum(cpus) if cpus else None, sum(memories) if memories else None, None if whole else max(devices), more
    )


# -- resources per process


def device_shares(spec: JobSpec, pool: str) -> dict[str, float]:
    """Return role -> devices per process, for the roles of a pool."""
    roles, where = spec.roles_on(pool), spec.pool(pool)
    return _device_parts(where, roles, slots_of_roles(roles, where))


def _device_parts(pool: PoolSpec, roles: Sequence[RoleSpec], slots: Mapping[str, Slots]) -> dict[str, float]:
    """Return role -> devices per process, which may be a fraction.

    It is the requested number, or an equal part of what the requests leave.
    """
    requested = {
        role.name: round(role.resource.accelerator, 4) for role in roles if role.resource.accelerator is not None
    }
    equal: dict[str, float] = {}
    for names in _roles_by_slot(slots).values():
        holders = [name for name in names if requested.get(name) != 0]
        taken = sum(requested.get(name, 0) for name in holders)
        others = [name for name in holders if name not in requested]
        part = math.floor((1 - taken) / len(others) * RESOURCE_UNITS + 1e-6) / RESOURCE_UNITS if others else 0.0
        if (len(holders) > 1 and taken > 1 + 1e-6) or (others and part <= 0):
            amounts = ", ".join(f"{name} {requested[name]:g}" for name in holders if name in requested)
            nothing = f" and leave nothing for {', '.join(others)}" if others else ""
            raise ConfigError(
                f"pool {pool.name!r}: roles that share a device take {taken:g} of it ({amounts}){nothing}; lower their "
                "resource(accelerator=...) to 1 together, or leave a role out of with_collocation()"
            )
        for name in others:
            equal[name] = min(part, equal.get(name, 1.0))
    return {**equal, **requested}


def _roles_by_slot(slots: Mapping[str, Slots]) -> dict[tuple[int, int], list[str]]:
    """Return slot -> roles of its processes."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, positions in slots.items():
        for position in positions:
            found.setdefault(position, []).append(name)
    return found


def _amounts(resource: Resource, devices: float, device_type: str) -> dict[str, float]:
    """Return the resources of one process, by Ray's names.

    The default is one core per device or part of one, at most one core.
    """
    cpu = resource.cpu if resource.cpu is not None else min(devices, 1.0) or 1.0
    amounts: dict[str, float] = {"CPU": max(cpu, devices) if device_type == "CPU" else cpu}
    if devices and device_type != "CPU":
        amounts[device_type] = devices
    if resource.memory_mb:
        amounts["memory"] = resource.memory_mb * MB
    return {name: round(amount, 4) for name, amount in {**amounts, **resource.more}.items() if amount}


def _pool_plan(spec: JobSpec, pool: PoolSpec, processes: Sequence[ProcessPlan], job: str) -> PoolPlan:
    taken: dict[tuple[int, int], list[Mapping[str, float]]] = {}
    for process in processes:
        for position in process.slots:
            taken.setdefault(position, []).append(process.resources)
    sharing = [role.resource for role in spec.roles_on(pool.name) if role.resource.accelerator is None]
    whole = {spec.device_type: 1.0} if sharing or not processes else {}
    whole |= {"CPU": 1.0} if whole and any(resource.cpu is None for resource in sharing or [Resource()]) else {}
    plans = [
        Reservation(
            f"{job}/{pool.name}/node-{node}",
            pool.name,
            tuple(_bundle(taken.get((node, slot), []), at_least=whole) for slot in range(count)),
            dict(pool.labels),
            _apart_from(spec, pool),
            pool.strategy == "spread",
            pool.hint,
        )
        for node, count in enumerate(pool.slots)
    ]
    return PoolPlan(pool.name, tuple(plans), pool.strategy)


def _bundle(taken: Sequence[Mapping[str, float]], *, at_least: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of the resources on a slot, but at least a whole device if its roles share one equally."""
    names = dict.fromkeys([*at_least, *(name for one in taken for name in one)])
    return {name: max(round(sum(one.get(name, 0) for one in taken), 4), at_least.get(name, 0)) for name in names}


def _apart_from(spec: JobSpec, pool: PoolSpec) -> tuple[str, ...]:
    """Return the pools to be apart from, requested by either side; with strict_spread also the pool itself."""
    own = [pool.name] if pool.strategy == "strict_spread" else []
    return tuple(
        dict.fromkeys([*own, *pool.apart_from, *(other.name for other in spec.pools if pool.name in other.apart_from)])
    )


def _driver(spec: JobSpec, job: str) -> DriverPlan | None:
    if spec.trainer is None:
        return None
    bundle = _amounts(spec.trainer.resource, spec.trainer.resource.accelerator or 0.0, spec.device_type)
    reservation = Reservation(
        f"{job}/{TRAINER}", TRAINER, (bundle,), dict(spec.trainer.labels), hint="Lower resource() of the trainer"
    )
    return DriverPlan(TRAINER, spec.trainer.entry, reservation, {**spec.env, **spec.trainer.env})
