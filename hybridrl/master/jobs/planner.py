"""`plan_job`: which process of a job runs where. One pure function from a `JobSpec` to a `Plan`; no cluster is asked.

Slots of a pool are numbered per node, and roles take them in turn: a role goes on behind the one before it and begins
again at the first slot when all have been given, so that every slot holds the same number of processes, or one more
than another. Whoever shares a slot shares its device: equal parts, or what `resource(accelerator=...)` says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.spec import TRAINER, JobSpec, PoolSpec, Resource, RoleSpec
from hybridrl.single_controller.placement.feasibility import Machine, check_feasible
from hybridrl.single_controller.placement.plan import DriverPlan, Plan, PoolPlan, ProcessPlan, Reservation

MB = 2**20
STEP = 10_000  # Ray counts parts of a resource in ten-thousandths
Slots = tuple[tuple[int, int], ...]


def plan_job(spec: JobSpec, job: str, *, worker_env: Mapping[str, str] | None = None) -> Plan:
    """Return the plan of this job. job: prefix of all names. worker_env: variables that every process gets, after the
    spec's own.

    Raises ConfigError when roles ask for more of a device than there is of it.
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


def check_declared(spec: JobSpec, plan: Plan) -> None:
    """Raise PlacementError if the job needs more than the `node_num` machines of `device_per_node` devices that it
    declares.
    """
    if spec.node_num is None and spec.device_per_node is None:
        return
    device = spec.device_type
    wanted = [
        replace(
            one,
            bundles=tuple({device: bundle[device]} if device in bundle else {} for bundle in one.bundles),
            labels={},
            way_out=f"{one.way_out}, or raise node_num() or device_per_node()",
        )
        for pool in plan.pools
        for one in pool.reservations
    ]
    devices = math.inf if spec.device_per_node is None else spec.device_per_node
    count = spec.node_num or len(wanted)
    check_feasible(
        wanted, [Machine(f"machine {number} of node_num={count}", {device: devices}) for number in range(count)]
    )


# -- which role stands on which slot


def slots_of_roles(roles: Sequence[RoleSpec], pool: PoolSpec) -> dict[str, Slots]:
    """Return, per role, the slot of every rank as (node, slot on it)."""
    given: dict[tuple[bool, int], int] = {}
    found: dict[str, Slots] = {}
    for role in roles:
        no_device = role.resource.accelerator == 0
        places = []
        for node, count in enumerate(role.on_nodes):
            first = given.get((no_device, node), 0)
            places += [(node, (first + i) % pool.slots[node]) for i in range(count)]
            given[no_device, node] = first + count
        found[role.name] = tuple(places)
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
        )
        for role in roles
    ]


def _one_process(spec: JobSpec, pool: PoolSpec, roles: Sequence[RoleSpec]) -> ProcessPlan:
    """All roles in one process per slot: it takes the whole slot."""
    environment: dict[str, str] = {}
    for role in roles:
        for name, value in role.env.items():
            if environment.setdefault(name, value) != value:
                raise ConfigError(
                    f"role {role.name!r}: env({name!r}: {value!r}), but another role in its process wants "
                    f"{environment[name]!r}; "
                    "give each role its own process with colocate='device'"
                )
    resource = _together([role.resource for role in roles])
    slots = tuple((node, slot) for node, count in enumerate(pool.slots) for slot in range(count))
    amounts = _amounts(resource, 1.0 if resource.accelerator is None else resource.accelerator, spec.device_type)
    return ProcessPlan(pool.name, tuple(role.name for role in roles), slots, amounts, 1.0, environment)


def _together(resources: Sequence[Resource]) -> Resource:
    """What one process needs that does the work of all: their cores and memory added, their devices the same ones."""
    cpus = [one.cpu for one in resources if one.cpu is not None]
    memories = [one.memory_mb for one in resources if one.memory_mb is not None]
    devices = [one.accelerator for one in resources if one.accelerator is not None]
    more = {name: max(one.more.get(name, 0) for one in resources) for one in resources for name in one.more}
    whole = None in [one.accelerator for one in resources] or not devices
    return Resource(
        sum(cpus) if cpus else None, sum(memories) if memories else None, None if whole else max(devices), more
    )


# -- how much of it each takes


def _device_parts(pool: PoolSpec, roles: Sequence[RoleSpec], slots: Mapping[str, Slots]) -> dict[str, float]:
    """Return, per role, how many devices each of its processes gets, or which part of one: what it says, or an equal
    part of the rest.
    """
    said = {role.name: round(role.resource.accelerator, 4) for role in roles if role.resource.accelerator is not None}
    equal: dict[str, float] = {}
    for here in _on_slots(slots).values():
        holders = [name for name in here if said.get(name) != 0]
        taken = sum(said.get(name, 0) for name in holders)
        others = [name for name in holders if name not in said]
        part = math.floor((1 - taken) / len(others) * STEP + 1e-6) / STEP if others else 0.0
        if (len(holders) > 1 and taken > 1 + 1e-6) or (others and part <= 0):
            amounts = ", ".join(f"{name} {said[name]:g}" for name in holders if name in said)
            nothing = f" and leave nothing for {', '.join(others)}" if others else ""
            raise ConfigError(
                f"pool {pool.name!r}: roles that share a device take {taken:g} of it ({amounts}){nothing}; lower their "
                "resource(accelerator=...) to 1 together, or leave a role out of with_collocation()"
            )
        for name in others:
            equal[name] = min(part, equal.get(name, 1.0))
    return {**equal, **said}


def _on_slots(slots: Mapping[str, Slots]) -> dict[tuple[int, int], list[str]]:
    """The role of every process on every slot that has one."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, places in slots.items():
        for place in places:
            found.setdefault(place, []).append(name)
    return found


def _amounts(resource: Resource, devices: float, device_type: str) -> dict[str, float]:
    """What one process takes, by Ray's names.

    A core for every device or part of one, up to one core, unless it says more or less.
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
        for place in process.slots:
            taken.setdefault(place, []).append(process.resources)
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
            pool.way_out,
        )
        for node, count in enumerate(pool.slots)
    ]
    return PoolPlan(pool.name, tuple(plans), pool.strategy)


def _bundle(taken: Sequence[Mapping[str, float]], *, at_least: Mapping[str, float]) -> dict[str, float]:
    """The sum of what the processes of a slot take; where they share equally, the whole device that they share."""
    names = dict.fromkeys([*at_least, *(name for one in taken for name in one)])
    return {name: max(round(sum(one.get(name, 0) for one in taken), 4), at_least.get(name, 0)) for name in names}


def _apart_from(spec: JobSpec, pool: PoolSpec) -> tuple[str, ...]:
    """Pools to be apart from, said by either; its own, if each of its nodes has to be another machine."""
    own = [pool.name] if pool.strategy == "strict_spread" else []
    return tuple(
        dict.fromkeys([*own, *pool.apart_from, *(other.name for other in spec.pools if pool.name in other.apart_from)])
    )


def _driver(spec: JobSpec, job: str) -> DriverPlan | None:
    if spec.trainer is None:
        return None
    bundle = _amounts(spec.trainer.resource, spec.trainer.resource.accelerator or 0.0, spec.device_type)
    place = Reservation(
        f"{job}/{TRAINER}", TRAINER, (bundle,), dict(spec.trainer.labels), way_out="Lower resource() of the trainer"
    )
    return DriverPlan(TRAINER, spec.trainer.entry, place, {**spec.env, **spec.trainer.env})
