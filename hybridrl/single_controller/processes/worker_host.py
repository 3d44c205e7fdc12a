"""`WorkerHost`: the Ray actor class of worker processes.

One process has the workers of one or several roles.

The actor is created empty, so that its creation cannot fail because of user code. `setup` then gives it a rank and
constructs the workers. An error there, such as a missing import on this node, reaches the caller with its own type
instead of as a dead process.

`setup` also makes the visible devices agree with what Ray reserved. Ray normally sets the visibility variable of the
accelerator (`CUDA_VISIBLE_DEVICES`) itself. With RAY_EXPERIMENTAL_NOSET_*, used on clusters whose containers renumber
devices, it does not. The process would then see every device of its node, and all ranks would use the first one.
Groups with fractions of one device see that same device. On request (`ResourcePool.sees_node_devices`), a process sees
the devices of all processes of its group on its node.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from hybridrl.errors import PlacementError
from hybridrl.single_controller.call_cycles import Awaited, Blocker, CallInProgress, executing
from hybridrl.single_controller.cluster import LOOPBACK, node_address, slot_from_name
from hybridrl.single_controller.endpoints import find_function
from hybridrl.single_controller.invocation import MAGIC_ATTR, Invocation, endpoints_of
from hybridrl.single_controller.monitoring.heartbeat_client import MASTER_VARIABLE, HeartbeatClient
from hybridrl.single_controller.monitoring.process import PROCESS
from hybridrl.single_controller.monitoring.tracing import DIRECTORY_VARIABLE, call_span, start_recording
from hybridrl.single_controller.processes.array_store import share_arrays
from hybridrl.single_controller.references import materialize, resolve_awaitable
from hybridrl.single_controller.worker import RankInfo, Worker
from hybridrl.system.collector import collect_as_usual, collect_seldom
from hybridrl.system.rendezvous import reserve_address

MAX_REPORTED_CALLS = 50  # per heartbeat


class CallHeader(NamedTuple):
    """What every call carries beside its arguments. It is sent as a list, which Ray serializes faster than a class.

    Attributes:
        fencing_token: of the driver that made the call.
        role, method: what is called: a method of the role's worker, or an endpoint that the process exported.
        concurrency_group: The one that executes the call; None for the thread of all other calls.
    """

    fencing_token: int
    role: str
    method: str
    concurrency_group: str | None = None


class WorkerHost:
    """Executes the calls of a `RayWorkerGroup` in a worker process, and sends heartbeats to the master if there is one.

    Attributes:
        rank_info: set by `setup`.
        endpoints: role -> endpoint -> the worker's attribute and its record.
        busy_s: `role.method` -> seconds spent in it.
        running: calls in progress by number, oldest first.
        num_calls: calls started so far.
        calls_started: `role.method` -> calls started so far.
        last_method: `role.method` of the call that ended last.
        finished_calls: `role.method` and seconds of calls that no heartbeat has reported yet.
        fencing_token: calls with a smaller one are refused.
        ready: roles that were marked ready.
    """

    def __init__(self, concurrency_groups: Sequence[str] = ()) -> None:
        self.concurrency_groups = list(concurrency_groups)
        self.workers: dict[str, Any] = {}
        self.rank_info: RankInfo
        self.endpoints: dict[str, dict[str, tuple[str, Invocation]]] = {}
        self.busy_s: dict[str, float] = {}
        self.running: dict[int, CallInProgress] = {}
        self.call_numbers = itertools.count(1)
        self.num_calls = 0
        self.calls_started: dict[str, int] = {}
        self.last_method: str | None = None
        self.finished_calls: deque[tuple[str, float]] = deque(maxlen=MAX_REPORTED_CALLS)
        self.fencing_token = 1
        self.ready: set[str] = set()
        collect_seldom()  # `setup` and the first call import most libraries

    def rendezvous(self, one_machine: bool = False) -> tuple[str, int]:
        """Return host and port at which rank 0 of a group listens.

        This process holds the port from now on.

        Args:
            one_machine: All ranks are on this machine, so no other one needs to reach the port.
        """
        return reserve_address(LOOPBACK if one_machine else node_address())

    def reserved_devices(self) -> dict[str, list[str]]:
        """Return the ids of the devices that Ray reserved for this process, by Ray's names of their resources."""
        import ray

        return ray.get_runtime_context().get_accelerator_ids()

    def setup(self, recipes: bytes, rank_info: RankInfo, environment: Mapping[str, str]) -> int:
        """Set the environment and construct this process's workers, in the order of the recipes.

        Args:
            recipes: cloudpickle of {role: recipe}. Bytes, so that the environment is complete before any user module is
                imported, and a failing import is an error of this method.

        Returns:
            The process id.
        """
        if rank_info.devices is None:
            devices = visible_devices(self.reserved_devices(), os.environ)
        else:
            devices = device_variables(rank_info.devices)
        os.environ.update({**environment, **rank_info.environment(), **devices})
        if master := os.environ.get(MASTER_VARIABLE):
            self._start_heartbeats(master, rank_info)
        role = "worker"
        try:
            for role, recipe in cloudpickle.loads(recipes).items():
                self.workers[role] = recipe()
        except Exception as error:
            error.add_note(_address(role, rank_info.rank, "setup"))
            raise
        self.rank_info = rank_info
        PROCESS.worker = "+".join(self.workers), rank_info.rank
        share_arrays(*PROCESS.worker)
        if directory := os.environ.get(DIRECTORY_VARIABLE):
            start_recording(directory, f"{'+'.join(self.workers)}-{rank_info.rank}")
        for role, worker in self.workers.items():
            if isinstance(worker, Worker):
                worker.fused_worker_dict = self.workers
            self.endpoints[role] = endpoints_of(type(worker))
        return os.getpid()

    def _start_heartbeats(self, master: str, rank_info: RankInfo) -> None:
        import ray

        context = ray.get_runtime_context()
        name, actor = context.get_actor_name() or "worker", context.get_actor_id()
        hello = {
            "slot": slot_from_name(name),
            "name": name,
            "actor": actor,
            "rank": rank_info.rank,
            "group_size": rank_info.world_size,
        }
        self.heartbeats = HeartbeatClient(master, hello, self.progress)

    def progress(self) -> dict[str, Any]:
        """Return the content of a heartbeat; called from the heartbeat thread.

        Returns:
            doing: `role.method` of the oldest call in progress, or None. elapsed_s: its seconds so far. calls: calls
            started. last_method: `role.method` of the call that ended last. call_number: how many calls of `doing`, or
            else of `last_method`, were started. ended: `role.method` -> seconds of calls that ended since the previous
            heartbeat. work: what the call in progress has done, as `WorkDone`, if it counts.
        """
        oldest = next(iter(list(self.running.values())), None)
        doing = None if oldest is None else f"{oldest.role}.{oldest.method}"
        ended: dict[str, list[float]] = {}
        for method, seconds in [self.finished_calls.popleft() for _ in range(len(self.finished_calls))]:
            ended.setdefault(method, []).append(round(seconds, 4))
        return {
            "doing": doing,
            "elapsed_s": 0.0 if oldest is None else round(time.perf_counter() - oldest.start, 3),
            "calls": self.num_calls,
            "last_method": self.last_method,
            "call_number": self.calls_started.get(doing or self.last_method or "", 0),
            "ended": ended,
            "work": PROCESS.work,
        }

    def describe(self) -> dict[str, Any]:
        """Return what a driver needs to attach to this process.

        Returns:
            classes: cloudpickle of {role: worker class}. The other entries are named as the attributes.

        Raises:
            PlacementError: `setup` did not run.
        """
        import ray

        if not hasattr(self, "rank_info"):
            raise PlacementError("the driver of this process was lost before setting it up")
        classes = cloudpickle.dumps({role: type(worker) for role, worker in self.workers.items()})
        return {
            "classes": classes,
            "rank_info": self.rank_info,
            "process_id": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "fencing_token": self.fencing_token,
            "ready": sorted(self.ready),
            "calls_started": dict(self.calls_started),
            "concurrency_groups": self.concurrency_groups,
        }

    def mark_ready(self, role: str) -> None:
        """Mark a role's worker as fully initialized."""
        self.ready.add(role)

    def accept_driver(self, fencing_token: int) -> None:
        """Accept calls from this driver only; refuse queued calls with a smaller fencing token."""
        self.fencing_token = max(self.fencing_token, fencing_token)

    def call(self, header: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of one role's worker, or an endpoint that this process exported.

        References and futures among the arguments arrive as values.

        Args:
            header: the entries of a `CallHeader`.

        Raises:
            PlacementError: another driver has replaced the caller.
            AttributeError: there is no such method or endpoint; lists those that exist.
        """
        fencing_token, role, method, concurrency_group = CallHeader(*header)
        if fencing_token < self.fencing_token:
            raise PlacementError(
                f"{role}-{self.rank_info.rank}: {method}() was called by a driver that another one has replaced"
            )
        name, call = f"{role}.{method}", CallInProgress(_task(), role, method, self.rank_info.rank, concurrency_group)
        number = self.num_calls = next(self.call_numbers)
        self.running[number] = call
        self.calls_started[name] = self.calls_started.get(name, 0) + 1
        try:
            with call_span(role, self.rank_info.rank, method), executing(call):
                function, invocation = self._find(role, method)
                if invocation is None or invocation.materialize_futures:
                    args, kwargs = materialize(args, kwargs)
                return resolve_awaitable(function(*args, **kwargs))
        except Exception as error:
            error.add_note(_address(role, self.rank_info.rank, method))
            raise
        finally:
            del self.running[number]
            PROCESS.work = None
            collect_as_usual()
            seconds = time.perf_counter() - call.start
            self.busy_s[name] = self.busy_s.get(name, 0.0) + seconds
            self.finished_calls.append((name, seconds))
            self.last_method = name

    def _find(self, role: str, name: str) -> tuple[Callable[..., Any], Invocation | None]:
        """Return the function of an endpoint or method, and the record that it is marked with."""
        attribute, invocation = self.endpoints[role].get(name, (name, None))
        function = find_function(self.workers[role], name, attribute, of=f"{role}-{self.rank_info.rank}")
        return function, getattr(function, MAGIC_ATTR, invocation)

    def blockers(self, role: str, method: str, calls: Sequence[str]) -> list[tuple[Blocker, list[Awaited]]]:
        """Return the calls that have to end before these calls to this process can, with what they wait for.

        Called in the group `CONTROL`.

        Args:
            role, method: what was called; `describe` and its like are called under the label of the processes.
            calls: Ray's ids (hex). A call that is not in progress waits for the thread that its method needs.
        """
        running = {call.call: call for call in list(self.running.values())}
        found = [running[call].as_blocker() for call in calls if call in running]
        if len(found) < len(calls):
            invocation = self._find(role, method)[1] if role in self.workers else None
            if invocation is None or invocation.used_concurrency_group is None:
                worker = f"{role if role in self.workers else '+'.join(self.workers)}-{self.rank_info.rank}"
                own = (call for call in running.values() if call.concurrency_group is None and call.call not in calls)
                found += [call.as_blocker(awaited=f"{worker}.{method}") for call in own]
        return found

    def call_with_num_rows(self, header: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """Run `call` and return its result and number of rows, as two objects.

        A caller that needs only some rows of several results fetches the numbers first.
        """
        value = self.call(header, *args, **kwargs)
        return value, len(value) if hasattr(value, "__len__") else None

    def ping(self) -> None:
        """Return when all earlier calls are done; a pending ping fails as soon as the process dies."""

    def start_times(self) -> dict[str, float]:
        """Return the seconds of the parts of this process's start that it measured itself, and start again at zero."""
        return PROCESS.start_times.drain()

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds spent inside each `role.method` so far; the rest of a step is controller overhead."""
        return self.busy_s


def _address(role: str, rank: int, method: str) -> str:
    # Added to an exception where it is raised: a failed result may be an argument of a later call elsewhere.
    return f"raised in {role}-{rank}, {method}()"


def _task() -> str:
    """Return Ray's id (hex) of the call that this thread executes."""
    import ray

    return ray.get_runtime_context().get_task_id() or ""


# Ray's name of a resource -> the variables that restrict the devices a process sees.
VISIBILITY_VARIABLES = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "HPU": ("HABANA_VISIBLE_MODULES",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
    "TPU": ("TPU_VISIBLE_CHIPS",),
}


def visible_devices(reserved: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the visibility variables to set in a worker process where Ray was told not to.

    A worker without reserved devices gets none.

    Args:
        reserved: resource name -> device ids, from Ray's runtime context.
        environment: of the process.
    """
    variables: dict[str, str] = {}
    for resource, ids in reserved.items():
        for variable in VISIBILITY_VARIABLES.get(resource, ()) if ids else ():
            if environment.get(f"RAY_EXPERIMENTAL_NOSET_{variable}", "").lower() in ("1", "true"):
                variables[variable] = ",".join(map(str, ids))
    return variables


def device_variables(devices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the visibility variables of a process that sees these devices in this order.

    Args:
        devices: resource name -> device ids.
    """
    # ROCR_VISIBLE_DEVICES renumbers the devices that HIP_VISIBLE_DEVICES then counts, so one of them is set.
    return {
        variable: ",".join(map(str, ids))
        for resource, ids in devices.items()
        for variable in VISIBILITY_VARIABLES.get(resource, ())
        if ids and variable != "ROCR_VISIBLE_DEVICES"
    }
