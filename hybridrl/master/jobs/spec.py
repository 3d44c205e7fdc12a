"""`JobSpec`: what a job is made of, as its user wrote it. Frozen, checked once when it is made, and as JSON the same
again.

A builder makes one (`job.py`), and so does a trainer's `ResourcePoolManager`. Which process runs where follows from it
in `placement.py`.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn, Self

from hybridrl.errors import ConfigError

# How a pool's nodes lie on machines. One node's slots are always together on one machine.
STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")
COLOCATIONS = ("process", "device")
DEVICE_TYPES = ("GPU", "CPU", "TPU", "NPU")
EDGE_KINDS = ("feeds", "weights")
TRAINER = "trainer"
# Who is started again with a process that was lost: all of its role, those of its node, nobody else.
RESTARTS = ("role", "node", "process")
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
    """What one process takes. cpu: cores. memory_mb: MB of 2**20 bytes. accelerator: devices, or a part of one.

    None is what follows from the rest: a core for each device or part of one, a core without device; a device, or an
    equal share of it. more: Ray's custom resources.
    """

    cpu: float | None = None
    memory_mb: int | None = None
    accelerator: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleSpec:
    """A role: its processes on every node of its pool, what they run and what each takes.

    entry: `module:Class` or `file.py:Class` of its workers, a function of the same form, or a program with its
    arguments (`train.py -x`); empty when the trainer brings the classes. on_nodes: processes per node. max_restart:
    losses that it survives. restart: one of `RESTARTS`. restart_label: machines with the same value of this label are
    one node. restart_timeout_s: for those that were started again to be there.
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

    @property
    def total(self) -> int:
        return sum(self.on_nodes)


@dataclass(frozen=True)
class PoolSpec:
    """Slots on nodes, for the roles on it. slots: per node, how many; a slot is a device, or what roles without one
    take.

    colocate: "device": every role has processes of its own; "process": all roles share one process per slot. strategy:
    see `STRATEGIES`. labels: of the machines, in Ray's syntax. apart_from: pools that have to be on other machines.
    way_out: what to change if it does not fit.
    """

    name: str
    slots: tuple[int, ...]
    colocate: str = "device"
    strategy: str = "pack"
    labels: Mapping[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    way_out: str = ""


@dataclass(frozen=True)
class TrainerSpec:
    """The process that runs the loop and calls the others.

    entry: a class with `run`, or a function. max_restart: see `RoleSpec`.
    """

    entry: str
    resource: Resource = field(default_factory=Resource)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_restart: int = MAX_RESTART


@dataclass(frozen=True)
class EdgeSpec:
    """kind "feeds": target works on what source made; "weights": target gets source's weights.

    weight: how much, in any unit.
    """

    kind: str
    source: str
    target: str
    weight: float = 1.0


@dataclass(frozen=True)
class JobSpec:
    """A job: roles on pools, a trainer, what all of them are told.

    node_num, device_per_node: machines that the job may use and the devices of each; None: whatever the cluster has.
    Raises ConfigError, which is a ValueError, for what cannot be right; the message names the role, the value and the
    way out.
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
        """Return the whole of it as JSON."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Return the spec that `model_dump_json` wrote. Raises ConfigError for any other text."""
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


# -- what cannot be right


def check_spec(spec: JobSpec) -> None:
    """Raise ConfigError for what cannot be right in a spec, whatever the cluster is like."""
    _known(spec.device_type, DEVICE_TYPES, "device_type")
    for name in ("node_num", "device_per_node"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            _refuse(f"{name}={value}: must be at least 1")
    _unique("role", [role.name for role in spec.roles])
    _unique("pool", [pool.name for pool in spec.pools])
    _check_env("job", "global_env", spec.env)
    for pool in spec.pools:
        _check_pool(spec, pool)
    for role in spec.roles:
        _check_role(spec, role)
    if spec.trainer is not None:
        _check_entry(TRAINER, spec.trainer.entry)
        if is_script(spec.trainer.entry):
            _refuse(
                f"role {TRAINER!r}: entry={spec.trainer.entry!r} is a program, which nobody can give the "
                "groups; name a class or function"
            )
        _check_resource(TRAINER, spec.trainer.resource)
        _check_env(TRAINER, "env", spec.trainer.env)
    for edge in spec.edges:
        _known(edge.kind, EDGE_KINDS, "kind of edge")
        for end in (edge.source, edge.target):
            _known(end, [role.name for role in spec.roles], f"{edge.kind}({edge.source!r}, {edge.target!r}): role")
        if not (isinstance(edge.weight, int | float) and math.isfinite(edge.weight) and edge.weight >= 0):
            _refuse(
                f"{edge.kind}({edge.source!r}, {edge.target!r}): weight={edge.weight!r} must be a number, 0 or more"
            )


def _check_pool(spec: JobSpec, pool: PoolSpec) -> None:
    _known(pool.strategy, STRATEGIES, f"pool {pool.name!r}: strategy")
    _known(pool.colocate, COLOCATIONS, f"pool {pool.name!r}: colocate")
    if not pool.slots or any(count < 1 for count in pool.slots):
        _refuse(f"pool {pool.name!r}: slots={list(pool.slots)} must name at least one slot on every node")
    if pool.strategy == "strict_pack" and len(pool.slots) > 1:
        _refuse(
            f"pool {pool.name!r}: strict_pack puts all on one machine, but it has {len(pool.slots)} nodes; "
            "leave out per_node()"
        )
    for other in pool.apart_from:
        _known(other, [p.name for p in spec.pools], f"pool {pool.name!r}: anti_affinity")
        if other == pool.name:
            _refuse(f"pool {pool.name!r}: anti_affinity with itself; spread(strict=True) keeps its own nodes apart")


def _check_role(spec: JobSpec, role: RoleSpec) -> None:
    name = role.name
    if not name or any(sign in name for sign in "/+ "):
        _refuse(f"role {name!r}: a name has at least one letter and no '/', '+' or space")
    if name == TRAINER:
        _refuse(f"role {name!r}: the trainer is one process of its own; describe it with trainer(...)")
    _known(role.pool, [pool.name for pool in spec.pools], f"role {name!r}: pool")
    pool = spec.pool(role.pool)
    if not role.on_nodes or any(count < 0 for count in role.on_nodes) or role.total < 1:
        _refuse(f"role {name!r}: total={role.total} must be at least 1")
    if len(role.on_nodes) > len(pool.slots):
        _refuse(f"role {name!r}: is on {len(role.on_nodes)} nodes, but pool {pool.name!r} has {len(pool.slots)}")
    if pool.colocate == "process" and role.on_nodes != pool.slots:
        _refuse(
            f"role {name!r}: has {list(role.on_nodes)} processes on the nodes of pool {pool.name!r}, whose "
            f"slots {list(pool.slots)} are a "
            "process each; use colocate='device', or give it a process on every slot"
        )
    if role.entry:
        _check_entry(name, role.entry)
    _check_resource(name, role.resource)
    _check_env(name, "env", role.env)
    _known(role.restart, RESTARTS, f"role {name!r}: restart")


def is_script(entry: str) -> bool:
    """Return whether an entry is a program with its arguments, and no class or function."""
    try:
        return shlex.split(entry)[0].endswith(".py")
    except (ValueError, IndexError):  # quotes that do not close, nothing
        return False


def _check_entry(role: str, entry: str) -> None:
    if is_script(entry):
        return
    module, separator, name = entry.rpartition(":")
    if not (separator and module and name.isidentifier()):
        _refuse(
            f"role {role!r}: entry={entry!r} is no class; write 'module:Class', 'file.py:Class', or the "
            "class itself, or 'program.py'"
        )


def _check_resource(role: str, resource: Resource) -> None:
    amounts = {"cpu": resource.cpu, "memory": resource.memory_mb, "accelerator": resource.accelerator, **resource.more}
    for name, amount in amounts.items():
        if amount is not None and not (isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0):
            _refuse(f"role {role!r}: resource({name}={amount!r}) must be a number, 0 or more")
    accelerator = resource.accelerator or 0.0
    if accelerator > 1 and accelerator != int(accelerator):
        _refuse(
            f"role {role!r}: resource(accelerator={accelerator:g}) must be a whole number of devices, or a part of one"
        )
    if resource.cpu == 0 and resource.accelerator == 0 and not resource.more:
        _refuse(
            f"role {role!r}: resource(cpu=0, accelerator=0) takes nothing that could be reserved; give it "
            "a part of a core, cpu=0.1"
        )


def _check_env(role: str, method: str, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            _refuse(f"role {role!r}: {method}({name!r}: {value!r}) must be text; write {str(value)!r}")
        if name in RESERVED_VARIABLES:
            _refuse(f"role {role!r}: {method}({name!r}) is set for every process from its place; choose another name")


def _known(value: str, known: Iterable[str], what: str) -> None:
    known = list(known)
    if value not in known:
        near = get_close_matches(str(value), known, n=1)
        _refuse(
            f"{what} {value!r} is not known; "
            + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}")
        )


def _unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            _refuse(f"{what} {name!r} is defined {names.count(name)} times; give each a name of its own")


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
