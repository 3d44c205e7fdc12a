"""`RoleBuilder`: what a job's builder says of one role. How many processes, what each takes, where they lie, what if one is lost."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.entry import entry_of
from hybridrl.master.pools import RoleDraft
from hybridrl.master.spec import MAX_RESTART, RESTART_TIMEOUT_S, RESTARTS, TRAINER, Resource

if TYPE_CHECKING:
    from hybridrl.master.job import DLJobBuilder

# Names that DLRover's resource() also takes.
RESOURCE_ALIASES = {"mem": "memory", "gpu": "accelerator", "acc": "accelerator"}


class RoleBuilder:
    """Describes one role. What is not a method here is one of the job's, so that the chain goes on."""

    def __init__(self, job: "DLJobBuilder", draft: RoleDraft):
        self._job, self._draft = job, draft

    def run(self, entry: Any, class_name: str | None = None) -> Self:
        """Say what its processes are.

        entry: a class, 'module:Class', 'module.Class', 'file.py:Class', or a module and a class's name: workers, which the trainer calls.
        A function, by the same names, or a program with its arguments, 'train.py --lr 0.1': run once in each process, as torchrun would.
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

    def resource(self, cpu: float | None = None, memory: int | None = None, accelerator: float | None = None, **more: float) -> Self:
        """What each process takes: cores, memory in MB of 2**20 bytes, devices or a part of one, Ray's custom resources by name.

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
        """How many losses the role survives; ten steps without a loss, as the trainer tells them, and it is as if there were none."""
        if not isinstance(num, int) or num < 0:
            raise ConfigError(f"role {self._draft.name!r}: max_restart={num!r} must be a whole number; 0 ends the job at the first loss")
        self._draft.max_restart = num
        return self

    def restart(self, together: str = "role") -> Self:
        """Who is started again with a process that was lost: the whole "role", because its processes talk to each other, those on its
        "node", or the "process" alone."""
        if together not in RESTARTS:
            raise ConfigError(f"role {self._draft.name!r}: restart({together!r}) is not known; there are {', '.join(RESTARTS)}")
        self._draft.restart = together
        return self

    def enable_node_group_failover(self, label_key: str = "", timeout: float = RESTART_TIMEOUT_S) -> Self:
        """Start those again together that are on one node of the role, or on machines whose label `label_key` of Ray is the same.

        timeout: seconds for them to be back.
        """
        if not timeout > 0:
            raise ConfigError(f"role {self._draft.name!r}: enable_node_group_failover(timeout={timeout!r}) must be more than 0 seconds")
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
