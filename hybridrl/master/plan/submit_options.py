"""Keywords of `Job.submit` that DLRover's JobConfig has: what they change here, or why they change nothing.

A keyword that is not given is read from the environment, as `DLROVER_UNIFIED_MASTER_CPU`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from hybridrl.errors import ConfigError
from hybridrl.failure_policy import RULES, FailureKind
from hybridrl.master.plan.planner import MB
from hybridrl.master.plan.spec import TRAINER, JobSpec, Resource, RoleSpec, TrainerSpec
from hybridrl.master.plan.without_effect import REASONS, log_without_effect
from hybridrl.single_controller.placement.plan import Reservation

R = TypeVar("R", RoleSpec, TrainerSpec)
PREFIX = "DLROVER_UNIFIED_"
ALIASES = {"master_memory": "master_mem", "timeout": "master_create_timeout"}
START_TIMEOUT_S = 120.0  # a longer start means that the cluster has no free core


@dataclass(frozen=True)
class MasterOptions:
    """How the process that supervises a job is started.

    Attributes:
        cpu: Cores to reserve.
        memory_mb: MB of 2**20 bytes to reserve.
        resource: Ray's custom resource that its machine must have; one unit is reserved.
        start_timeout_s: Limit for its start.
        max_restarts: Losses of it that the job survives.
    """

    cpu: float = 0.0
    memory_mb: float = 0.0
    resource: str = ""
    start_timeout_s: float = START_TIMEOUT_S
    max_restarts: int | None = RULES[FailureKind.JOB_SUPERVISOR_LOST].limit

    def reservations(self, run: str) -> list[Reservation]:
        """Return what the process takes of the cluster; empty if it reserves nothing."""
        amounts = {"CPU": self.cpu, "memory": self.memory_mb * MB, self.resource: 1.0 if self.resource else 0.0}
        bundle = {name: amount for name, amount in amounts.items() if amount}
        hint = "Lower master_cpu or master_mem of submit()"
        return [Reservation(f"{run}/supervisor", "supervisor", (bundle,), hint=hint)] if bundle else []


@dataclass(frozen=True)
class SubmitOptions:
    """What the keywords say, None where they say nothing.

    Attributes:
        trainer_max_restart: Replaces the trainer's `max_restart`.
        workload_max_restart: Role -> its `max_restart`.
        no_restarts: Every `max_restart` is 0.
        worker_resource: Ray's custom resource of which every process takes one unit.
    """

    master: MasterOptions = MasterOptions()
    trainer_max_restart: int | None = None
    workload_max_restart: Mapping[str, int] | None = None
    no_restarts: bool = False
    worker_resource: str = ""

    def change_spec(self, spec: JobSpec) -> JobSpec:
        """Return the spec with these options.

        Raises ConfigError for a role that it does not have.
        """
        limits = {name.lower(): limit for name, limit in (self.workload_max_restart or {}).items()}
        if self.trainer_max_restart is not None:
            limits[TRAINER] = self.trainer_max_restart
        names = [role.name.lower() for role in spec.roles]
        for name in limits:
            if name not in (*names, TRAINER):
                _refuse(f"workload_max_restart: role {name!r}", name, names)
        roles = tuple(self._change(role, limits.get(role.name.lower())) for role in spec.roles)
        trainer = spec.trainer and self._change(spec.trainer, limits.get(TRAINER))
        return replace(spec, roles=roles, trainer=trainer)

    def _change(self, role: R, limit: int | None) -> R:
        limit = 0 if self.no_restarts else role.max_restart if limit is None else limit
        resource = role.resource
        if self.worker_resource:
            resource = Resource(
                resource.cpu, resource.memory_mb, resource.accelerator, {**resource.more, self.worker_resource: 1.0}
            )
        return replace(role, max_restart=limit, resource=resource)


def read_options(keywords: Mapping[str, Any], environment: Mapping[str, str]) -> SubmitOptions:
    """Return what the keywords and variables of DLRover's JobConfig say.

    A keyword overrides its variable.

    Raises:
        ConfigError: For an unknown keyword, with the nearest names, or for a value of a wrong type.
    """
    given: dict[str, Any] = {}
    for name in (*PARSERS, *ALIASES):
        text = environment.get(PREFIX + name.upper())
        if text is not None:
            given[ALIASES.get(name, name)] = _parse(name, text)
    for name, value in keywords.items():
        if name not in PARSERS and name not in ALIASES:
            _refuse(f"submit({name}={value!r}): this keyword", name, [*PARSERS, *ALIASES])
        given[ALIASES.get(name, name)] = _parse(name, value)
    for name, value in given.items():
        for setting in {name, f"{name}={value}"} & REASONS.keys():
            log_without_effect(setting)
    default = MasterOptions()
    return SubmitOptions(
        MasterOptions(
            given.get("master_cpu", default.cpu),
            given.get("master_mem", default.memory_mb),
            given.get("master_isolation_schedule_resource", default.resource),
            given.get("master_create_timeout", default.start_timeout_s),
            given.get("master_max_restart", default.max_restarts),
        ),
        given.get("trainer_max_restart"),
        given.get("workload_max_restart"),
        0 in (given.get("failover_exec_strategy"), given.get("failover_trigger_strategy")),
        given.get("worker_isolation_schedule_resource", ""),
    )


# -- types


def _amount(value: Any) -> float:
    return _at_least_zero(float(value))


def _count(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(_at_least_zero(int(value)))


def _at_least_zero(number: float) -> float:
    if not number >= 0:
        raise ValueError
    return number


def _strategy(value: Any) -> int:
    if int(value) not in (0, 1, 2):
        raise ValueError
    return int(value)


def _counts(value: Any) -> dict[str, int]:
    counts = json.loads(value) if isinstance(value, str) else dict(value)
    return {name: _count(count) for name, count in counts.items()}


PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "master_cpu": _amount,
    "master_mem": _amount,
    "master_create_timeout": _amount,
    "master_max_restart": _count,
    "master_isolation_schedule_resource": str,
    "worker_isolation_schedule_resource": str,
    "trainer_max_restart": _count,
    "workload_max_restart": _counts,
    "failover_exec_strategy": _strategy,
    "failover_trigger_strategy": _strategy,
    "job_max_restart": _count,
    "node_max_restart": _count,
    "master_state_backend_type": str,
    "master_state_backend_config": lambda value: value,
    "scheduling_strategy_type": str,
}
EXPECTED: Mapping[Callable[[Any], Any], str] = {
    _amount: "a number, 0 or more",
    _count: "a whole number, 0 or more",
    _strategy: "0, 1 or 2",
    _counts: "a mapping of roles to whole numbers",
}


def _parse(name: str, value: Any) -> Any:
    parser = PARSERS[ALIASES.get(name, name)]
    try:
        return parser(value)
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"submit({name}={value!r}) must be {EXPECTED[parser]}") from None


def _refuse(what: str, name: str, known: list[str]) -> None:
    near = get_close_matches(name, known, n=3)
    raise ConfigError(
        f"{what} is unknown; " + (f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}")
    )
