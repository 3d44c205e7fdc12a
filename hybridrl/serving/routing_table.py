"""Which replica gets a request: the decision alone. Nothing here waits, starts or calls anything; `router.py` does.

In order: the replica that has this conversation; the one that has most of the prompt in its cache, unless it is busier
than another by more than `slack` requests; the one with the fewest open requests, and among those the one that has had
the fewest. Only healthy replicas are asked: whoever fails answers fast, so without that the least loaded would always
be the broken one.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16  # prompts are compared in blocks of this size, as engines cache them
MOST_PREFIXES = 65536  # remembered; the ones longest unused are forgotten


class RoutingTable:
    """num_replicas: all healthy at first. slack: requests that a known prefix or so may be worth.

    Every request that is placed is open until `finish` or until its replica is lost.
    """

    def __init__(self, num_replicas: int, *, slack: int = 4):
        self.healthy = set(range(num_replicas))
        self.slack = slack
        self._replica_of: dict[str, int] = {}  # open request -> replica
        self._open = [0] * num_replicas
        self._had = [0] * num_replicas
        self._conversations: dict[str, int] = {}
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # hash of a prompt's first blocks -> replica

    def place(self, request_id: str, prompt_ids: Sequence[int], *, conversation: str) -> int | None:
        """Return the replica for this request, which is open there from now on; None while no replica is healthy."""
        if request_id in self._replica_of:
            raise ValueError(
                f"request {request_id!r} is open already, on replica {self._replica_of[request_id]}; ids must differ"
            )
        if not self.healthy:
            return None
        prefixes = _prefixes(prompt_ids)
        chosen = self._conversations.get(conversation)
        if chosen not in self.healthy:
            chosen = self._with_prefix(prefixes)
        if chosen is None:
            chosen = self._least_loaded()
        self._replica_of[request_id] = self._conversations[conversation] = chosen
        self._open[chosen] += 1
        self._had[chosen] += 1
        self._remember(prefixes, chosen)
        return chosen

    def finish(self, request_id: str) -> None:
        """Close a request. One that is not open (its replica was lost) is no error."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self._open[replica] -= 1

    def end_conversation(self, conversation: str) -> None:
        self._conversations.pop(conversation, None)

    def lose(self, replica: int) -> list[str]:
        """Route nothing to this replica any more; return the requests that were open on it, which are closed now."""
        self.healthy.discard(replica)
        lost = [name for name, where in self._replica_of.items() if where == replica]
        for name in lost:
            del self._replica_of[name]
        self._open[replica] = 0
        self._prefixes = OrderedDict((key, where) for key, where in self._prefixes.items() if where != replica)
        return lost

    def restore(self, replica: int) -> None:
        """Route to this replica again.

        It counts as having had as many requests as the others, so that it is not flooded.
        """
        self._had[replica] = max(self._had)
        self.healthy.add(replica)

    def replica_of(self, request_id: str) -> int | None:
        """Return where a request is open, None if nowhere."""
        return self._replica_of.get(request_id)

    def home_of(self, conversation: str) -> int | None:
        """Return the replica that has this conversation, healthy or not; None if nobody has it."""
        return self._conversations.get(conversation)

    def load(self, replica: int) -> int:
        """Return the number of requests that are open on this replica."""
        return self._open[replica]

    def _least_loaded(self) -> int:
        return min(self.healthy, key=lambda replica: (self._open[replica], self._had[replica], replica))

    def _with_prefix(self, prefixes: list[int]) -> int | None:
        """The replica that has more than half of the prompt, if it is not much busier than the least loaded one."""
        for known in reversed(prefixes[len(prefixes) // 2 :]):
            replica = self._prefixes.get(known)
            if replica in self.healthy and self._open[replica] <= self._open[self._least_loaded()] + self.slack:
                return replica
        return None

    def _remember(self, prefixes: list[int], replica: int) -> None:
        for key in prefixes:
            self._prefixes[key] = replica
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)


def _prefixes(prompt_ids: Sequence[int]) -> list[int]:
    """Return a hash of the first block, of the first two, and so on; whole blocks only."""
    hashes, so_far = [], 0
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, *prompt_ids[start : start + BLOCK_TOKENS]))
        hashes.append(so_far)
    return hashes
