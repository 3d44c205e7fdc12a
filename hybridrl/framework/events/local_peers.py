"""The router of a process without peers: it sends and receives nothing.

There is one router per process, `current_router()`; `Parallel()` and `task.router` return it. In a process that has
loaded `framework.parallel` it is a `PeerRouter`.
"""

import logging
from collections.abc import Callable
from typing import Self

from hybridrl.framework.events import ROUTERS, ListenerFn

logger = logging.getLogger(__name__)


class LocalPeers:
    """The router of a process without peers; `framework.parallel.peer_router.PeerRouter` extends it.

    Attributes:
        is_active: Whether this process belongs to a group.
        node_id: Number of the process in its group.
        name: Name of the process in messages.
        labels: Labels given to the runner.
        retries: How often `main` was restarted here.
        attached_to: Names of the processes of other groups to which it is attached.
        message_bytes: Size of the message being handled, for listeners.
        failure: Exception of a listener that no call has raised yet.
        finish_hooks: Functions that end the runs of the tasks in this process after their step.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.node_id = 0
        self.name = "standalone"
        self.labels: frozenset[str] = frozenset()
        self.retries = 0
        self.attached_to: tuple[str, ...] = ()
        self.message_bytes = 0
        self.failure: BaseException | None = None
        self.finish_hooks: list[Callable[[], None]] = []

    def get_attch_to_len(self) -> int:
        """Return the number of processes of other groups to which this one is attached; DI-engine's spelling."""
        return len(self.attached_to)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the runner that started the process closes its connections."""

    def __reduce__(self) -> tuple:
        return current_router, ()  # unpickles as the receiving process's own

    def on(self, topic: str, fn: ListenerFn) -> None:
        """Do nothing: no peer emits."""

    def off(self, topic: str, fn: ListenerFn | None = None) -> None:
        """Do nothing: there are no listeners."""

    def send(
        self,
        topic: str,
        args: tuple,
        kwargs: dict,
        *,
        event: str = "",
        newest_only: bool = False,
        retained: bool = False,
    ) -> None:
        """Raise the stored exception of a listener, if there is one.

        There is no peer to send to.
        """
        self.raise_failure()

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` at once."""
        function()

    def flush(self) -> None:
        """Return at once: no messages arrive."""

    def stop_buffering(self) -> None:
        """Do nothing: no messages are buffered."""

    def record_failure(self, error: BaseException) -> None:
        """Store a listener's exception until a call can raise it."""
        logger.error("%s: a listener failed: %r; the next emit or stage raises it", self.name, error, exc_info=error)
        if self.failure is None:
            self.failure = error
        self.finish_tasks()

    def finish_tasks(self) -> bool:
        """End the runs of the tasks in this process after their step; return whether there are any."""
        hooks = tuple(self.finish_hooks)
        for hook in hooks:
            hook()
        return bool(hooks)

    def raise_failure(self) -> None:
        """Raise a stored exception of a listener, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


LOCAL_PEERS = LocalPeers()


def install_router(router: LocalPeers) -> None:
    """Make `router` the router of this process."""
    ROUTERS[:] = [router]


def current_router() -> LocalPeers:
    """Return the router of this process."""
    return ROUTERS[0] if ROUTERS else LOCAL_PEERS
