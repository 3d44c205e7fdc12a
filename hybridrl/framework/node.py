"""A process of a group that `Parallel.runner` starts: it runs `main` in one thread and takes messages in another.

Nothing happens in `__init__`; `setup` loads the user's function, so that a mistake in its module keeps its type.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle

from hybridrl.framework.inbox import Message
from hybridrl.framework.router import current_router

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
