"""`JobSpec`: what a job consists of, as its user described it.

Frozen, and checked when it is constructed.

Builders make one (`builder.py`), and so does a trainer's `ResourcePoolManager`. `planner.py` derives from it which
process runs where. It survives a round trip through JSON.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn, Self

from hybridrl.errors import ConfigError

# How a pool's nodes are placed on machines. The slots of one node are always on one machine.
STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")
COLOCATIONS = ("process", "device")
DEVICE_TYPES = ("GPU", "CPU", "TPU", "NPU")
ANY_DEVICE = "AUTO"  # the first of DEVICE_TYPES that the cluster has, but CPU last
EDGE_KINDS = ("feeds", "weights")
TRAINER = "trainer"
# DLRover's words for the method that set a role's entry: run() or train().
BACKENDS = ("simple", "elastic")
# Which processes are restarted with a lost one: all of its role, those of its node, none, or all of its role and of
# the roles downstream of it.
RESTARTS = ("role", "node", "process", "downstream")
MAX_RESTART = 10
RESTART_TIMEOUT_S = 300.0
RESERVED_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "NAME",
    "ROLE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Resource:
    """Resources of one process.

    Attributes:
        cpu: Cores. None: one per device or part of one, and one without device.
        memory_mb: MB of 2**20 bytes. None: no reservation.
        accelerator: Devices, or a fraction of one. None: one device, or an equal share of it.
        more: Ray's custom resources.
    """

    cpu: float | None = None
    memory_mb: int | None = None
    accelerator: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleSpec:
    """A role: its processes per node, what they run, and their resources.

    Attributes:
        pool: Name of its pool.
        on_nodes: Number of processes per node of the pool.
        entry: `module:Class` or `file.py:Class` of its workers, a function of the same form, or a program with its
            arguments (`train.py -x`). Empty if the trainer brings the classes.
        max_restart: Losses that the role survives.
        restart: One of `RESTARTS`.
        restart_label: Machines with the same value of this label count as one node.
        restart_timeout_s: Limit for restarted processes to be ready.
        is_driver: The job ends when its trainer and all of these roles that have something to run have ended.
        backend: One of `BACKENDS`. Both run alike.
        sees_node_devices: Each process sees the devices of all the role's processes on its node, by local rank.
        without_effect: Settings of DLRover that were accepted and change nothing (`without_effect.py`).
    """

    name: str
    pool: str
    on_nodes: tuple[int, ...]
    entry: str = ""
    resource: Resource = field(default_factory=Resource)
    env: Mapping[str, str] = field(default_factory=dict)
    max_restart: int = MAX_RESTART
    restart: str = "role"
    restart_label: str = ""
    restart_timeout_s: float = RESTART_TIMEOUT_S
    is_driver: bool = True
    backend: str = "simple"
    sees_node_devices: bool = False
    without_effect: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.on_nodes)


@dataclass(frozen=True)
class PoolSpec:
    """Slots on nodes, for the roles of this pool.

    A slot is a device, or the resources of a process without one.

    Attributes:
        slots: Number of slots per node.
        colocate: "device": every role has processes of its own; "process": all roles share one process per slot.
        strategy: One of `STRATEGIES`.
        labels: Required labels of the machines, in Ray's syntax.
        apart_from: Pools that have to be on other machines.
        hint: What to change if the pool does not fit.
    """

    name: str
    slots: tuple[int, ...]
    colocate: str = "device"
    strategy: str = "pack"
    labels: Mapping[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class TrainerSpec:
    """The process that runs the training loop and calls the others.

    Attributes:
        entry: A class with `run`, or a function.
        max_restart: Losses and exceptions of the trainer that the job survives.
    """

    entry: str
    resource: Resource = field(default_factory=Resource)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_restart: int = MAX_RESTART


@dataclass(frozen=True)
class EdgeSpec:
    """Data flow between two roles.

    Attributes:
        kind: "feeds": target processes the output of source. "weights": target gets source's weights.
        weight: Amount of data, in any unit.
    """

    kind: str
    source: str
    target: str
    weight: float = 1.0


@dataclass(frozen=True)
class JobSpec:
    """A job: roles on pools, a trainer, and their config.

    Attributes:
        node_num: Number of machines that the job may use. None: as many as the cluster has.
        device_per_node: Devices per machine. None: as many as the machines have.

    Raises:
        ConfigError: A ValueError. The message names the role, the value and the fix.
    """

    roles: tuple[RoleSpec, ...]
    pools: tuple[PoolSpec, ...]
    trainer: TrainerSpec | None = None
    device_type: str = "GPU"
    node_num: int | None = None
    device_per_node: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    edges: tuple[EdgeSpec, ...] = ()

    def __post_init__(self) -> None:
        check_spec(self)

    def pool(self, name: str) -> PoolSpec:
        return next(pool for pool in self.pools if pool.name == name)

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.name == name)

    def roles_on(self, pool: str) -> list[RoleSpec]:
        return [role for role in self.roles if role.pool == pool]

    def model_dump_json(self, indent: int | None = None) -> str:
        """Return the spec as JSON."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Return the spec that `model_dump_json` wrote.

        Raises:
            ConfigError: For any other text.
        """
        try:
            return cls.from_dict(json.loads(text))
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"this is not the JSON of a job: {error}; it has to come from model_dump_json()"
            ) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec whose fields these are, as JSON has them."""
        parts = {
            "roles": tuple(
                RoleSpec(**_with_resource(role, on_nodes=tuple(role["on_nodes"]))) for role in data["roles"]
            ),
            "pools": tuple(
                PoolSpec(**{**p, "slots": tuple(p["slots"]), "apart_from": tuple(p["apart_from"])})
                for p in data["pools"]
            ),
            "trainer": data["trainer"] and TrainerSpec(**_with_resource(data["trainer"])),
            "edges": tuple(EdgeSpec(**edge) for edge in data["edges"]),
        }
        return cls(**{**data, **parts})


def _with_resource(data: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**data, "resource": Resource(**data["resource"]), **changes}


# -- checks


def check_spec(spec: JobSpec) -> None:
    """Raise ConfigError for errors in a spec that do not depend on the cluster."""
    _check_known(spec.device_type, (*DEVICE_TYPES, ANY_DEVICE), "device_type")
    for name in ("node_num", "device_per_node"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            _fail(f"{name}={value}: must be at least 1")
    _unique("role", [role.name for role in spec.roles])
    _unique("pool", [pool.name for pool in spec.pools])
    _check_env("job", "global_env", spec.env)
    for pool in spec.pools:
        _check_pool(spec, pool)
    for role in spec.roles:
        _check_role(spec, role)
    if not (spec.trainer or spec.roles or spec.pools):  # verl reserves pools before it names roles
        _fail("the job has no role; describe at least one, with role('name').run('module:Class')")
    if spec.trainer is not None:
        _check_trainer(spec.trainer)
    for edge in spec.edges:
        _check_edge(spec, edge)


def _check_trainer(trainer: TrainerSpec) -> None:
    check_entry(TRAINER, trainer.entry)
    if is_script(trainer.entry):
        _fail(
            f"role {TRAINER!r}: entry={trainer.entry!r} is a program, which cannot receive the "
            "worker groups; name a class or function"
        )
    _check_resource(TRAINER, trainer.resource)
    _check_env(TRAINER, "env", trainer.env)
    check_max_restart(TRAINER, trainer.max_restart)


def _check_edge(spec: JobSpec, edge: EdgeSpec) -> None:
    _check_known(edge.kind, EDGE_KINDS, "kind of edge")
    for end in (edge.source, edge.target):
        _check_known(end, [role.name for role in spec.roles], f"{edge.kind}({edge.source!r}, {edge.target!r}): role")
    if not (isinstance(edge.weight, int | float) and math.isfinite(edge.weight) and edge.weight >= 0):
        _fail(f"{edge.kind}({edge.source!r}, {edge.target!r}): weight={edge.weight!r} must be a number, 0 or more")


def _check_pool(spec: JobSpec, pool: PoolSpec) -> None:
    _check_known(pool.strategy, STRATEGIES, f"pool {pool.name!r}: strategy")
    _check_known(pool.colocate, COLOCATIONS, f"pool {pool.name!r}: colocate")
    if not pool.slots or any(count < 1 for count in pool.slots):
        _fail(f"pool {pool.name!r}: slots={list(pool.slots)} must name at least one slot on every node")
    if pool.strategy == "strict_pack" and len(pool.slots) > 1:
        _fail(
            f"pool {pool.name!r}: strict_pack places all processes on one machine, but it has {len(pool.slots)} nodes; "
            "leave out per_node()"
        )
    for other in pool.apart_from:
        _check_known(other, [p.name for p in spec.pools], f"pool {pool.name!r}: anti_affinity")
        if other == pool.name:
            _fail(
                f"pool {pool.name!r}: anti_affinity with itself; to place its own nodes apart use spread(strict=True)"
            )


def _check_role(spec: JobSpec, role: RoleSpec) -> None:
    name = role.name
    if not name or any(sign in name for sign in "/+ "):
        _fail(f"role {name!r}: a name needs at least one letter and must not contain '/', '+' or space")
    if name == TRAINER:
        _fail(f"role {name!r}: the trainer is a process of its own; describe it with trainer(...)")
    _check_known(role.pool, [pool.name for pool in spec.pools], f"role {name!r}: pool")
    pool = spec.pool(role.pool)
    if not role.on_nodes or any(count < 0 for count in role.on_nodes) or role.total < 1:
        _fail(f"role {name!r}: total={role.total} must be at least 1")
    if len(role.on_nodes) > len(pool.slots):
        _fail(f"role {name!r}: is on {len(role.on_nodes)} nodes, but pool {pool.name!r} has {len(pool.slots)}")
    if pool.colocate == "process" and role.on_nodes != pool.slots:
        _fail(
            f"role {name!r}: has {list(role.on_nodes)} processes on the nodes of pool {pool.name!r}, which has one "
            f"process for each of its slots {list(pool.slots)}; use colocate='device', or give the role a process on "
            "every slot"
        )
    if role.entry:
        check_entry(name, role.entry)
    _check_known(role.backend, BACKENDS, f"role {name!r}: backend")
    _check_resource(name, role.resource)
    _check_env(name, "env", role.env)
    _check_known(role.restart, RESTARTS, f"role {name!r}: restart")
    check_max_restart(name, role.max_restart)


def is_script(entry: str) -> bool:
    """Return whether an entry is a program with its arguments, rather than a class or function."""
    try:
        return shlex.split(entry)[0].endswith(".py")
    except (ValueError, IndexError):  # an unclosed quote, or no text
        return False


def check_entry(role: str, entry: str) -> None:
    """Raise ConfigError unless an entry is a program, `file.py:Name` or `dotted.module:Name`."""
    if is_script(entry):
        return
    module, separator, name = entry.rpartition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    if separator and name.isidentifier() and (dotted or module.endswith(".py")):
        return
    reason = "has braces, as an f-string without its f" if "{" in entry else "names no class"
    _fail(
        f"role {role!r}: entry={entry!r} {reason}; write 'module:Class', 'module.Class', 'file.py:Class', "
        "'program.py', or pass the class itself"
    )


def _check_resource(role: str, resource: Resource) -> None:
    amounts = {"cpu": resource.cpu, "memory": resource.memory_mb, "accelerator": resource.accelerator, **resource.more}
    for name, amount in amounts.items():
        if amount is not None and not (isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0):
            _fail(f"role {role!r}: resource({name}={amount!r}) must be a number, 0 or more")
    accelerator = resource.accelerator or 0.0
    if accelerator > 1 and accelerator != int(accelerator):
        _fail(
            f"role {role!r}: resource(accelerator={accelerator:g}) must be a whole number of devices, or a part of one"
        )
    if resource.cpu == 0 and resource.accelerator == 0 and not resource.more:
        _fail(
            f"role {role!r}: resource(cpu=0, accelerator=0) leaves nothing to reserve; give it a fraction of a core, "
            "cpu=0.1"
        )


def _check_env(role: str, method: str, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            _fail(f"role {role!r}: {method}({name!r}: {value!r}) must be text; write {str(value)!r}")
        if name in RESERVED_VARIABLES:
            _fail(f"role {role!r}: {method}({name!r}) is set for every process from its rank; choose another name")


def check_max_restart(role: str, limit: int) -> None:
    """Raise ConfigError unless a limit of losses is a whole number, 0 or more."""
    if not isinstance(limit, int) or limit < 0:
        _fail(f"role {role!r}: max_restart={limit!r} must be a whole number; 0 ends the job at the first loss")


def _check_known(value: str, names: Iterable[str], what: str) -> None:
    names = list(names)
    if value not in names:
        near = get_close_matches(str(value), names, n=1)
        _fail(
            f"{what} {value!r} is unknown; "
            + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}")
        )


def _unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            _fail(f"{what} {name!r} is defined {names.count(name)} times; give each a name of its own")


def _fail(message: str) -> NoReturn:
    raise ConfigError(message)
