"""Builders that describe a job: `RLJobBuilder` and `DLJobBuilder`, with the methods of both generations of DLRover.

    job = (
        RLJobBuilder()
        .node_num(2).device_per_node(4).config({"lr": 1e-6}).global_env({"NCCL_DEBUG": "WARN"})
        .trainer("my_project.train:Trainer")
        .actor("my_project.workers:Actor").nnodes(2).nproc_per_node(4)
        .rollout("my_project.workers:Rollout").total(8).per_node(4)
        .with_collocation("actor", "rollout")
        .build()
    )
    job.submit("grpo", dry_run=True)        # the plan as a table
    job.submit("grpo")

The methods of a role follow the method that names it; `end()` is optional. Role names are case-insensitive.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entrypoint import parse_torchrun
from hybridrl.master.jobs.role_builder import RoleBuilder
from hybridrl.master.jobs.submit import RunningJob, submit
from hybridrl.master.plan.planner import check_declared_size, plan_job
from hybridrl.master.plan.role_pools import RoleRequest, assign_pools
from hybridrl.master.plan.spec import ANY_DEVICE, TRAINER, EdgeSpec, JobSpec, Resource, TrainerSpec
from hybridrl.master.plan.submit_options import read_options
from hybridrl.master.plan.without_effect import log_without_effect
from hybridrl.master.plan.workloads import Collocation, Workload, Workloads, collocations
from hybridrl.single_controller.placement.plan import Plan

ELASTIC = "elastic"  # the role of train() and of a torchrun command
# Roles that a trainer calls, and what is restarted with a lost process of theirs.
CALLED_ROLES = {"actor": "role", "critic": "role", "rollout": "process", "reference": "role", "reward": "process"}


@dataclass
class Job:
    """A job that can be submitted. What was built is in `spec`; the properties have DLRover's names."""

    spec: JobSpec

    @property
    def node_num(self) -> int | None:
        """Machines that the job may use. None: as many as the cluster has."""
        return self.spec.node_num

    @property
    def device_per_node(self) -> int | None:
        """Devices per machine. None: as many as the machines have."""
        return self.spec.device_per_node

    @property
    def device_type(self) -> str:
        return self.spec.device_type

    @property
    def config(self) -> Mapping[str, Any]:
        return self.spec.config

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of global_env()."""
        return self.spec.env

    @property
    def collocations(self) -> Sequence[Collocation]:
        """The sets of roles that share devices."""
        return collocations(self.spec)

    @property
    def workloads(self) -> Workloads:
        """The view of each role by its name, see `Workload`."""
        return Workloads(self)

    def get_workload(self, role: str) -> Workload:
        """Return the view of a role. Raises KeyError for an unknown one."""
        return self.workloads[role]

    def plan(self, job: str = "job") -> Plan:
        """Return which process runs where. job: the prefix of all names."""
        return plan_job(self.spec, job)

    def submit(
        self,
        job_name: str | None = None,
        blocking: bool = True,
        *,
        dry_run: bool = False,
        check: bool = False,
        journal: str | None = None,
        **job_config: Any,
    ) -> "int | RunningJob":
        """Start the job; see `submit.submit` for the named arguments.

        Args:
            job_config: Fields of DLRover's JobConfig (`submit_options.py`). Those not given are read from environment
                variables like DLROVER_UNIFIED_MASTER_CPU.
        """
        options = read_options(job_config, os.environ)
        spec, master = options.change_spec(self.spec), options.master
        return submit(spec, job_name, blocking=blocking, dry_run=dry_run, check=check, journal=journal, master=master)

    def dry_run(self, job_name: str | None = None, *, check: bool = False) -> None:
        """Print the plan and start nothing. check: import the entries first, in a process of their own."""
        self.submit(job_name, dry_run=True, check=check)

    def model_dump_json(self, indent: int | None = None) -> str:
        """Return the spec as JSON."""
        return self.spec.model_dump_json(indent)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Return the job that `model_dump_json` wrote."""
        return cls(JobSpec.model_validate_json(text))


class DLJob(Job):
    """A job with any roles."""


class RLJob(DLJob):
    """A job with the roles of reinforcement learning."""


@dataclass
class _Description:
    """The settings of one job, shared by all of its builders."""

    roles: dict[str, RoleRequest] = field(default_factory=dict)
    trainer: RoleRequest | None = None
    last: RoleRequest | None = None  # the role that was named last
    collocations: list[tuple[str, ...]] = field(default_factory=list)
    collocate_all_except: tuple[str, ...] | None = None
    edges: list[EdgeSpec] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    of_elastic_roles: dict[str, Any] = field(default_factory=dict)  # their settings without effect


class DLJobBuilder(RoleBuilder):
    """Describes a job with any roles. Methods that name a role return a builder bound to that role."""

    job_class: type[Job] = DLJob

    def __init__(self) -> None:
        self._description = _Description()
        self._role: RoleRequest | None = None  # the role that this builder is bound to
        self._unbound: Self | None = None  # the job's builder; None: this one

    @property
    def _job_builder(self) -> Self:
        return self._unbound or self

    def _bound(self, method: str) -> Self:
        if self._role is not None:
            return self
        builder = copy.copy(self)
        builder._role, builder._unbound = self._request(method), self
        return builder

    def _request(self, method: str) -> RoleRequest:
        request = self._role or self._description.last
        if request is None:
            raise ConfigError(f"{method}(): there is no role yet; call role(), actor() or another one first")
        return request

    def _without_entry(self, method: str) -> Self:
        request = self._role or self._description.last
        if request is not None and not request.entry:
            return self._bound(method)
        if method == "train":
            return self.role(ELASTIC)
        if request is not None:
            raise ConfigError(
                f"role {request.name!r}: it already runs {request.entry!r}; name another with role() first"
            )
        return self._bound(method)

    def end(self) -> Self:
        """Return the job's builder. Optional."""
        self._request("end")
        return self._job_builder

    # -- the job

    def _set(self, name: str, value: Any) -> Self:
        self._description.settings[name] = value
        return self._job_builder

    def node_num(self, num: int = 1) -> Self:
        """Set how many machines the job may use; `build` checks it."""
        return self._set("node_num", num)

    def device_per_node(self, num: int = 8) -> Self:
        """Set how many devices each machine has; `build` checks it."""
        return self._set("device_per_node", num)

    def device_type(self, device_type: str = "GPU") -> Self:
        """Set the kind of device: GPU, TPU, NPU, CPU or AUTO.

        A CPU device is one core. AUTO takes what the cluster has.
        """
        return self._set("device_type", device_type.upper())

    def config(self, config: Any) -> Self:
        """Set the config of trainer and workers: a mapping (also OmegaConf's) or a namespace that JSON can hold."""
        return self._set("config", plain_config(config))

    def global_env(self, env: Mapping[str, str] | None) -> Self:
        """Set environment variables of every process. A role's own override them."""
        return self._set("env", dict(env or {}))

    def with_collocation(self, *roles: str) -> Self:
        """Let these roles share devices, each with processes of its own."""
        self._description.collocations.append(tuple(role.lower() for role in roles))
        return self._job_builder

    def with_collocation_all(self, *exclude: str) -> Self:
        """Let all roles but these share devices. The trainer is not one of them."""
        self._description.collocate_all_except = tuple(role.lower() for role in exclude)
        return self._job_builder

    def feeds(self, source: str, target: str, *, weight: float = 1.0) -> Self:
        """Declare that `target` processes the output of `source`.

        Args:
            source: A role.
            target: A role.
            weight: Amount of data, in any unit. The heaviest edges stay on one machine.
        """
        return self._add_edge("feeds", source, target, weight)

    def weights(self, source: str, target: str, *, weight: float = 1.0) -> Self:
        """Declare that `target` gets the weights of `source`. weight: see `feeds`."""
        return self._add_edge("weights", source, target, weight)

    def _add_edge(self, kind: str, source: str, target: str, weight: float) -> Self:
        self._description.edges.append(EdgeSpec(kind, source.lower(), target.lower(), weight))
        return self._job_builder

    # -- what DLRover's users also set

    def skip_node_check(self) -> Self:
        """Do not test the machines before a start, as always."""
        self._description.of_elastic_roles["comm_pre_check"] = False
        return self._job_builder

    def no_setup_process_group(self) -> Self:
        """Make no process group before the entry runs, as always."""
        self._description.of_elastic_roles["comm_auto_setup_process_group"] = False
        return self._job_builder

    def as_task_stream(self) -> Self:
        """Accept DLRover's kind of job, which has no effect."""
        log_without_effect("as_task_stream()")
        return self._job_builder

    def as_data_stream(self) -> Self:
        """Accept DLRover's kind of job, which has no effect."""
        log_without_effect("as_data_stream()")
        return self._job_builder

    # -- its roles

    def role(self, name: str) -> Self:
        """Add a role; `run` or `train` sets its workers. Raises ConfigError if the name is in use."""
        name, description = name.lower(), self._description
        if name in description.roles or (name == TRAINER and description.trainer is not None):
            raise ConfigError(f"role {name!r} is already defined; give this one another name")
        request = description.last = RoleRequest(name)
        if name == TRAINER:
            description.trainer = request
        else:
            description.roles[name] = request
        return self._job_builder._bound("role")

    def workload(self, role: str, entry: Any, class_name: str | None = None) -> Self:
        """Add a role with its entry, see `run`."""
        return self.role(role).run(entry, class_name)

    def by_dlrover_run_cmd(self, command: str) -> Self:
        """Add the role `elastic` from a command of torchrun or dlrover-run.

        It also sets node_num, device_per_node and device_type("AUTO"), unless they are set.

        Args:
            command: For example `torchrun --nproc_per_node=4 train.py --lr 0.1`.
        """
        parsed = parse_torchrun(command)
        role = self.role(ELASTIC).train(parsed.program).nnodes(parsed.num_nodes).nproc_per_node(parsed.per_node)
        self._description.settings = {
            "node_num": parsed.num_nodes,
            "device_per_node": parsed.per_node,
            "device_type": ANY_DEVICE,
            **self._description.settings,
        }
        role._request("run").without_effect["comm_pre_check"] = parsed.node_check
        return role if parsed.max_restart is None else role.max_restart(parsed.max_restart)

    def trainer(self, entry: Any, class_name: str | None = None) -> Self:
        """Set the training loop: a class with `run`, or a function, see docs/master.md."""
        return self.workload(TRAINER, entry, class_name)

    def build(self) -> Job:
        """Return the job.

        Raises:
            ConfigError: If the description is wrong or incomplete.
            PlacementError: If the job needs more than its declared machines.
        """
        description = self._description
        for request in (*description.roles.values(), *([description.trainer] if description.trainer else [])):
            if not request.entry:
                raise ConfigError(f"role {request.name!r}: it has nothing to run; add .run('module:Class')")
            if request.backend == "elastic":
                request.without_effect |= description.of_elastic_roles
        roles, pools = assign_pools(description.roles, self._collocations())
        trainer = _trainer_spec(description.trainer) if description.trainer else None
        spec = JobSpec(roles, pools, trainer, edges=tuple(description.edges), **description.settings)
        job = self.job_class(spec)
        check_declared_size(job.spec, job.plan())
        return job

    def _collocations(self) -> list[tuple[str, ...]]:
        roles, excluded = self._description.roles, self._description.collocate_all_except
        sets = list(self._description.collocations)
        if excluded is not None:
            sets.append(tuple(name for name in roles if name not in excluded))
        for name in (*(name for names in sets for name in names), *(excluded or ())):
            if name not in roles:
                raise ConfigError(
                    f"with_collocation: there is no role {name!r}; known are {', '.join(roles) or 'none'}"
                )
            if sum(names.count(name) for names in sets) > 1:
                raise ConfigError(
                    f"with_collocation: role {name!r} is named twice; it can share devices with one set of roles"
                )
        return [names for names in sets if len(names) > 1]


class RLJobBuilder(DLJobBuilder):
    """Describes a job of reinforcement learning: a trainer, an actor, and optional other roles."""

    job_class = RLJob

    def role(self, name: str) -> Self:
        """Add a role. If a trainer calls it, its processes do not decide when the job ends.

        Lost processes of rollout and reward are restarted one by one, unless `restart("role")` changes it.
        """
        builder = super().role(name)
        request = builder._request("role")
        request.restart = CALLED_ROLES.get(request.name, request.restart)
        return builder

    def actor(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the policy that is trained."""
        return self.role("actor").train(entry, class_name)

    def rollout(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the generation processes."""
        return self.workload("rollout", entry, class_name)

    def reference(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the reference policy."""
        return self.workload("reference", entry, class_name)

    def reward(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the reward processes."""
        return self.workload("reward", entry, class_name)

    def critic(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the value model."""
        return self.role("critic").train(entry, class_name)

    def build(self) -> Job:
        """Return the job. An actor is required."""
        roles = self._description.roles
        if "actor" not in roles:
            raise ConfigError(
                "RLJobBuilder: there is no actor; add .actor('module:Class'), or describe the job with DLJobBuilder"
            )
        for request in roles.values():
            if self._description.trainer is not None and request.name in CALLED_ROLES:
                request.is_driver = bool(request.is_driver)
        return super().build()


def _trainer_spec(request: RoleRequest) -> TrainerSpec:
    return TrainerSpec(request.entry, request.resource or Resource(), request.env, request.labels, request.max_restart)


def plain_config(config: Any, *, key: str = "config") -> Any:
    """Return a config as JSON types. Mappings (also OmegaConf's) and namespaces become dicts.

    Raises:
        ConfigError: If JSON cannot hold a value. The message names the key.
    """
    if config is None or isinstance(config, bool | int | float | str):
        return config
    if isinstance(config, Mapping):
        return {str(name): plain_config(value, key=f"{key}.{name}") for name, value in config.items()}
    if isinstance(config, Sequence):
        return [plain_config(value, key=f"{key}[{i}]") for i, value in enumerate(config)]
    if hasattr(config, "__dict__") and not callable(config):
        return {
            name: plain_config(value, key=f"{key}.{name}")
            for name, value in vars(config).items()
            if not name.startswith("_")
        }
    raise ConfigError(
        f"{key}={config!r}: JSON cannot hold a {type(config).__name__}; give text, numbers, lists and dicts"
    )
