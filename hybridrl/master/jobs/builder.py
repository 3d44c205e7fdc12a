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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entrypoint import parse_entry, parse_torchrun
from hybridrl.master.jobs.submit import RunningJob, submit
from hybridrl.master.plan.planner import check_declared_size, plan_job
from hybridrl.master.plan.role_pools import RoleRequest, assign_pools
from hybridrl.master.plan.spec import (
    MAX_RESTART,
    RESTART_TIMEOUT_S,
    RESTARTS,
    TRAINER,
    EdgeSpec,
    JobSpec,
    Resource,
    TrainerSpec,
)
from hybridrl.single_controller.placement.plan import Plan

# Names that DLRover's resource() also accepts.
RESOURCE_ALIASES = {"mem": "memory", "gpu": "accelerator", "acc": "accelerator"}


@dataclass(frozen=True)
class Job:
    """A job that can be submitted."""

    spec: JobSpec

    def plan(self, job: str = "job") -> Plan:
        """Return which process runs where. job: the prefix of all names."""
        return plan_job(self.spec, job)

    def submit(
        self, job_name: str | None = None, blocking: bool = True, *, dry_run: bool = False, journal: str | None = None
    ) -> "int | RunningJob":
        """Start the job; see `submit.submit`."""
        return submit(self.spec, job_name, blocking=blocking, dry_run=dry_run, journal=journal)

    def model_dump_json(self, indent: int | None = None) -> str:
        """Return the spec as JSON."""
        return self.spec.model_dump_json(indent)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Return the job that `model_dump_json` wrote."""
        return cls(JobSpec.model_validate_json(text))


class RLJob(Job):
    """A job with the roles of reinforcement learning."""


class DLJob(Job):
    """A job with any roles."""


class RoleBuilder:
    """DLRover's methods that describe a role.

    Every builder has them, so that calls chain. On a builder that a role's method returned they describe that role; on
    the job's builder, the role that was named last.
    """

    def _bound(self, method: str) -> Self:
        """Return the builder that describes a role. method: for the error message."""
        raise NotImplementedError

    def _request(self, method: str) -> RoleRequest:
        raise NotImplementedError

    def run(self, entry: Any, class_name: str | None = None) -> Self:
        """Set what the role's processes run.

        Args:
            entry: A class, 'module:Class', 'module.Class', 'file.py:Class', or a module with `class_name`: workers,
                whose methods the trainer calls. A function, by the same names, or a program with its arguments,
                'train.py --lr 0.1': executed once in each process, as by torchrun.
            class_name: Name of the class in the module `entry`.
        """
        request = self._request("run")
        request.entry = parse_entry(request.name, entry, class_name)
        return self._bound("run")

    def train(self, entry: Any, class_name: str | None = None) -> Self:
        """Do the same as `run`."""
        return self.run(entry, class_name)

    # -- how many processes

    def total(self, num: int = 1) -> Self:
        """Set the number of processes."""
        return self._set_count("total", num, method="total")

    def per_node(self, num: int = 1) -> Self:
        """Set the number of processes per node, which are on one machine. The last node has the remainder."""
        return self._set_count("per_node", num, method="per_node")

    def per_group(self, num: int = 1) -> Self:
        """Do the same as `per_node`."""
        return self._set_count("per_node", num, method="per_group")

    def nproc_per_node(self, num: int) -> Self:
        """Do the same as `per_node`. With `nnodes`, the total is their product."""
        return self._set_count("per_node", num, method="nproc_per_node")

    def nnodes(self, num: int) -> Self:
        """Set the number of nodes."""
        return self._set_count("num_nodes", num, method="nnodes")

    def _set_count(self, field_name: str, num: int, *, method: str) -> Self:
        request = self._request(method)
        if not isinstance(num, int) or num < 1:
            raise ConfigError(f"role {request.name!r}: {field_name}={num!r} must be a whole number, 1 or more")
        if request.name == TRAINER and num != 1:
            raise ConfigError(f"role {TRAINER!r}: {field_name}={num}, but the trainer is one process; leave it out")
        setattr(request, field_name, num)
        return self._bound(method)

    # -- what each process gets

    def resource(
        self, cpu: float | None = None, memory: int | None = None, accelerator: float | None = None, **more: float
    ) -> Self:
        """Set the resources of each process.

        Without this call, a process gets one device and one core. With it, no device, unless it is requested or the
        role shares devices.

        Args:
            cpu: Cores.
            memory: MB of 2**20 bytes.
            accelerator: Devices, or a fraction of one.
            more: Ray's custom resources by name.
        """
        for alias, name in RESOURCE_ALIASES.items():
            if alias in more and name == "memory":
                memory = int(more.pop(alias))
            elif alias in more:
                accelerator = more.pop(alias)
        self._request("resource").resource = Resource(cpu, memory, accelerator, more)
        return self._bound("resource")

    def env(self, env: Mapping[str, str]) -> Self:
        """Add environment variables of the role's processes. They override `global_env`."""
        self._request("env").env.update(env)
        return self._bound("env")

    # -- what happens when a process is lost

    def max_restart(self, num: int = MAX_RESTART) -> Self:
        """Set how many losses the role survives. Ten reported steps without a loss reset the count."""
        request = self._request("max_restart")
        if not isinstance(num, int) or num < 0:
            raise ConfigError(
                f"role {request.name!r}: max_restart={num!r} must be a whole number; 0 ends the job at the first loss"
            )
        request.max_restart = num
        return self._bound("max_restart")

    def restart(self, together: str = "role") -> Self:
        """Set which processes are restarted with a lost one.

        Args:
            together: "role": all of the role, because its processes communicate; "node": those on its node; "process":
                none.
        """
        request = self._request("restart")
        if together not in RESTARTS:
            raise ConfigError(
                f"role {request.name!r}: restart({together!r}) is unknown; known are {', '.join(RESTARTS)}"
            )
        request.restart = together
        return self._bound("restart")

    def enable_node_group_failover(self, label_key: str = "", timeout: float = RESTART_TIMEOUT_S) -> Self:
        """Restart all processes of a node together.

        Args:
            label_key: Machines with the same value of this Ray label count as one node.
            timeout: Seconds for the restarted processes to be ready.
        """
        request = self._request("enable_node_group_failover")
        if not timeout > 0:
            raise ConfigError(
                f"role {request.name!r}: enable_node_group_failover(timeout={timeout!r}) must be more than 0 seconds"
            )
        request.restart_label, request.restart_timeout_s = label_key, float(timeout)
        return self.restart("node")

    # -- where it is placed

    def pack(self, strict: bool = False) -> Self:
        """Allow nodes of the role on one machine. strict: place all processes on one machine."""
        return self._set_strategy("strict_pack" if strict else "pack", method="pack")

    def spread(self, strict: bool = False) -> Self:
        """Place nodes of the role on different machines if there are enough. strict: refuse to start otherwise."""
        return self._set_strategy("strict_spread" if strict else "spread", method="spread")

    def _set_strategy(self, strategy: str, *, method: str) -> Self:
        self._request(method).strategy = strategy
        return self._bound(method)

    def node_labels(self, labels: Mapping[str, str]) -> Self:
        """Require machines with these Ray labels: `{"zone": "a"}`, `"!a"`, `"in(a,b)"`, `"!in(a,b)"`."""
        self._request("node_labels").labels.update(labels)
        return self._bound("node_labels")

    def anti_affinity(self, *roles: str) -> Self:
        """Forbid machines on which one of these roles runs."""
        self._request("anti_affinity").apart_from += tuple(role.lower() for role in roles)
        return self._bound("anti_affinity")


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
        """Set the kind of device: GPU, TPU, NPU, or CPU, where one device is one core."""
        return self._set("device_type", device_type.upper())

    def config(self, config: Any) -> Self:
        """Set the config of trainer and workers: a mapping (also OmegaConf's) or a namespace that JSON can hold."""
        return self._set("config", plain_config(config))

    def global_env(self, env: Mapping[str, str]) -> Self:
        """Set environment variables of every process. A role's own override them."""
        return self._set("env", dict(env))

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

        Args:
            command: For example `torchrun --nproc_per_node=4 train.py --lr 0.1`.
        """
        parsed = parse_torchrun(command)
        role = self.workload("elastic", parsed.program).nnodes(parsed.num_nodes).nproc_per_node(parsed.per_node)
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

    def actor(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the policy that is trained."""
        return self.workload("actor", entry, class_name)

    def rollout(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the generation processes. They are restarted one by one, unless `restart("role")` changes it."""
        return self.workload("rollout", entry, class_name).restart("process")

    def reference(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the reference policy."""
        return self.workload("reference", entry, class_name)

    def reward(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the reward processes. They are restarted one by one, unless `restart("role")` changes it."""
        return self.workload("reward", entry, class_name).restart("process")

    def critic(self, entry: Any, class_name: str | None = None) -> Self:
        """Add the value model."""
        return self.workload("critic", entry, class_name)

    def build(self) -> Job:
        """Return the job. An actor is required."""
        if "actor" not in self._description.roles:
            raise ConfigError(
                "RLJobBuilder: there is no actor; add .actor('module:Class'), or describe the job with DLJobBuilder"
            )
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
