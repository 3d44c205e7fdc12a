"""`WorkerHost`: the one Ray actor class of this library. A process that holds the workers of one or several roles.

It is made empty, so that making it cannot fail for a user's reason; `setup` then gives it its place and constructs the
workers. What goes wrong there, an import that is missing on this node included, reaches the caller with its own type
and not as a dead process.

Which accelerators a worker process may see. Ray reserves them; this file makes the process agree with what was
reserved.

Ray writes the reserved devices into the visibility variable of the accelerator's maker, unless it is told not to
(RAY_EXPERIMENTAL_NOSET_*, as clusters do whose containers renumber devices). Then the process would see every device of
its node and all ranks would take the first one, so the variable is written here. Groups with fractions of one device
see that same device.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle

from hybridrl.errors import PlacementError
from hybridrl.single_controller.cluster import slot_of
from hybridrl.single_controller.invocation import invocations_of
from hybridrl.single_controller.monitoring.heartbeat_client import MASTER_VARIABLE, Heartbeats
from hybridrl.single_controller.monitoring.tracing import DIRECTORY_VARIABLE, call_span, start_recording
from hybridrl.single_controller.references import finish, materialize
from hybridrl.single_controller.worker import Worker, WorkerPlace
from hybridrl.single_controller.worker_group import free_port

CONCURRENT = "concurrent"  # Ray's group of threads for methods that run beside the others
MOST_ENDED = 50  # calls whose seconds one heartbeat tells


class WorkerHost:
    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.place: WorkerPlace  # from `setup` on
        self.takes_futures: set[tuple[str, str]] = set()
        self.busy_s: dict[str, float] = {}
        self.running: dict[
            int, tuple[str, float]
        ] = {}  # calls in progress: `role.method` and when it began, oldest first
        self.call_numbers = itertools.count(1)
        self.num_calls = 0  # begun so far
        self.did: str | None = None  # the call that ended last
        self.turns: dict[str, int] = {}  # calls of each `role.method` begun so far
        self.ended: deque[tuple[str, float]] = deque(
            maxlen=MOST_ENDED
        )  # calls that no heartbeat has told yet, with their seconds
        self.life = 1  # of the driver that may call
        self.ready: set[str] = set()  # roles

    def rendezvous(self) -> tuple[str, int]:
        """Return an address of this node and a free port, where rank 0 of a group may listen."""
        return _node_address(), free_port()

    def setup(self, recipes: bytes, place: WorkerPlace, environment: Mapping[str, str]) -> int:
        """Enter the group and construct this process's workers, in the order of the recipes. Returns the process id.

        recipes: cloudpickle of {role: recipe}, as bytes, so that the environment is complete before any of the user's
        modules is imported and a failing import is an error of this method.
        """
        os.environ.update({**environment, **place.environment(), **visible_devices(_reserved_devices(), os.environ)})
        if master := os.environ.get(MASTER_VARIABLE):
            self._report_to(master, place)
        role = "worker"
        try:
            for role, recipe in cloudpickle.loads(recipes).items():
                self.workers[role] = recipe()
        except Exception as error:
            error.add_note(_address(role, place.rank, "setup"))
            raise
        self.place = place
        if directory := os.environ.get(DIRECTORY_VARIABLE):
            start_recording(directory, f"{'+'.join(self.workers)}-{place.rank}")
        for role, worker in self.workers.items():
            if isinstance(worker, Worker):
                worker.fused_worker_dict = self.workers
            self.takes_futures |= {
                (role, name) for name, call in invocations_of(type(worker)).items() if not call.materialize_futures
            }
        return os.getpid()

    def _report_to(self, master: str, place: WorkerPlace) -> None:
        import ray

        context = ray.get_runtime_context()
        name, actor = context.get_actor_name() or "worker", context.get_actor_id()
        introduction = {
            "slot": slot_of(name),
            "name": name,
            "actor": actor,
            "rank": place.rank,
            "group_size": place.world_size,
        }
        self.heartbeats = Heartbeats(master, introduction, self.progress)

    def progress(self) -> dict[str, Any]:
        """Return what this process does: the call that began first among those in progress, and its seconds; asked from
        a thread.

        did: the call that ended last. turn: which one it is of its method, that in progress or the last one.
        ended: `role.method` -> seconds of its calls that have ended since this was asked before.
        """
        doing, start = next(iter(list(self.running.values())), (None, 0.0))
        ended: dict[str, list[float]] = {}
        for method, seconds in [self.ended.popleft() for _ in range(len(self.ended))]:
            ended.setdefault(method, []).append(round(seconds, 4))
        for_s = round(time.perf_counter() - start, 3) if doing else 0.0
        turn = self.turns.get(doing or self.did or "", 0)
        return {"doing": doing, "for_s": for_s, "calls": self.num_calls, "did": self.did, "turn": turn, "ended": ended}

    def describe(self) -> dict[str, Any]:
        """Return what a driver needs to attach to this process: the roles with their classes (cloudpickle), its place,
        its id, its node.

        ready: the roles that were marked so. turns: calls of each `role.method` begun so far. Raises PlacementError
        before `setup`.
        """
        if not hasattr(self, "place"):
            raise PlacementError("a process was started, and its driver was lost before it was set up")
        classes = cloudpickle.dumps({role: type(worker) for role, worker in self.workers.items()})
        known = {"classes": classes, "place": self.place, "process_id": os.getpid(), "node": _node()}
        return known | {"life": self.life, "ready": sorted(self.ready), "turns": dict(self.turns)}

    def mark_ready(self, role: str) -> None:
        """Note that this role's worker has all that it is called with."""
        self.ready.add(role)

    def obey(self, life: int) -> None:
        """From now on do what this life of the driver says; what an earlier one said and nobody has
        begun is refused.
        """
        self.life = max(self.life, life)

    def call(self, life: int, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of one role's worker. References and futures among the arguments arrive as their values.

        life: of the driver who calls.
        """
        if life < self.life:
            raise PlacementError(
                f"{role}-{self.place.rank}: {method}() was called by a driver that has been replaced meanwhile"
            )
        start = time.perf_counter()
        number = self.num_calls = next(self.call_numbers)
        name = f"{role}.{method}"
        self.running[number] = (name, start)
        self.turns[name] = self.turns.get(name, 0) + 1
        try:
            with call_span(role, self.place.rank, method):
                if (role, method) not in self.takes_futures:
                    args, kwargs = materialize(args, kwargs)
                return finish(getattr(self.workers[role], method)(*args, **kwargs))
        except Exception as error:
            error.add_note(_address(role, self.place.rank, method))
            raise
        finally:
            self.running.pop(number, None)
            seconds = time.perf_counter() - start
            self.busy_s[name] = self.busy_s.get(name, 0.0) + seconds
            self.ended.append((name, seconds))
            self.did = name

    def call_sized(self, life: int, role: str, method: str, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """Return the answer and its number of rows, as two objects: who needs a part of several answers asks for the
        numbers first.
        """
        value = self.call(life, role, method, *args, **kwargs)
        return value, len(value) if hasattr(value, "__len__") else None

    def ping(self) -> None:
        """Return when everything submitted before is done: a call that waits here fails the moment the process dies."""

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds spent inside each `role.method` so far: what is left of a step's time is
        the controller's.
        """
        return self.busy_s


def _address(role: str, rank: int, method: str) -> str:
    """A note for an exception, written where it happens because it may surface anywhere: a failed answer may be an
    argument next.
    """
    return f"raised in {role}-{rank}, {method}()"


def _reserved_devices() -> dict[str, list[str]]:
    import ray

    return ray.get_runtime_context().get_accelerator_ids()


def _node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _node_address() -> str:
    """The address at which Ray's own processes on other nodes find those of this one, so that other workers do."""
    import ray

    return ray.util.get_node_ip_address()


# Ray's name of a resource -> the variables that hide its other devices from a process.
VISIBILITY_VARIABLES = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "HPU": ("HABANA_VISIBLE_MODULES",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
    "TPU": ("TPU_VISIBLE_CHIPS",),
}


def visible_devices(reserved: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in a worker process, from the device ids that Ray reserved for it.

    reserved: resource name -> ids, as Ray's runtime context reports them. environment: the process's own. A worker
    without devices gets nothing: what hides devices from it is already set or not wanted.
    """
    wanted: dict[str, str] = {}
    for resource, ids in reserved.items():
        for variable in VISIBILITY_VARIABLES.get(resource, ()) if ids else ():
            if environment.get(f"RAY_EXPERIMENTAL_NOSET_{variable}", "").lower() in ("1", "true"):
                wanted[variable] = ",".join(map(str, ids))
    return wanted
