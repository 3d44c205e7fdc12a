"""The Ray actor in each process of a group.

It runs `main` in one thread and receives messages in another.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle

from hybridrl.framework.parallel.message_queue import Message
from hybridrl.framework.parallel.peer_router import peer_router

logger = logging.getLogger(__name__)
INBOX = "inbox"  # Ray concurrency group of one thread, for methods that run while `main` does


class GroupEnded(BaseException):
    """Raised in a `main` that goes on after its group has ended. No `except Exception` catches it."""


def on_inbox_thread(method: Any) -> Any:
    """Return the remote method bound to the inbox thread, so that it runs while `main` does."""
    return method.options(concurrency_group=INBOX)


class GroupMember:
    """Ray actor in each process of a group.

    `MemberGroup` calls all methods but `deliver`, which the peers call. The constructor does nothing; `setup` loads the
    user's function, so that an error in the user's module keeps its type.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._main_thread: int | None = None  # identifier of the thread that runs `main`
        self._ended = False

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line that the process prints

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
            peer_router().connect(name, on_inbox_thread(peer.deliver).remote)

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Accept a message from a peer."""
        peer_router().deliver(stream, number, message)

    def run(self, retries: int) -> Any:
        """Call `main` with fresh copies of its arguments and return the result; None if it was interrupted."""
        main, args, kwargs = cloudpickle.loads(self._program)
        router = peer_router()
        router.start_run(retries)
        try:
            result = self._call(main, args, kwargs)
        except GroupEnded:
            return None
        except BaseException as error:
            try:
                router.finish_run()
            except BaseException as previous:  # probably the cause
                if previous is not error:
                    error.add_note(f"a listener failed before: {previous!r}")
            raise
        router.finish_run()
        return result

    def finish(self, reason: str) -> None:
        """End the runs of the tasks here after their step, because the group ends.

        Interrupts `main` if there is no task.
        """
        if not peer_router().finish_tasks():
            self.interrupt()
        elif self._main_thread is not None:
            logger.warning("%s finishes its step, because its group ends: %s", self._name, reason)

    def interrupt(self) -> None:
        """Raise GroupEnded in the thread of `main`, once; a call into C code gets it when it returns."""
        with self._lock:
            if self._main_thread is not None and not self._ended:
                self._ended = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._main_thread), ctypes.py_object(GroupEnded)
                )

    def _call(self, main: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            self._main_thread = threading.get_ident()
        try:
            return main(*args, **kwargs)
        except SystemExit as error:  # Ray would end the process
            if error.code in (None, 0):
                return None
            raise RuntimeError(f"main called sys.exit({error.code!r})") from error
        finally:
            with self._lock:
                self._main_thread = None
