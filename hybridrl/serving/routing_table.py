"""Load of each replica, and the choice of one for a request. Pure bookkeeping: waits for nothing and calls nothing.

`router.py` is the only user. `ReplicaState` says what a replica does, `NEXT_STATES` how that may change:

    RESTARTING > IDLE      a new process serves once the router resumes it, which is at once if it is not paused
    SERVING > STOPPING     the router is paused or closed

Only serving replicas get requests. A broken replica fails fast, so otherwise it would always be the least loaded. The
first rule that names a serving replica decides:

1. the replica that has this conversation,
2. the replica with most of the prompt in its cache, unless it has more open requests than another by over `slack`,
3. the replica with the fewest open requests, then with the fewest requests so far.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

BLOCK_TOKENS = 16  # prompts are compared in blocks of this size, as engines cache them
MAX_PREFIXES = MAX_CONVERSATIONS = 65536  # stored; the least recently used ones are dropped


class ReplicaState(Enum):
    """What a replica does. In the first three states a task of the router works on it."""

    SERVING = "gets requests, in one call after another"
    STOPPING = "gets no more requests, and those that it has end"
    RESTARTING = "was lost, and a new process is started in its place"
    IDLE = "gets no calls until the router resumes it"
    GIVEN_UP = "was lost for good"


NEXT_STATES = {
    ReplicaState.SERVING: {ReplicaState.STOPPING, ReplicaState.RESTARTING},
    ReplicaState.STOPPING: {ReplicaState.IDLE, ReplicaState.RESTARTING},
    ReplicaState.RESTARTING: {ReplicaState.IDLE, ReplicaState.GIVEN_UP},
    ReplicaState.IDLE: {ReplicaState.SERVING},
    ReplicaState.GIVEN_UP: set(),
}


class RoutingTable:
    """State, open requests, conversations and cached prefixes per replica.

    A request is open from `assign` until `finish`, or until its replica is lost. At first replicas are idle.

    Args:
        num_replicas: Number of replicas.
        slack: How many more open requests a replica with a cached prefix may have.

    Attributes:
        states: State of each replica; `move` changes it.
        serving: Replicas in the state SERVING.
    """

    def __init__(self, num_replicas: int, *, slack: int = 4):
        self.states = [ReplicaState.IDLE] * num_replicas
        self.serving: set[int] = set()
        self.slack = slack
        self._replica_of: dict[str, int] = {}  # open request -> replica
        self._num_open = [0] * num_replicas
        self._num_assigned = [0] * num_replicas
        self._conversations: OrderedDict[str, int] = OrderedDict()  # -> replica
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # hash of a prompt's first blocks -> replica

    def move(self, replica: int, state: ReplicaState) -> None:
        """Give a replica another state. Raises ValueError if `NEXT_STATES` has no such change.

        One that was lost or away has lost its cache. It counts as having had as many requests as the others, so that it
        is not flooded.
        """
        before = self.states[replica]
        if state not in NEXT_STATES[before]:
            raise ValueError(f"replica {replica} is {before.name} and cannot become {state.name}")
        self.states[replica] = state
        if state is ReplicaState.SERVING:
            self.serving.add(replica)
        else:
            self.serving.discard(replica)
        if state is ReplicaState.RESTARTING:
            self._prefixes = OrderedDict((key, where) for key, where in self._prefixes.items() if where != replica)
        if before is ReplicaState.RESTARTING:
            self._num_assigned[replica] = max(self._num_assigned)

    def in_state(self, *states: ReplicaState) -> list[int]:
        """Return the replicas that are in one of these states."""
        return [replica for replica, state in enumerate(self.states) if state in states]

    def assign(self, request_id: str, prompt_ids: Sequence[int], *, conversation: str) -> int | None:
        """Open a request on a replica and return the replica; None while none serves."""
        if request_id in self._replica_of:
            raise ValueError(
                f"request {request_id!r} is open already, on replica {self._replica_of[request_id]}; ids must differ"
            )
        if not self.serving:
            return None
        prefixes = _prefixes(prompt_ids)
        chosen = self._conversations.get(conversation)
        if chosen not in self.serving:
            chosen = self._replica_with_prefix(prefixes)
        if chosen is None:
            chosen = self._least_loaded()
        self._replica_of[request_id] = self._conversations[conversation] = chosen
        self._conversations.move_to_end(conversation)
        if len(self._conversations) > MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)
        self._num_open[chosen] += 1
        self._num_assigned[chosen] += 1
        self._record_prefixes(prefixes, chosen)
        return chosen

    def finish(self, request_id: str) -> None:
        """Close a request. One that is not open (its replica was lost) is no error."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self._num_open[replica] -= 1

    def end_conversation(self, conversation: str) -> None:
        self._conversations.pop(conversation, None)

    def lose(self, replica: int) -> list[str]:
        """Mark a replica as lost; close and return the requests that were open on it."""
        self.move(replica, ReplicaState.RESTARTING)
        lost = self.open_on(replica)
        for name in lost:
            del self._replica_of[name]
        self._num_open[replica] = 0
        return lost

    def replica_of(self, request_id: str) -> int | None:
        """Return the replica on which a request is open, or None."""
        return self._replica_of.get(request_id)

    def open_on(self, replica: int) -> list[str]:
        """Return the requests that are open on a replica, the newest last."""
        return [name for name, where in self._replica_of.items() if where == replica]

    def load(self, replica: int) -> int:
        """Return the number of requests that are open on this replica."""
        return self._num_open[replica]

    def _least_loaded(self) -> int:
        return min(self.serving, key=lambda replica: (self._num_open[replica], self._num_assigned[replica], replica))

    def _replica_with_prefix(self, prefixes: list[int]) -> int | None:
        """Return a replica that has over half of the prompt, or None.

        None also if its load exceeds that of the least loaded one by over `slack`.
        """
        for prefix in reversed(prefixes[len(prefixes) // 2 :]):
            replica = self._prefixes.get(prefix)
            if replica in self.serving and self._num_open[replica] <= self._num_open[self._least_loaded()] + self.slack:
                return replica
        return None

    def _record_prefixes(self, prefixes: list[int], replica: int) -> None:
        for key in prefixes:
            self._prefixes[key] = replica
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _prefixes(prompt_ids: Sequence[int]) -> list[int]:
    """Return a hash of the first block, of the first two, and so on; whole blocks only."""
    hashes, so_far = [], 0
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, *prompt_ids[start : start + BLOCK_TOKENS]))
        hashes.append(so_far)
    return hashes
