"""The processes of `Parallel.runner`: start, connect and await them.

`MemberGroup` runs in the process that called the runner. `GroupMember` is the Ray actor in each process. A process that
raises or dies ends the group (`group_end.py`). Where retries are left it restarts instead: after an exception in the
same process, after a death in a new one of the same name.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hybridrl.errors import PlacementError, WorkerLost
from hybridrl.framework.parallel.group_end import allow_exit, end_mains, kill
from hybridrl.framework.parallel.group_member import INBOX, GroupMember, on_inbox_thread
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import NAMESPACE, actor_names, find_actor
from hybridrl.single_controller.monitoring.process import PROCESS

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # to start a process and import the program; more means that a node does not answer
POLL_PERIOD_S = 60.0  # longest single wait for a result
SEARCH_PERIOD_S = 0.2  # between two looks for a group that is not running yet


@dataclass(frozen=True)
class GroupPlan:
    """The processes of a group and their connections.

    Attributes:
        name: Name of the group.
        program: cloudpickle of (main, args, kwargs).
        peers: Node id -> ids of the processes to which it is linked.
        attach_to: Names of other groups, or of single processes of them.
        attach_timeout_s: How long to wait for them.
        exit_timeout_s: How long `main` may go on when another process has failed.
        options: Options of the Ray actors.
    """

    name: str
    program: bytes  # cloudpickle of (main, args, kwargs)
    peers: Mapping[int, Sequence[int]]
    labels: frozenset[str] = frozenset()
    attach_to: Sequence[str] = ()
    attach_timeout_s: float = 0.0
    exit_timeout_s: float = 0.0
    max_retries: float = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the Ray actors

    @property
    def role(self) -> str:
        return f"{self.name}/node"

    def member_name(self, node_id: int) -> str:
        """Return the name of a process."""
        return f"{self.role}-{node_id}"


class MemberGroup:
    """The running processes of a plan; leaving its `with` block ends them."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self.members: dict[int, Any] = {}  # node id -> Ray actor
        self._set_up: set[int] = set()  # node ids; another process may still wait for its resources
        self._attached: dict[str, Any] = {}  # name -> Ray actor of another group
        self._retries = dict.fromkeys(plan.peers, 0)
        self._running: dict[Any, int] = {}  # reference to the result of `main` -> node id

    def run(self) -> list:
        """Call `main` in every process and return the results, in the order of the plan.

        `main` starts when all processes are connected. The first failure that is not retried is raised at once.

        Raises:
            WorkerLost: A process died. An exception of `main` keeps its type and has its traceback in the notes.
        """
        self._attached = find_members(self.plan.attach_to, timeout_s=self.plan.attach_timeout_s)
        self._start(self.plan.peers)
        for node_id in self.plan.peers:
            self._connect(node_id)
        self._running = {self._call_main(node_id): node_id for node_id in self.plan.peers}
        results: dict[int, Any] = {}
        while self._running:
            for reference in _next_ready(list(self._running)):
                node_id = self._running.pop(reference)
                try:
                    [results[node_id]] = self._values([reference], [node_id], "main")
                except Exception as error:
                    self._recover(node_id, error)
                    self._running[self._call_main(node_id)] = node_id
        return [results[node_id] for node_id in self.plan.peers]

    def _start(self, node_ids: Iterable[int]) -> None:
        for node_id in node_ids:
            self.members[node_id] = _start_process(self.plan.member_name(node_id), self.plan.options)
        PROCESS.register_actors({self.members[i]._actor_id.hex(): (self.plan.role, i) for i in node_ids})
        setups = [
            self.members[i].setup.remote(
                self.plan.program, i, self.plan.member_name(i), self.plan.labels, tuple(self._attached)
            )
            for i in node_ids
        ]
        self._values(setups, list(node_ids), "setup")
        self._set_up.update(node_ids)

    def _connect(self, node_id: int) -> None:
        """Link a process with its peers in both directions.

        A previous process of its name is replaced.
        """
        member, name = self.members[node_id], self.plan.member_name(node_id)
        peers = {self.plan.member_name(peer): self.members[peer] for peer in self.plan.peers[node_id]} | self._attached
        self._values([on_inbox_thread(member.connect).remote(peers)], [node_id], "connect")
        for peer in peers.values():
            with contextlib.suppress(WorkerLost):  # reported by the wait for its `main`
                self._values([on_inbox_thread(peer.connect).remote({name: member})], [node_id], "connect")

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
            "%s failed with %r; restarting it, retry %d", self.plan.member_name(node_id), error, self._retries[node_id]
        )
        if isinstance(error, WorkerLost):
            kill({self.plan.member_name(node_id): self.members[node_id]})  # frees its name
            self._start([node_id])
        self._connect(node_id)

    def _values(self, references: list, node_ids: list[int], method: str) -> list:
        return wait_all(references, node_ids, role=self.plan.role, method=method, timeout_s=START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        members = {self.plan.member_name(node_id): node for node_id, node in self.members.items()}
        set_up = {self.plan.member_name(node_id): self.members[node_id] for node_id in self._set_up}
        try:
            unfinished: set[str] = set()
            if error is not None:
                running = {reference: self.plan.member_name(node_id) for reference, node_id in self._running.items()}
                unfinished = end_mains(running, members, error, timeout_s=self.plan.exit_timeout_s)
            allow_exit([node for name, node in set_up.items() if name not in unfinished])
        finally:
            kill(members)
            PROCESS.forget_actors([node._actor_id.hex() for node in self.members.values()])


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
        return ray.remote(**chosen)(GroupMember).options(name=name, namespace=NAMESPACE).remote(name)
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise PlacementError(
            f"name={name!r}: a process of this name runs on this cluster already; choose another name="
        ) from None


def find_members(targets: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """Wait for the processes of these groups, or of these names, and return them: name -> Ray actor.

    Raises:
        PlacementError: One of them is not running after `timeout_s`.
    """
    found: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    for target in targets:
        if not _members_of(target) and timeout_s:
            logger.warning("waiting up to %g s for attach_to=%r, which is not running yet", timeout_s, target)
        if not (members := _wait_for_members(target, deadline)):
            groups = sorted({name.rpartition("/node-")[0] for name in _member_names()})
            raise PlacementError(
                f"attach_to={target!r} is not running on this cluster after {timeout_s:g} s; there are "
                f"{', '.join(groups) or 'no groups'}. Both programs need the same Ray cluster: start "
                "one with `ray start --head`, and set RAY_ADDRESS=HOST:PORT for both"
            )
        found |= members
    return found


def _wait_for_members(target: str, deadline: float) -> dict[str, Any]:
    """Return the processes of a group when two looks find the same ones.

    At the deadline it returns what is there.

    A group that starts registers its processes one after the other, within milliseconds.
    """
    before: dict[str, Any] = {}
    while True:
        members = _members_of(target)
        is_complete = target in members or (members and members.keys() == before.keys())
        if is_complete or time.monotonic() >= deadline:
            return members
        before = members
        time.sleep(SEARCH_PERIOD_S)


def _members_of(target: str) -> dict[str, Any]:
    names = [name for name in _member_names(target) if name == target or name.startswith(f"{target}/node-")]
    found = {name: find_actor(name) for name in names}
    return {name: member for name, member in found.items() if member is not None}  # None: it has just ended


def _member_names(prefix: str = "") -> list[str]:
    return [name for name in actor_names(prefix) if "/node-" in name]
