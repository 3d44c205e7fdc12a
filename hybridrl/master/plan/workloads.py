"""`Workloads`: the roles of a job by name, with DLRover's attribute names, to be read or changed before `submit`.

    job.workloads["ACTOR"].total                        # names are case-insensitive
    for workload in job.workloads.values():
        if workload.backend == "elastic":
            workload.comm_pre_check = False

A `Workload` is a view: it reads the job's spec and replaces it. What decides about placement cannot be changed after
`build`, because the plan was checked with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from hybridrl.errors import ConfigError
from hybridrl.master.plan.planner import device_shares
from hybridrl.master.plan.spec import TRAINER, JobSpec, Resource, RoleSpec, TrainerSpec, is_script
from hybridrl.master.plan.without_effect import log_without_effect

# Attribute -> field of the spec.
CHANGEABLE = {
    "envs": "env",
    "max_restart": "max_restart",
    "is_driver": "is_driver",
    "rank_based_gpu_selection": "sees_node_devices",
}
OF_TRAINER = {"is_driver": True, "rank_based_gpu_selection": False}  # what cannot be changed for it
# Attributes without effect -> default. The reasons are logged when a value differs from it.
ELASTIC_ONLY = {
    "comm_pre_check": False,
    "comm_auto_setup_process_group": False,
    "comm_backend": "auto",
    "comm_timeout_s": None,
}
WITHOUT_EFFECT = {**ELASTIC_ONLY, "per_node_max_failure": None, "config": {}}


class HasSpec(Protocol):
    """An object with a job's spec, which a view replaces."""

    spec: JobSpec


class Workload:
    """One role of a job.

    Attributes that can be set: `envs`, `max_restart`, `is_driver`, `rank_based_gpu_selection`; without effect also
    `per_node_max_failure` and `config`, and of an elastic role `comm_pre_check`, `comm_auto_setup_process_group`,
    `comm_backend` and `comm_timeout_s`.
    """

    _job: HasSpec
    _name: str

    def __init__(self, job: HasSpec, name: str):
        object.__setattr__(self, "_job", job)
        object.__setattr__(self, "_name", name)

    def __repr__(self) -> str:
        return f"Workload({self._name!r}, {self.entry_point!r}, total={self.total}, backend={self.backend!r})"

    @property
    def _spec(self) -> RoleSpec | TrainerSpec:
        spec = self._job.spec
        return spec.trainer if self._name == TRAINER and spec.trainer is not None else spec.role(self._name)

    @property
    def _role(self) -> RoleSpec | None:
        return self._spec if isinstance(self._spec, RoleSpec) else None

    @property
    def backend(self) -> str:
        """How the entry was set: "elastic" by train(), "simple" by run()."""
        return self._role.backend if self._role else "simple"

    @property
    def entry_point(self) -> str:
        """The entry in DLRover's form: `module.Class`, or a program with its arguments."""
        entry = self._spec.entry
        return entry if is_script(entry) or ".py:" in entry else entry.replace(":", ".")

    @property
    def total(self) -> int:
        return self._role.total if self._role else 1

    @property
    def per_group(self) -> int:
        """Processes per node. The last node may have fewer."""
        return self._role.on_nodes[0] if self._role else 1

    @property
    def group(self) -> str | None:
        """The pool that the role shares with others; None if it has devices of its own."""
        shared = self._role is not None and len(self._job.spec.roles_on(self._role.pool)) > 1
        return self._role.pool if self._role and shared else None

    @property
    def resource(self) -> Resource:
        """Resources of one process, with its share of a device."""
        role = self._role
        if role is None or role.resource.accelerator is not None:
            return self._spec.resource
        return replace(role.resource, accelerator=device_shares(self._job.spec, role.pool)[role.name])

    def __getattr__(self, name: str) -> Any:
        if name in CHANGEABLE:
            return getattr(self._spec, CHANGEABLE[name], OF_TRAINER.get(name))
        if name in WITHOUT_EFFECT and (name not in ELASTIC_ONLY or self.backend == "elastic"):
            return (self._role.without_effect if self._role else {}).get(name, WITHOUT_EFFECT[name])
        raise AttributeError(f"role {self._name!r} ({self.backend}) has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)  # AttributeError for a name that does not exist
        role = self._role
        if name == "rank_based_gpu_selection" and value and role is not None:
            self._check_rank_based(role)
        if name in CHANGEABLE and (role or name not in OF_TRAINER):
            return self._replace(**{CHANGEABLE[name]: value})
        if name not in WITHOUT_EFFECT or role is None:
            self._refuse(name, value)
        if value != WITHOUT_EFFECT[name]:
            log_without_effect("config of a role" if name == "config" else name, role=self._name)
        self._replace(without_effect={**role.without_effect, name: value})

    def _replace(self, **changes: Any) -> None:
        spec, changed = self._job.spec, replace(self._spec, **changes)
        if isinstance(changed, TrainerSpec):
            self._job.spec = replace(spec, trainer=changed)
        else:
            roles = tuple(changed if role.name == self._name else role for role in spec.roles)
            self._job.spec = replace(spec, roles=roles)

    def _refuse(self, name: str, value: Any) -> NoReturn:
        raise ConfigError(
            f"role {self._name!r}: {name}={value!r} cannot be set on a job that is built; use the builder's methods"
        )

    def _check_rank_based(self, role: RoleSpec) -> None:
        if self.per_group < 2 or (self.resource.accelerator or 0) > 1:
            raise ConfigError(
                f"role {self._name!r}: rank_based_gpu_selection needs per_group(2) or more and at most one device per "
                f"process, not per_group({self.per_group}) with {self.resource.accelerator:g}"
            )


class Workloads(Mapping[str, Workload]):
    """Role -> view of it, the trainer's included. Names are case-insensitive."""

    def __init__(self, job: HasSpec):
        self._job = job

    def __getitem__(self, name: str) -> Workload:
        for known in self:
            if known.lower() == name.lower():
                return Workload(self._job, known)
        raise KeyError(f"there is no role {name!r}; known are {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        spec = self._job.spec
        return iter([*([TRAINER] if spec.trainer else []), *(role.name for role in spec.roles)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Collocation(frozenset[str]):
    """Names of roles that share devices. `in` is case-insensitive."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name.lower() if isinstance(name, str) else name)


def collocations(spec: JobSpec) -> Sequence[Collocation]:
    """Return the sets of roles that share devices."""
    sets = [Collocation(role.name for role in spec.roles_on(pool.name)) for pool in spec.pools]
    return [names for names in sets if len(names) > 1]
