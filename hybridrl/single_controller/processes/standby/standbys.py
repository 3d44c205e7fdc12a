"""`Standbys`: the standby processes of a run, and the options of a Ray actor that one of them starts.

    standbys = Standbys("run", detached=False)
    standbys.start_missing(processes)          # after a step; returns at once
    options = standbys.options(node, options)  # before a lost worker is started again on that node

A standby process (`process.py`) belongs to a node and to a set of environment variables, which take effect when modules
are imported. A small Ray actor on the node starts it, and the kernel ends it with that actor. It needs no device and
reserves nothing. Workers that it started are ordinary Ray workers, and outlive it.

Used in the driver, by `WorkerProcesses` and the trainer. While a standby process imports, is frozen or is lost, Ray
starts workers as usual.
"""

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.errors import CallTimeout
from hybridrl.single_controller.cluster import NAMESPACE, actor_names, get_value
from hybridrl.single_controller.processes.standby import request
from hybridrl.single_controller.processes.termination import kill_actors, kill_named, kill_processes

logger = logging.getLogger(__name__)
NAME = "standby"  # of the actors
MAX_STARTS = 3  # of a standby process; what ends as often is not started again
ANSWER_TIMEOUT_S = 10.0  # for an answer that is there
QUEUED_REQUESTS = 128  # as many workers may start at once on a node
# Settings of a runtime environment that start a worker in another Python, or in another way.
OTHER_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys")
Variables = frozenset[tuple[str, str]]


class Processes(Protocol):
    """What a standby process requires of `WorkerProcesses`.

    Attributes:
        hosts, nodes: By rank.
        actor_options: Options of the Ray actors; None if another driver started them.
    """

    hosts: list[Any]
    nodes: list[str]

    @property
    def actor_options(self) -> Mapping[str, Any] | None:
        """See the attribute."""


@dataclass
class Standby:
    """One standby process.

    Attributes:
        actor: The Ray actor that holds it.
        ready: Reference to its address and the ids of actor and process.
        ended: Reference that is ready, or lost, when the standby process has ended.
    """

    actor: Any
    ready: Any
    ended: Any


class Standbys:
    """The standby processes of one run.

    Args:
        run: Name of the run on the cluster.
        detached: Whether they outlive this driver, as the run's workers do.
    """

    def __init__(self, run: str, *, detached: bool) -> None:
        self._run, self._detached = run, detached
        kill_named(actor_names(f"{run}/{NAME}-"), timeout_s=0.0)  # of a previous driver
        self._standbys: dict[tuple[str, Variables], Standby] = {}
        self._starts: dict[tuple[str, Variables], int] = {}
        self._refused: set[str] = set()

    def start_missing(self, processes: Iterable[Processes]) -> None:
        """Start a standby process on every node of these workers that has none; return at once.

        It imports what the workers of its node have imported by then, so call it when they have worked.
        """
        for key, hosts in _hosts_by_key(processes).items():
            standby = self._standbys.get(key)
            if standby is not None and not _is_done(standby.ended):
                continue
            if self._starts.get(key, 0) < MAX_STARTS:
                self._starts[key] = self._starts.get(key, 0) + 1
                self._standbys[key] = self._start(key, hosts)

    def _start(self, key: tuple[str, Variables], hosts: Sequence[Any]) -> Standby:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, variables = key
        options: dict[str, Any] = {
            "name": f"{self._run}/{NAME}-{uuid.uuid4().hex[:8]}",
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        options |= {"lifetime": "detached"} if self._detached else {}
        options |= {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        actor: Any = ray.remote(StandbyActor).options(**options).remote()
        ready = actor.start.remote(*(host.loaded_modules.remote() for host in hosts))
        return Standby(actor, ready, actor.wait.remote(ready))

    def options(self, node: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return an actor's options, so that a standby process of this node starts it if one is ready."""
        standby = self._standbys.get((node, _variables(options)))
        address = None if standby is None or not _can_fork(options) else self._address(standby)
        if address is None:
            return dict(options)
        command = shlex.join([sys.executable, "-I", "-S", request.__file__, address, sys.executable])
        return {**options, "runtime_env": {**options.get("runtime_env", {}), "py_executable": command}}

    def _address(self, standby: Standby) -> str | None:
        """Return the address of a standby process; None while it is not ready, and if it has ended."""
        import ray

        if not _is_done(standby.ready) or _is_done(standby.ended):
            return None
        try:
            address, _ = _value(standby.ready)
            return str(address)
        except (ray.exceptions.RayError, CallTimeout) as error:
            self._log_refusal(str(getattr(error, "cause", error)))
            return None

    def _log_refusal(self, reason: str) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("a standby process cannot be used (%s); workers start without it", reason)

    def process_ids(self) -> list[int]:
        """Return the ids of the standby processes that are ready."""
        ready = [one.ready for one in self._standbys.values() if _is_done(one.ready) and not _is_done(one.ended)]
        return [_value(answer)[1][-1] for answer in ready]

    def stop(self) -> None:
        """End all standby processes, also if their actors are frozen. Workers that they started stay."""
        import ray

        for (node, _), standby in self._standbys.items():
            kill_actors([standby.actor])
            if _is_done(standby.ready):
                try:
                    _, (actor_id, _) = _value(standby.ready)
                    kill_processes([(node, actor_id)])
                except (ray.exceptions.RayError, CallTimeout):
                    continue  # it never started
        self._standbys.clear()


class StandbyActor:
    """The Ray actor that holds a node's standby process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, *modules: Sequence[str]) -> tuple[str, tuple[int, int]]:
        """Start the standby process, and wait until it has imported these modules.

        Returns:
            Its address, and the process ids of this actor and of the standby process.

        Raises:
            RuntimeError: A fork of it would not work; says why.
        """
        address = f"hybridrl-standby-{uuid.uuid4().hex}"
        wanted = {"modules": list(dict.fromkeys(name for names in modules for name in names)), "path": sys.path}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request.abstract(address))
            listener.listen(QUEUED_REQUESTS)
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.process", str(listener.fileno()), str(os.getpid())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin:
            json.dump(wanted, stdin)
        answer = json.loads(self._process.stdout.readline() or '{"refused": "it ended while it imported"}')
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        return address, (os.getpid(), self._process.pid)

    def wait(self, _ready: Any) -> None:
        """Return when the standby process has ended. The argument is the result of `start`, which has to be there."""
        assert self._process is not None
        self._process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of the standby process: this one's, with the import path of a worker."""
    # Libraries that are imported with one thread start none; `init_worker_process` sets a worker's threads later.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _hosts_by_key(processes: Iterable[Processes]) -> dict[tuple[str, Variables], list[Any]]:
    """Return, per node and environment variables, the first host of each group of processes."""
    found: dict[tuple[str, Variables], dict[int, Any]] = {}
    for group in processes:
        if group.actor_options is None or not _can_fork(group.actor_options):
            continue
        variables = _variables(group.actor_options)
        for node, host in zip(group.nodes, group.hosts, strict=True):
            found.setdefault((node, variables), {}).setdefault(id(group), host)
    return {key: list(hosts.values()) for key, hosts in found.items()}


def _can_fork(options: Mapping[str, Any]) -> bool:
    # Ray sets OMP_NUM_THREADS to the whole CPUs of an actor, and libraries read it when they are imported.
    return options.get("num_cpus", 0) < 2 and not any(name in options.get("runtime_env", {}) for name in OTHER_PYTHON)


def _variables(options: Mapping[str, Any]) -> Variables:
    return frozenset(options.get("runtime_env", {}).get("env_vars", {}).items())


def _value(ready: Any) -> tuple[str, tuple[int, int]]:
    """Return what a standby process answered that is ready."""
    answer: tuple[str, tuple[int, int]] = get_value(
        ready, what="the address of a standby process", timeout_s=ANSWER_TIMEOUT_S
    )
    return answer


def _is_done(reference: Any) -> bool:
    import ray

    done, _ = ray.wait([reference], timeout=0, fetch_local=False)
    return bool(done)
