"""`RoleBuilder`: the methods that describe one role of a job.

`DLJobBuilder` (`builder.py`) inherits them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entrypoint import parse_entry
from hybridrl.master.plan.role_pools import RoleRequest
from hybridrl.master.plan.spec import MAX_RESTART, RESTART_TIMEOUT_S, RESTARTS, TRAINER, Resource, check_max_restart
from hybridrl.master.plan.without_effect import log_without_effect

# Names that DLRover's resource() also accepts.
RESOURCE_ALIASES = {"mem": "memory", "gpu": "accelerator", "acc": "accelerator"}
# With "true", Ray leaves the devices that a process sees as they are.
NO_VISIBILITY_VARIABLES = tuple(
    f"RAY_EXPERIMENTAL_NOSET_{name}"
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
)


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

    def _without_entry(self, method: str) -> Self:
        """Return the builder of the role whose entry `method` sets."""
        raise NotImplementedError

    def run(self, entry: Any, class_name: str | None = None) -> Self:
        """Set what the role's processes run.

        Args:
            entry: A class, 'module:Class', 'module.Class', 'file.py:Class', or a module with `class_name`: workers,
                whose methods the trainer calls. A function, by the same names, or a program with its arguments,
                'train.py --lr 0.1': executed once in each process, as by torchrun.
            class_name: Name of the class in the module `entry`.
        """
        return self._without_entry("run")._set_entry(entry, class_name, backend="simple")

    def train(self, entry: Any, class_name: str | None = None) -> Self:
        """Do the same as `run`.

        On a job without a role that waits for its entry, add the role `elastic`.
        """
        return self._without_entry("train")._set_entry(entry, class_name, backend="elastic")

    def _set_entry(self, entry: Any, class_name: str | None, *, backend: str) -> Self:
        request = self._request("run")
        request.entry, request.backend = parse_entry(request.name, entry, class_name), backend
        return self._bound("run")

    # -- how many processes

    def total(self, num: int = 1) -> Self:
        """Set the number of processes.

        Without this call, and without `nnodes`, one node is full.
        """
        return self._set_count("total", num, method="total")

    def per_node(self, num: int = 1) -> Self:
        """Set the number of processes per node, which are on one machine.

        The last node has the remainder.
        """
        return self._set_count("per_node", num, method="per_node")

    def per_group(self, num: int = 1) -> Self:
        """Do the same as `per_node`."""
        return self._set_count("per_node", num, method="per_group")

    def nproc_per_node(self, num: int) -> Self:
        """Do the same as `per_node`. With `nnodes`, in any order, the total is their product."""
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
        self, cpu: float | None = None, memory: int | None = None, accelerator: float | None = None, **more: Any
    ) -> Self:
        """Set the resources of each process.

        Without this call or its arguments, a process gets one device and one core. With them, no device, unless it is
        requested or the role shares devices.

        Args:
            cpu: Cores.
            memory: MB of 2**20 bytes.
            accelerator: Devices, or a fraction of one.
            more: Ray's custom resources by name. DLRover's names: mem, gpu, acc, ud_resource, user_defined.
        """
        request = self._request("resource")
        amounts = {"cpu": cpu, "memory": memory, "accelerator": accelerator}
        for alias, name in RESOURCE_ALIASES.items():
            if alias in more:
                amounts[name] = more.pop(alias)
        if more.pop("disk", 0):
            log_without_effect("resource(disk=...)", role=request.name)
        custom = {**more.pop("ud_resource", {}), **more.pop("user_defined", {}), **more}
        memory = None if amounts["memory"] is None else int(amounts["memory"])
        given = custom or any(amount is not None for amount in amounts.values())
        request.resource = Resource(amounts["cpu"], memory, amounts["accelerator"], custom) if given else None
        return self._bound("resource")

    def env(self, env: Mapping[str, str] | None) -> Self:
        """Add environment variables of the role's processes. They override `global_env`."""
        self._request("env").env.update(env or {})
        return self._bound("env")

    def disable_ray_auto_visible_device(self) -> Self:
        """Let each process see all devices that the role's processes have on its node, ordered by local rank.

        A program takes its own with `torch.cuda.set_device(LOCAL_RANK)`.
        """
        request = self._request("disable_ray_auto_visible_device")
        request.env |= dict.fromkeys(NO_VISIBILITY_VARIABLES, "true")
        request.sees_node_devices = True
        return self._bound("disable_ray_auto_visible_device")

    def enable_ray_auto_visible_device(self) -> Self:
        """Let each process see its own devices only. The default."""
        request = self._request("enable_ray_auto_visible_device")
        request.env |= dict.fromkeys(NO_VISIBILITY_VARIABLES, "false")
        request.sees_node_devices = False
        return self._bound("enable_ray_auto_visible_device")

    def sub_stage(self, sub_stage: Sequence[Any] | None = None) -> Self:
        """Accept DLRover's stages of a role, which have no effect."""
        request = self._request("sub_stage")
        request.without_effect["sub_stage"] = list(sub_stage or ())
        if sub_stage:
            log_without_effect("sub_stage()", role=request.name)
        return self._bound("sub_stage")

    # -- what happens when a process is lost

    def max_restart(self, num: int = MAX_RESTART) -> Self:
        """Set how many losses the role survives.

        Ten reported steps without a loss reset the count.
        """
        request = self._request("max_restart")
        check_max_restart(request.name, num)
        request.max_restart = num
        return self._bound("max_restart")

    def restart(self, together: str = "role") -> Self:
        """Set which processes are restarted with a lost one.

        Args:
            together: "role": all of the role, because its processes communicate; "node": those on its node; "process":
                none; "downstream": all of the role and of the roles downstream of it.
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

    # -- what ends the job

    def not_driver(self) -> Self:
        """Let the job end without waiting for what the role runs."""
        self._request("not_driver").is_driver = False
        return self._bound("not_driver")

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
