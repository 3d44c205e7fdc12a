"""The processes of `Parallel.runner`: start, connect, await and kill them.

`MemberGroup` runs in the process that called the runner. `GroupMember` is the Ray actor in each process. It runs `main`
in one thread and receives messages in another. A process that raises or dies ends the group at once. Where retries are
left it restarts instead: after an exception in the same process, after a death in a new one of the same name.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridrl.errors import CallTimeout, PlacementError, WorkerLost
from hybridrl.framework.parallel.inbox import Message
from hybridrl.framework.parallel.router import peer_router
from hybridrl.single_controller.awaiting import register_actors, wait_all
from hybridrl.single_controller.monitoring.process_state import PROCESS

logger = logging.getLogger(__name__)

NAMESPACE = "hybridrl"  # Ray namespace of the processes' names; worker groups use it too
INBOX = "inbox"  # Ray concurrency group of one thread, for methods that run while `main` does
START_TIMEOUT_S = 300.0  # to start a process and import the program; more means that a node does not answer
EXIT_TIMEOUT_S = 20.0  # to flush files at exit before the kill, and again for the kill to take effect
POLL_PERIOD_S = 60.0  # longest single wait for a result


@dataclass(frozen=True)
class GroupPlan:
    """The processes of a group and their connections.

    Attributes:
        name: Name of the group.
        program: cloudpickle of (main, args, kwargs).
        peers: Node id -> ids of the processes to which it is linked.
        attach_to: Names of other groups, or of single processes of them.
        options: Options of the Ray actors.
    """

    name: str
    program: bytes  # cloudpickle of (main, args, kwargs)
    peers: Mapping[int, Sequence[int]]
    labels: frozenset[str] = frozenset()
    attach_to: Sequence[str] = ()
    max_retries: float = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the Ray actors

    @property
    def role(self) -> str:
        return f"{self.name}/node"

    def member_name(self, node_id: int) -> str:
        """Return the name of a process."""
        return f"{self.role}-{node_id}"


class MemberGroup:
    """The running processes of a plan; leaving its `with` block kills them."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self.members: dict[int, Any] = {}  # node id -> Ray actor
        self._attached: dict[str, Any] = {}  # name -> Ray actor of another group
        self._retries = dict.fromkeys(plan.peers, 0)

    def run(self) -> list:
        """Call `main` in every process and return the results, in the order of the plan.

        `main` starts when all processes are connected. The first failure that is not retried is raised at once.

        Raises:
            WorkerLost: A process died. An exception of `main` keeps its type and has its traceback in the notes.
        """
        self._attached = _find_members(self.plan.attach_to)
        self._start(self.plan.peers)
        for node_id in self.plan.peers:
            self._connect(node_id)
        running = {self._call_main(node_id): node_id for node_id in self.plan.peers}
        results: dict[int, Any] = {}
        while running:
            for reference in _next_ready(list(running)):
                node_id = running.pop(reference)
                try:
                    [results[node_id]] = self._values([reference], [node_id], "main")
                except Exception as error:
                    self._recover(node_id, error)
                    running[self._call_main(node_id)] = node_id
        return [results[node_id] for node_id in self.plan.peers]

    def _start(self, node_ids: Iterable[int]) -> None:
        for node_id in node_ids:
            self.members[node_id] = _start_process(self.plan.member_name(node_id), self.plan.options)
        register_actors({self.members[i]._actor_id.hex(): (self.plan.role, i) for i in node_ids})
        setups = [
            self.members[i].setup.remote(
                self.plan.program, i, self.plan.member_name(i), self.plan.labels, tuple(self._attached)
            )
            for i in node_ids
        ]
        self._values(setups, list(node_ids), "setup")

    def _connect(self, node_id: int) -> None:
        """Link a process with its peers in both directions.

        A previous process of its name is replaced.
        """
        member, name = self.members[node_id], self.plan.member_name(node_id)
        peers = {self.plan.member_name(peer): self.members[peer] for peer in self.plan.peers[node_id]} | self._attached
        self._values([_on_inbox_thread(member.connect).remote(peers)], [node_id], "connect")
        for peer in peers.values():
            with contextlib.suppress(WorkerLost):  # reported by the wait for its `main`
                self._values([_on_inbox_thread(peer.connect).remote({name: member})], [node_id], "connect")

    def _call_main(self, node_id: int) -> Any:
        return self.members[node_id].run.remote(self._retries[node_id])

    def _recover(self, node_id: int, error: Exception) -> None:
        """Prepare a process for another call of `main`; raise if no retries are left."""
        remote = getattr(error, "remote_traceback", None)
        error.add_note(f"raised in {self.plan.member_name(node_id)}" + (f":\n{remote}" if remote else ""))
        if self._retries[node_id] >= self.plan.max_retries:
            raise error
        self._retries[node_id] += 1
        logger.warning(
            "%s failed with %r; restarting it, retry %d",
            self.plan.member_name(node_id),
            error,
            self._retries[node_id],
        )
        if isinstance(error, WorkerLost):
            _kill({self.plan.member_name(node_id): self.members[node_id]})  # frees its name
            self._start([node_id])
        self._connect(node_id)

    def _values(self, references: list, node_ids: list[int], method: str) -> list:
        return wait_all(references, node_ids, role=self.plan.role, method=method, timeout_s=START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            _allow_exit(list(self.members.values()))
        _kill({self.plan.member_name(node_id): node for node_id, node in self.members.items()})
        PROCESS.forget_actors([node._actor_id.hex() for node in self.members.values()])


def _on_inbox_thread(method: Any) -> Any:
    """Return the remote method bound to the inbox thread, so that it runs while `main` does."""
    return method.options(concurrency_group=INBOX)


def _next_ready(references: list) -> list:
    import ray

    return ray.wait(references, num_returns=1, timeout=POLL_PERIOD_S, fetch_local=False)[0]


def _start_process(name: str, options: Mapping[str, Any]) -> Any:
    import ray

    chosen = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": "SPREAD",
        "concurrency_groups": {INBOX: 1},
        **options,
    }
    try:
        return ray.remote(**chosen)(GroupMember).options(name=name, namespace=NAMESPACE).remote()
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise PlacementError(
            f"name={name!r}: a process of this name runs on this cluster already; choose another name="
        ) from None


def _find_members(targets: Sequence[str]) -> dict[str, Any]:
    """Return the running processes of these groups, or of these names.

    Raises:
        PlacementError: One of them is not running.
    """
    import ray

    names = (
        [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
        if targets
        else []
    )
    found: dict[str, Any] = {}
    for target in targets:
        members = [name for name in names if name == target or name.startswith(f"{target}/node-")]
        if not members:
            groups = sorted({name.rpartition("/node-")[0] for name in names if "/node-" in name})
            raise PlacementError(
                f"attach_to={target!r} is not running on this cluster; there are {', '.join(groups) or 'no groups'}"
            )
        found |= {name: ray.get_actor(name, namespace=NAMESPACE) for name in members}
    return found


def _allow_exit(members: list) -> None:
    """Let idle processes exit by themselves, so that their exit handlers run."""
    import ray

    ray.wait(
        [member.__ray_terminate__.remote() for member in members],
        num_returns=len(members),
        timeout=EXIT_TIMEOUT_S,
        fetch_local=False,
    )


def _kill(members: Mapping[str, Any]) -> None:
    """Kill processes and return when all their names are free again.

    Raises:
        CallTimeout: A process is still registered after `EXIT_TIMEOUT_S`.
    """
    import ray

    for member in members.values():
        ray.kill(member, no_restart=True)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for name in members:
        while _is_running(name):
            if time.monotonic() > deadline:
                raise CallTimeout(
                    f"{name} was killed and is still registered after {EXIT_TIMEOUT_S:g} s; is its node reachable?"
                )
            time.sleep(0.01)


def _is_running(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


# -- the actor in each process


class GroupMember:
    """Ray actor in each process of a group.

    `MemberGroup` calls all methods but `deliver`, which the peers call. The constructor does nothing; `setup` loads the
    user's function, so that an error in the user's module keeps its type.
    """

    def setup(self, program: bytes, node_id: int, name: str, labels: Iterable[str], attached_to: Iterable[str]) -> int:
        """Load `program` and start to accept messages; return the process id.

        Args:
            program: cloudpickle of (main, args, kwargs).
            node_id: Number of the process in its group.
            name: Name of the process.
            labels: Labels of the group.
            attached_to: Names of the attached processes.
        """
        peer_router().activate(node_id, name=name, labels=labels, attached_to=attached_to)
        self._program = program
        cloudpickle.loads(program)  # raises import errors here, and completes slow imports before any `main` starts
        return os.getpid()

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Add peers, given as name -> Ray actor of this class."""
        for name, peer in peers.items():
            peer_router().connect(name, peer.deliver.options(concurrency_group=INBOX).remote)

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Accept a message from a peer."""
        peer_router().deliver(stream, number, message)

    def run(self, retries: int) -> Any:
        """Call `main` with fresh copies of its arguments and return the result."""
        main, args, kwargs = cloudpickle.loads(self._program)
        router = peer_router()
        router.start_run(retries)
        try:
            result = _call(main, args, kwargs)
        except BaseException as error:
            try:
                router.finish_run()
            except BaseException as previous:  # probably the cause
                if previous is not error:
                    error.add_note(f"a listener failed before: {previous!r}")
            raise
        router.finish_run()
        return result


def _call(main: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    try:
        return main(*args, **kwargs)
    except SystemExit as error:  # Ray would end the process
        if error.code in (None, 0):
            return None
        raise RuntimeError(f"main called sys.exit({error.code!r})") from error
