"""The program of one score process: load a reward function, run calls until the parent is gone.

`ScoreProcess` runs it as a file (`python -P process_main.py FD`). It imports only the standard library. Starting it
therefore takes a few hundredths of a second, and the parent's `__main__` does not matter. The parent does not import
it.

One socket, frames of a 4-byte length and a payload. The parent's payloads are pickles: a dict (`sys_path`, `path`,
`name`, `pickled`, `kwargs`, `arguments`, `is_batch`), then lists of pickled keyword arguments. The child's are JSON,
because the parent executes nothing that a reward function may have written: [process id, number of the frame, kind,
value]. The kinds are, in this order:

    started                     before any code of the user runs
    ready, or a kind of LoadFailure with its text
    ok or error                 one per call in order, with the result as plain data, or the reason
    importing                   within a call: it loads a module, which its time limit does not count
    idle                        after each list of calls

The child ends a list early after `SLICE_S`; the parent then distributes the rest again. Standard output and error
belong to the reward function.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import numbers
import os
import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

SLICE_S = 0.02  # long against a round trip (0.1 ms), short against a step, so that no process hoards calls
IMPORT_REPORT_PERIOD_S = 0.05  # while a call loads modules
MAX_REASON = 500  # characters; some exceptions quote their whole input
MAX_FRAME_BYTES = 64 << 20  # of an answer; the parent ends a process that claims more
MAX_INTEGER_BITS = 1023  # more than a float holds; JSON readers refuse integers of thousands of digits


class LoadFailure(Exception):
    """The function cannot be used: `kind` is "path", "name", "import" or "signature"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


class Answers:
    """The child's half of the connection.

    Only the process that was started sends. A copy of it, which a function made by `os.fork()` and let return, ends
    here instead of answering a second time.
    """

    def __init__(self, sock: socket.socket):
        self._socket, self._pid = sock, os.getpid()
        self._lock = threading.Lock()
        self._num_sent = 0

    def send(self, kind: str, value: Any = None) -> None:
        """Send one frame. Raises ValueError for a value that is no JSON or too large."""
        if os.getpid() != self._pid:
            os._exit(0)
        with self._lock:
            payload = json.dumps([self._pid, self._num_sent, kind, value]).encode()
            if len(payload) > MAX_FRAME_BYTES:
                raise ValueError(f"its result has {len(payload) >> 20} MB; at most {MAX_FRAME_BYTES >> 20}")
            self._num_sent += 1
            self._socket.sendall(struct.pack("!I", len(payload)) + payload)


class ImportReporter(importlib.abc.MetaPathFinder):
    """Reports that a call loads a module; finds none. `active`: a call runs."""

    def __init__(self, answers: Answers):
        self._answers, self.active, self._last = answers, False, 0.0

    def find_spec(self, *_: Any) -> None:
        now = time.monotonic()
        if self.active and now - self._last > IMPORT_REPORT_PERIOD_S:
            self._last = now
            self._answers.send("importing")


def main() -> None:
    """Run the calls that arrive on the socket, until the parent closes it."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(ConnectionError):  # the parent was killed
        run(sock, Answers(sock))


def run(sock: socket.socket, answers: Answers) -> None:
    """Load the function, then run calls until the parent closes the socket."""
    answers.send("started")
    frame = receive(sock)
    if frame is None:
        return
    request = pickle.loads(frame)
    sys.path[:] = request["sys_path"]
    try:
        function, kwargs = load_function(request)
    except LoadFailure as failure:
        answers.send(failure.kind, failure.reason)
        return
    reporter = ImportReporter(answers)
    sys.meta_path.insert(0, reporter)
    answers.send("ready")
    call = functools.partial(run_call, function=function, kwargs=kwargs, is_batch=request["is_batch"])
    while (frame := receive(sock)) is not None:
        run_calls(pickle.loads(frame), call=call, answers=answers, reporter=reporter)


def load_function(request: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """Return the function that `request` names and its fixed keyword arguments.

    Raises LoadFailure.
    """
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
    """Return whether no module `path` exists.

    An error inside an existing package is raised as it is.
    """
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


def run_calls(calls: list[bytes], *, call: Callable, answers: Answers, reporter: ImportReporter) -> None:
    """Run calls one by one until all are done or `SLICE_S` is used up, then report that this process is idle."""
    stop = time.monotonic() + SLICE_S
    for arguments in calls:
        reporter.active = True
        try:
            kind, value = call(arguments)
        finally:
            reporter.active = False
        try:
            answers.send(kind, value)
        except ValueError as error:
            answers.send("error", str(error))
        if time.monotonic() > stop:
            break
    answers.send("idle")


def run_call(arguments: bytes, *, function: Callable, kwargs: dict[str, Any], is_batch: bool) -> tuple[str, Any]:
    """Return ("ok", result as plain data) or ("error", reason) of one call."""
    try:
        value = function(**pickle.loads(arguments), **kwargs)
        if inspect.isawaitable(value):
            value = run_awaitable(value)
        return "ok", plain_batch(value) if is_batch else plain_score(value)
    except NotPlainError as error:
        return "error", str(error)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: they fail this call only
        return "error", describe_error(error)


class NotPlainError(Exception):
    """A result that is neither a number nor plain data."""


def plain_batch(value: Any) -> Any:
    """Return the result of a batch function: a list of scores; anything else becomes plain data as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain_score(entry) for entry in value] if isinstance(value, list | tuple) else plain(value)


def plain_score(value: Any) -> Any:
    """Return one result as plain data; a value besides the score that is none becomes its text."""
    if isinstance(value, Mapping):
        return {plain_text(str(key)): plain(entry, is_extra=key != "score") for key, entry in value.items()}
    return plain(value)


def plain_text(text: str) -> str:
    """Return a text that every file can hold: halves of surrogate pairs become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def plain(value: Any, *, is_extra: bool = False) -> Any:
    """Return the value as None, bool, int, float, text, list or dict with texts as keys, for JSON.

    Arrays and tensors become lists, those with one element numbers.

    Args:
        value: What the function returned, or a part of it.
        is_extra: Values of other types, and integers that no float holds, become texts.

    Raises:
        NotPlainError: The value is neither a number nor plain data, and not extra.
        OverflowError: A number is larger than a float, and not extra.
    """
    if getattr(value, "shape", None) is not None and hasattr(value, "tolist"):
        value = value.item() if functools.reduce(lambda a, b: a * b, value.shape, 1) == 1 else value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, numbers.Integral) and int(value).bit_length() <= MAX_INTEGER_BITS:
        return int(value)
    if isinstance(value, numbers.Integral) and not is_extra:
        raise NotPlainError(f"it returned an integer of {int(value).bit_length()} bits, more than float32 can hold")
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    if isinstance(value, Mapping):
        return {plain_text(str(key)): plain(entry, is_extra=True) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry, is_extra=True) for entry in value]
    if is_extra:
        return shorten(f"{type(value).__name__}" if isinstance(value, numbers.Integral) else repr(value))
    raise NotPlainError(f"it returned a {type(value).__name__}, not a number: {shorten(repr(value))}")


def shorten(text: str) -> str:
    """Return a text of one line with at most `MAX_REASON` characters that every file can hold."""
    text = plain_text(" ".join(text.split()))
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


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
    text = shorten(f"{type(error).__name__}: {error}")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and not f.filename.startswith("<frozen ")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


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
