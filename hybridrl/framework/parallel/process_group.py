"""The processes behind `Parallel.runner`: started together, connected, watched until the last one is over, and ended.

A process that fails, whether by an exception or by dying, ends the group at once, or is begun again where retries are
left: after an exception in the same process, after a death in a new one of the same name.

A process of a group that `Parallel.runner` starts: it runs `main` in one thread and takes messages in another.

Nothing happens in `__init__`; `setup` loads the user's function, so that a mistake in its module keeps its type.
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
from hybridrl.framework.parallel.router import current_router
from hybridrl.single_controller.awaiting import gather, introduce

logger = logging.getLogger(__name__)

NAMESPACE = "hybridrl"  # of Ray, in which processes are found by name; worker groups use it too
START_TIMEOUT_S = 300.0  # starting a process and importing the program; minutes mean that a node is not answering
END_TIMEOUT_S = 20.0  # for a process to flush its files; then it is killed
LOOK_S = 60.0  # between two looks at a group in which nothing happens: no wait is without end


@dataclass(frozen=True)
class GroupPlan:
    """What a group is.

    peers: node id -> ids of those it is linked with. attach_to: names of other groups or of their processes.
    """

    name: str
    program: bytes  # cloudpickle of (main, args, kwargs)
    peers: Mapping[int, Sequence[int]]
    labels: frozenset[str] = frozenset()
    attach_to: Sequence[str] = ()
    max_retries: float = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Ray actors

    @property
    def role(self) -> str:
        return f"{self.name}/node"

    def member(self, node_id: int) -> str:
        """Return the name of a process."""
        return f"{self.role}-{node_id}"


class NodeGroup:
    """The running processes of a plan. Leaving its `with` block ends them, whatever they are doing."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self.nodes: dict[int, Any] = {}  # node id -> Ray actor
        self._attached: dict[str, Any] = {}  # name -> Ray actor of another group
        self._retries = dict.fromkeys(plan.peers, 0)

    def run(self) -> list:
        """Call `main` in every process, when all of them are connected, and return what the calls return, by place in
        the plan.

        The first failure that is not retried is raised at once: a process's own exception with its traceback in the
        notes, a death as WorkerLost.
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
            self.nodes[node_id] = _start_process(self.plan.member(node_id), self.plan.options)
        introduce({self.nodes[i]._actor_id.hex(): (self.plan.role, i) for i in node_ids})
        setups = [
            self.nodes[i].setup.remote(
                self.plan.program, i, self.plan.member(i), self.plan.labels, tuple(self._attached)
            )
            for i in node_ids
        ]
        self._values(setups, list(node_ids), "setup")

    def _connect(self, node_id: int) -> None:
        """Link a process with its peers, both ways. Its earlier self, if there was one, is forgotten."""
        node, name = self.nodes[node_id], self.plan.member(node_id)
        peers = {self.plan.member(peer): self.nodes[peer] for peer in self.plan.peers[node_id]} | self._attached
        self._values([_in_inbox(node.connect).remote(peers)], [node_id], "connect")
        for peer in peers.values():
            with contextlib.suppress(WorkerLost):  # it is told where its `main` is waited for
                self._values([_in_inbox(peer.connect).remote({name: node})], [node_id], "connect")

    def _call_main(self, node_id: int) -> Any:
        return self.nodes[node_id].run.remote(self._retries[node_id])

    def _recover(self, node_id: int, error: Exception) -> None:
        """Make a process ready for another call of `main`; where there are no retries left, raise."""
        remote = getattr(error, "remote_traceback", None)
        error.add_note(f"raised in {self.plan.member(node_id)}" + (f":\n{remote}" if remote else ""))
        if self._retries[node_id] >= self.plan.max_retries:
            raise error
        self._retries[node_id] += 1
        logger.warning(
            "%s failed with %r and is begun again, retry %d", self.plan.member(node_id), error, self._retries[node_id]
        )
        if isinstance(error, WorkerLost):
            _kill({self.plan.member(node_id): self.nodes[node_id]})  # so that its name is free again
            self._start([node_id])
        self._connect(node_id)

    def _values(self, references: list, node_ids: list[int], method: str) -> list:
        return gather(references, node_ids, role=self.plan.role, method=method, timeout_s=START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            _let_exit(list(self.nodes.values()))
        _kill({self.plan.member(node_id): node for node_id, node in self.nodes.items()})


def _in_inbox(method: Any) -> Any:
    """For what must be taken while `main` runs."""
    return method.options(concurrency_group=INBOX)


def _next_ready(references: list) -> list:
    import ray

    return ray.wait(references, num_returns=1, timeout=LOOK_S, fetch_local=False)[0]


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
        return ray.remote(**chosen)(Node).options(name=name, namespace=NAMESPACE).remote()
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise PlacementError(
            f"a process called {name!r} is running on this cluster already; choose another name="
        ) from None


def _find_members(targets: Sequence[str]) -> dict[str, Any]:
    """Return the running processes of these groups, or of these names. Raises PlacementError when one is not there."""
    import ray

    names = (
        [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
        if targets
        else []
    )
    found = {}
    for target in targets:
        members = [name for name in names if name == target or name.startswith(f"{target}/node-")]
        if not members:
            groups = sorted({name.rpartition("/node-")[0] for name in names if "/node-" in name})
            raise PlacementError(
                f"attach_to={target!r} is not running on this cluster; there are {', '.join(groups) or 'no groups'}"
            )
        found |= {name: ray.get_actor(name, namespace=NAMESPACE) for name in members}
    return found


def _let_exit(nodes: list) -> None:
    """Let processes that have nothing more to do end by themselves, with what they registered for their exit."""
    import ray

    ray.wait(
        [node.__ray_terminate__.remote() for node in nodes],
        num_returns=len(nodes),
        timeout=END_TIMEOUT_S,
        fetch_local=False,
    )


def _kill(nodes: Mapping[str, Any]) -> None:
    """End processes whatever they are doing; none of their names is left when this returns."""
    import ray

    for node in nodes.values():
        ray.kill(node, no_restart=True)
    deadline = time.monotonic() + END_TIMEOUT_S
    for name in nodes:
        while _is_running(name):
            if time.monotonic() > deadline:
                raise CallTimeout(
                    f"{name} was killed and is still there after {END_TIMEOUT_S:g} s; is its node reachable?"
                )
            time.sleep(0.01)


def _is_running(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


INBOX = "inbox"  # Ray's group of one thread for what must be taken while `main` runs


class Node:
    """The other end of `node_group.py`, which calls everything here but `deliver`: that is for the peers."""

    def setup(self, program: bytes, node_id: int, name: str, labels: Iterable[str], attached_to: Iterable[str]) -> int:
        """Load `program`, cloudpickle of (main, args, kwargs), and begin to take messages. Returns the process id."""
        current_router().activate(node_id, name=name, labels=labels, attached_to=attached_to)
        self._program = program
        cloudpickle.loads(program)  # a failing import shows here, and slow ones are over before anybody's `main` begins
        return os.getpid()

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Send to these peers too. peers: name -> Ray actor of this class."""
        for name, peer in peers.items():
            current_router().connect(name, peer.deliver.options(concurrency_group=INBOX).remote)

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Take a message from a peer."""
        current_router().deliver(stream, number, message)

    def run(self, retries: int) -> Any:
        """Call `main`, with arguments that no earlier call has touched, and return what it returns."""
        main, args, kwargs = cloudpickle.loads(self._program)
        router = current_router()
        router.begin(retries)
        try:
            result = _call(main, args, kwargs)
        except BaseException as error:
            try:
                router.end()
            except BaseException as earlier:  # the cause, more often than not
                if earlier is not error:
                    error.add_note(f"a listener had failed before: {earlier!r}")
            raise
        router.end()
        return result


def _call(main: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    try:
        return main(*args, **kwargs)
    except SystemExit as error:  # which Ray would take for the end of the process
        if error.code in (None, 0):
            return None
        raise RuntimeError(f"main called sys.exit({error.code!r})") from error
