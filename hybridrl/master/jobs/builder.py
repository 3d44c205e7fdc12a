"""Describing a job: `RLJobBuilder` and `DLJobBuilder`, with the methods of both of DLRover's generations, and the `Job`
they build.

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

Methods of a role follow the one that names it; `end()` may be left out. Names of roles are the same in capitals.

`RoleBuilder`: what a job's builder says of one role. How many processes, what each takes, where they lie, what if one
is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entrypoint import entry_of, parse
from hybridrl.master.jobs.planner import check_declared, plan_job
from hybridrl.master.jobs.role_pools import RoleDraft, pools_of_roles
from hybridrl.master.jobs.spec import (
    MAX_RESTART,
    RESTART_TIMEOUT_S,
    RESTARTS,
    TRAINER,
    EdgeSpec,
    JobSpec,
    Resource,
    TrainerSpec,
)
from hybridrl.master.jobs.submit import RunningJob, submit
from hybridrl.single_controller.placement.plan import Plan


@dataclass(frozen=True)
class Job:
    """A job that can be started. spec: all that is said about it."""

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
    """A job whose roles are those of reinforcement learning."""


class DLJob(Job):
    """A job with any roles."""


class DLJobBuilder:
    """Describes a job with any roles. Every method returns what the next one is called on."""

    job_class: type[Job] = DLJob

    def __init__(self) -> None:
        self._drafts: dict[str, RoleDraft] = {}
        self._trainer: RoleDraft | None = None
        self._together: list[tuple[str, ...]] = []
        self._all_but: tuple[str, ...] | None = None
        self._edges: list[EdgeSpec] = []
        self._settings: dict[str, Any] = {}
        self._last: RoleBuilder | None = None

    # -- the job

    def node_num(self, num: int = 1) -> Self:
        """How many machines the job may use; checked by `build`."""
        self._settings["node_num"] = num
        return self

    def device_per_node(self, num: int = 8) -> Self:
        """How many devices each of them has; checked by `build`."""
        self._settings["device_per_node"] = num
        return self

    def device_type(self, device_type: str = "GPU") -> Self:
        """What a device is: GPU, TPU, NPU, or CPU, where one device is one core."""
        self._settings["device_type"] = device_type.upper()
        return self

    def config(self, config: Any) -> Self:
        """What trainer and workers are given as their config: a mapping, also OmegaConf's, or a namespace; JSON has to
        hold it.
        """
        self._settings["config"] = plain_config(config)
        return self

    def global_env(self, env: Mapping[str, str]) -> Self:
        """Environment of every process; a role's own comes first."""
        self._settings["env"] = dict(env)
        return self

    def with_collocation(self, *roles: str) -> Self:
        """Let these roles share devices, each with processes of its own."""
        self._together.append(tuple(role.lower() for role in roles))
        return self

    def with_collocation_all(self, *exclude: str) -> Self:
        """Let all roles but these share devices; the trainer is no such role."""
        self._all_but = tuple(role.lower() for role in exclude)
        return self

    def feeds(self, source: str, target: str, *, weight: float = 1.0) -> Self:
        """Say that `target` works on what `source` makes.

        weight: how much, in any unit; the heaviest edges stay on one machine.
        """
        self._edges.append(EdgeSpec("feeds", source.lower(), target.lower(), weight))
        return self

    def weights(self, source: str, target: str, *, weight: float = 1.0) -> Self:
        """Say that `target` gets the weights of `source`. weight: as of `feeds`."""
        self._edges.append(EdgeSpec("weights", source.lower(), target.lower(), weight))
        return self

    # -- its roles

    def role(self, name: str) -> "RoleBuilder":
        """Begin a role; `run` or `train` says what its workers are. Raises ConfigError for a name that is taken."""
        name = name.lower()
        taken = name in self._drafts or (name == TRAINER and self._trainer is not None)
        if taken:
            raise ConfigError(f"role {name!r} is already defined; give this one another name")
        draft = RoleDraft(name)
        if name == TRAINER:
            self._trainer = draft
        else:
            self._drafts[name] = draft
        self._last = RoleBuilder(self, draft)
        return self._last

    def workload(self, role: str, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """Begin a role and say what its workers are; entry: see `RoleBuilder.run`."""
        return self.role(role).run(entry, class_name)

    def by_dlrover_run_cmd(self, command: str) -> "RoleBuilder":
        """Begin a role from a command of torchrun or dlrover-run, `torchrun --nproc_per_node=4 train.py --lr 0.1`; it
        is called elastic.
        """
        said = parse(command)
        role = self.workload("elastic", said.program).nnodes(said.num_nodes).nproc_per_node(said.per_node)
        return role if said.max_restart is None else role.max_restart(said.max_restart)

    def trainer(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """Say what runs the loop: a class with `run`, or a function, see docs/master.md."""
        return self.workload(TRAINER, entry, class_name)

    def build(self) -> Job:
        """Return the job.

        Raises ConfigError for what cannot be right, PlacementError for more than the machines it declares.
        """
        for draft in (*self._drafts.values(), *([self._trainer] if self._trainer else [])):
            if not draft.entry:
                raise ConfigError(f"role {draft.name!r}: nothing says what it runs; add .run('module:Class')")
        roles, pools = pools_of_roles(self._drafts, self._collocations())
        job = self.job_class(JobSpec(roles, pools, self._trainer_spec(), edges=tuple(self._edges), **self._settings))
        check_declared(job.spec, job.plan())
        return job

    def _trainer_spec(self) -> TrainerSpec | None:
        draft = self._trainer
        return draft and TrainerSpec(
            draft.entry, draft.resource or Resource(), draft.env, draft.labels, draft.max_restart
        )

    def _collocations(self) -> list[tuple[str, ...]]:
        sets = list(self._together)
        if self._all_but is not None:
            sets.append(tuple(name for name in self._drafts if name not in self._all_but))
        named = [
            name for names in (*sets, self._all_but or ()) for name in ([names] if isinstance(names, str) else names)
        ]
        for name in named:
            if name not in self._drafts:
                raise ConfigError(
                    f"with_collocation: there is no role {name!r}; there are {', '.join(self._drafts) or 'none'}"
                )
            if sum(names.count(name) for names in sets) > 1:
                raise ConfigError(
                    f"with_collocation: role {name!r} is named twice; it can share devices with one set of roles"
                )
        return [names for names in sets if len(names) > 1]

    def __getattr__(self, name: str) -> Any:
        """Methods of a role, for the one that was begun last."""
        if name.startswith("_") or name not in vars(RoleBuilder):
            raise AttributeError(f"{type(self).__name__} has no method {name!r}")
        if self._last is None:
            raise ConfigError(
                f"{name}(): no role was begun that this could be said of; call role(), actor() or another first"
            )
        return getattr(self._last, name)


class RLJobBuilder(DLJobBuilder):
    """Describes a job of reinforcement learning: a trainer, an actor, and what else it needs."""

    job_class = RLJob

    def actor(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """The policy that is trained."""
        return self.workload("actor", entry, class_name)

    def rollout(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """Who generates: processes that do not talk to each other, unless `restart("role")` says so."""
        return self.workload("rollout", entry, class_name).restart("process")

    def reference(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """The policy that the trained one must stay near."""
        return self.workload("reference", entry, class_name)

    def reward(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """Who judges: processes that do not talk to each other, unless `restart("role")` says so."""
        return self.workload("reward", entry, class_name).restart("process")

    def critic(self, entry: Any, class_name: str | None = None) -> "RoleBuilder":
        """Who estimates values."""
        return self.workload("critic", entry, class_name)

    def build(self) -> Job:
        """Return the job; an actor is a must."""
        if "actor" not in self._drafts:
            raise ConfigError(
                "RLJobBuilder: there is no actor; add .actor('module:Class'), or describe the job with DLJobBuilder"
            )
        return super().build()


def plain_config(config: Any, *, key: str = "config") -> Any:
    """Return a config as JSON has it: mappings, also OmegaConf's, and namespaces as dicts.

    Raises ConfigError that names the key.
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
        f"{key}={config!r}: a {type(config).__name__} is nothing that JSON has; give text, numbers, lists and dicts"
    )


# Names that DLRover's resource() also takes.
RESOURCE_ALIASES = {"mem": "memory", "gpu": "accelerator", "acc": "accelerator"}


class RoleBuilder:
    """Describes one role. What is not a method here is one of the job's, so that the chain goes on."""

    def __init__(self, job: "DLJobBuilder", draft: RoleDraft):
        self._job, self._draft = job, draft

    def run(self, entry: Any, class_name: str | None = None) -> Self:
        """Say what its processes are.

        entry: a class, 'module:Class', 'module.Class', 'file.py:Class', or a module and a class's name: workers, which
        the trainer calls. A function, by the same names, or a program with its arguments, 'train.py --lr 0.1': run once
        in each process, as torchrun would.
        """
        self._draft.entry = entry_of(self._draft.name, entry, class_name)
        return self

    train = run

    def total(self, num: int = 1) -> Self:
        """How many processes."""
        return self._count("total", num)

    def per_node(self, num: int = 1) -> Self:
        """How many of them on one node, together on one machine; the last node has what is left."""
        return self._count("per_node", num)

    per_group = per_node

    def nproc_per_node(self, num: int) -> Self:
        """As `per_node`; with `nnodes`, the total is their product."""
        return self._count("per_node", num)

    def nnodes(self, num: int) -> Self:
        """On how many nodes."""
        return self._count("num_nodes", num)

    def _count(self, what: str, num: int) -> Self:
        if not isinstance(num, int) or num < 1:
            raise ConfigError(f"role {self._draft.name!r}: {what}={num!r} must be a whole number, 1 or more")
        if self._draft.name == TRAINER and num != 1:
            raise ConfigError(f"role {TRAINER!r}: {what}={num}, but the trainer is one process; leave it out")
        setattr(self._draft, what, num)
        return self

    def resource(
        self, cpu: float | None = None, memory: int | None = None, accelerator: float | None = None, **more: float
    ) -> Self:
        """What each process takes: cores, memory in MB of 2**20 bytes, devices or a part of one, Ray's custom resources
        by name.

        Without it: a device, and a core for it. With it: no device, unless it is said or the role shares devices.
        """
        for alias, name in RESOURCE_ALIASES.items():
            if alias in more and name == "memory":
                memory = int(more.pop(alias))
            elif alias in more:
                accelerator = more.pop(alias)
        self._draft.resource = Resource(cpu, memory, accelerator, more)
        return self

    def env(self, env: Mapping[str, str]) -> Self:
        """Environment of the role's processes, before `global_env`."""
        self._draft.env.update(env)
        return self

    # -- what happens when a process of it is lost

    def max_restart(self, num: int = MAX_RESTART) -> Self:
        """How many losses the role survives; ten steps without a loss, as the trainer tells them, and it is as if there
        were none.
        """
        if not isinstance(num, int) or num < 0:
            raise ConfigError(
                f"role {self._draft.name!r}: max_restart={num!r} must be a whole number; 0 ends the job at "
                "the first loss"
            )
        self._draft.max_restart = num
        return self

    def restart(self, together: str = "role") -> Self:
        """Who is started again with a process that was lost: the whole "role", because its processes talk to each
        other, those on its "node", or the "process" alone.
        """
        if together not in RESTARTS:
            raise ConfigError(
                f"role {self._draft.name!r}: restart({together!r}) is not known; there are {', '.join(RESTARTS)}"
            )
        self._draft.restart = together
        return self

    def enable_node_group_failover(self, label_key: str = "", timeout: float = RESTART_TIMEOUT_S) -> Self:
        """Start those again together that are on one node of the role, or on machines whose label `label_key` of Ray is
        the same.

        timeout: seconds for them to be back.
        """
        if not timeout > 0:
            raise ConfigError(
                f"role {self._draft.name!r}: enable_node_group_failover(timeout={timeout!r}) must be more "
                "than 0 seconds"
            )
        self._draft.restart_label, self._draft.restart_timeout_s = label_key, float(timeout)
        return self.restart("node")

    # -- where it lies

    def pack(self, strict: bool = False) -> Self:
        """Its nodes may lie on the same machine. strict: all processes on one machine."""
        return self._lie("strict_pack" if strict else "pack")

    def spread(self, strict: bool = False) -> Self:
        """Its nodes are different machines where there are enough. strict: or it does not start."""
        return self._lie("strict_spread" if strict else "spread")

    def _lie(self, strategy: str) -> Self:
        self._draft.strategy = strategy
        return self

    def node_labels(self, labels: Mapping[str, str]) -> Self:
        """Only on machines with these labels of Ray: `{"zone": "a"}`, `"!a"`, `"in(a,b)"`, `"!in(a,b)"`."""
        self._draft.labels.update(labels)
        return self

    def anti_affinity(self, *roles: str) -> Self:
        """Never on a machine where one of these roles is."""
        self._draft.apart_from += tuple(role.lower() for role in roles)
        return self

    def end(self) -> "DLJobBuilder":
        """Return to the job; may be left out."""
        return self._job

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._job, name)
