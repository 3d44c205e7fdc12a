"""The program of one score process: load a reward function, run calls until the parent is gone.

`ScoreProcess` runs it as a file (`python -P process_main.py FD PARENT_PID`). It imports only the standard library.
Starting it therefore takes a few hundredths of a second, and the parent's `__main__` does not matter. It is not
imported by the parent.

One socket, frames of a 4-byte length and a pickle. The parent sends a dict (`sys_path`, `path`, `name`, `pickled`,
`kwargs`, `arguments`), then lists of pickled keyword arguments. The child sends one (kind, text) after loading. For
each list it sends one (kind, value or reason) per call in order, and an empty frame at the end. It ends a list early
after `SLICE_S`; the parent then distributes the rest again. Standard output and error belong to the reward function.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

SLICE_S = 0.02  # long against a round trip (0.1 ms), short against a step, so that no process hoards calls
ORPHAN_CHECK_PERIOD_S = 1.0
MAX_REASON = 500  # characters; some exceptions quote their whole input


class LoadFailure(Exception):
    """The function cannot be used: `kind` is "path", "name", "import" or "signature"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


def main() -> None:
    """Run the calls that arrive on the socket, until the parent closes it."""
    sock, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    sock.set_inheritable(False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    frame = receive(sock)
    if frame is None:
        return
    request = pickle.loads(frame)
    sys.path[:] = request["sys_path"]
    try:
        function, kwargs = load_function(request)
    except LoadFailure as failure:
        send(sock, pickle.dumps((failure.kind, failure.reason)))
        return
    send(sock, pickle.dumps(("ready", "")))
    with contextlib.suppress(ConnectionError):  # the parent was killed while it sent a frame
        while (frame := receive(sock)) is not None:
            run_calls(sock, pickle.loads(frame), function=function, kwargs=kwargs)


def exit_with_parent(parent: int) -> None:
    """Kill this process and what it started once the parent is gone.

    An idle process exits by itself; one in a long call needs this.
    """
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_PERIOD_S)
    os.killpg(0, signal.SIGKILL)


def load_function(request: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """Return the function that `request` names and its fixed keyword arguments. Raises LoadFailure."""
    try:
        kwargs = pickle.loads(request["kwargs"])
        if request["pickled"] is not None:
            function = pickle.loads(request["pickled"])
        else:
            function = find_function(load_module(request["path"]), request["name"])
    except LoadFailure:
        raise
    except BaseException as error:
        raise LoadFailure("import", f"it cannot be loaded: {describe_error(error)}") from error
    check_signature(function, [*request["arguments"], *kwargs])
    if duplicates := set(request["arguments"]) & set(kwargs):
        raise LoadFailure("signature", f"kwargs have {', '.join(sorted(duplicates))}, which every call sets itself")
    return function, kwargs


def load_module(path: str) -> Any:
    """Return the module of `path`, an absolute file path or a dotted name."""
    if not os.path.isabs(path):
        if module_is_missing(path):
            raise LoadFailure("path", "no such module on the Python path")
        return importlib.import_module(path)
    if not os.path.isfile(path):
        raise LoadFailure("path", "no such file")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"reward_function_{name}", path)
    if spec is None or spec.loader is None:
        raise LoadFailure("path", "not a Python file, its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle find a class's module by its name
    sys.path.append(os.path.dirname(path))  # last, so that files in the same folder shadow nothing
    spec.loader.exec_module(module)
    return module


def module_is_missing(path: str) -> bool:
    """Return whether no module `path` exists. An error inside an existing package is raised as it is."""
    try:
        return importlib.util.find_spec(path) is None
    except ModuleNotFoundError as error:
        return path.startswith(error.name or "\0")


def find_function(module: Any, name: str) -> Callable:
    """Return the function `name` of a module."""
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise LoadFailure("name", f"no such function there; it has {', '.join(own) or 'none'}")


def check_signature(function: Callable, arguments: list[str]) -> None:
    """Raise LoadFailure for a function that cannot take these keyword arguments.

    Functions without a signature (written in C) pass.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise LoadFailure(
            "signature", f"it is called with {', '.join(arguments)}, but takes {signature}: {error}"
        ) from error


def run_calls(sock: socket.socket, calls: list[bytes], *, function: Callable, kwargs: dict[str, Any]) -> None:
    """Run calls for at most `SLICE_S` seconds, then send an empty frame."""
    stop = time.monotonic() + SLICE_S
    for call in calls:
        send(sock, run_call(call, function=function, kwargs=kwargs))
        if time.monotonic() > stop:
            break
    send(sock, b"")


def run_call(call: bytes, *, function: Callable, kwargs: dict[str, Any]) -> bytes:
    """Return the pickled ("ok", value) or ("error", reason) of one call."""
    try:
        value = function(**pickle.loads(call), **kwargs)
        if inspect.isawaitable(value):
            value = run_awaitable(value)
        return pickle.dumps(("ok", value), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: they fail this call only
        return pickle.dumps(("error", describe_error(error)))


def run_awaitable(awaitable: Any) -> Any:
    """Return the result of an awaitable."""
    return event_loop().run_until_complete(awaitable)


@functools.lru_cache(maxsize=1)
def event_loop() -> Any:
    """Return this process's event loop, always the same one.

    A client that the function keeps between calls stays usable.
    """
    import asyncio  # slow to import, and sync functions do not need it

    return asyncio.new_event_loop()


def describe_error(error: BaseException) -> str:
    """Return type, message and innermost code location of an exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > MAX_REASON:
        text = text[:MAX_REASON] + "..."
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and not f.filename.startswith("<frozen ")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def send(sock: socket.socket, payload: bytes) -> None:
    """Send one frame."""
    sock.sendall(struct.pack("!I", len(payload)) + payload)


def receive(sock: socket.socket) -> bytes | None:
    """Return the next frame, or None when the parent has closed the socket."""
    header = receive_exactly(sock, 4)
    return None if header is None else receive_exactly(sock, struct.unpack("!I", header)[0])


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Return `size` bytes, or None when the parent has closed the socket."""
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
