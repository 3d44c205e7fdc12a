"""The program of a child that runs foreign code: load an object, run calls on it until the parent is gone.

`ChildProgram` (`child_process`) runs it as a file (`python -P child_program.py FD CALLS`), also with another
interpreter. It imports only the standard library, and nothing of `hybridrl`: starting it takes a few hundredths of a
second, and the parent's `__main__` does not matter. The parent does not import it.

What the calls are is said by the room that starts the child. CALLS is `path/to/file.py:Name`: a class of a file that
imports as little. It is constructed with the loaded object and the arguments of the request, and its methods are the
calls:

    about      optional, plain data that the parent gets when the object is loaded
    lenient    what a method returns inside a list or a mapping becomes its text if it is no plain data; else it fails

One socket, frames of a 4-byte length and a payload. The parent's payloads are pickles: the request (`load_object`),
then lists of pickled calls, each a method's name and its keyword arguments. The child's are JSON, because the parent
executes nothing that foreign code may have written: [process id, number of the frame, kind, value, whether the child is
idle]. The kinds are, in this order:

    started            before any foreign code runs
    ready or failed    `about`; or [a list with "path", "name", "import" or "signature", the reason]
    ok or error        one per call in order: the result as plain data; or [names of the error's classes, the reason]
    importing          within a call: it loads a module

The child is idle with the last answer to a list. It ends a list early after `SLICE_S`; the parent then distributes the
rest again. Standard output and error belong to the foreign code.
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
from collections.abc import Mapping
from typing import Any

SLICE_S = 0.02  # long against a round trip (0.1 ms), short against a step, so that no process hoards calls
IMPORT_REPORT_PERIOD_S = 0.05  # while a call loads modules
MAX_REASON = 500  # characters; some exceptions quote their whole input
MAX_FRAME_BYTES = 64 << 20  # of an answer; the parent ends a process that claims more
MAX_INTEGER_BITS = 1023  # more than a float holds; JSON readers refuse integers of thousands of digits


class NotLoaded(Exception):
    """The object is not there. The arguments are the kind of failure, "path" or "name", and the reason."""


class Answers:
    """The child's half of the connection.

    Only the process that was started sends. A copy of it, which foreign code made by `os.fork()` and let return, ends
    here instead of answering a second time.
    """

    def __init__(self, sock: socket.socket):
        self._socket, self._pid = sock, os.getpid()
        self._lock = threading.Lock()
        self._num_sent = 0

    @property
    def is_original(self) -> bool:
        """Return whether this is the process that was started, and no copy of it."""
        return os.getpid() == self._pid

    def send(self, kind: str, value: Any = None, *, is_idle: bool = False) -> None:
        """Send one frame. Raises OverflowError for a value that is too large."""
        if not self.is_original:
            os._exit(0)
        with self._lock:
            payload = json.dumps([self._pid, self._num_sent, kind, value, is_idle]).encode()
            if len(payload) > MAX_FRAME_BYTES:
                raise OverflowError(f"its result has {len(payload) >> 20} MB; at most {MAX_FRAME_BYTES >> 20}")
            self._num_sent += 1
            self._socket.sendall(struct.pack("!I", len(payload)) + payload)


class ImportReporter(importlib.abc.MetaPathFinder):
    """Reports that a call loads a module; finds none. `active`: a call runs.

    A copy of the process, which a call made for its own work, imports without a report.
    """

    def __init__(self, answers: Answers):
        self._answers, self.active, self._last = answers, False, 0.0

    def find_spec(self, *_: Any) -> None:
        now = time.monotonic()
        if self.active and now - self._last > IMPORT_REPORT_PERIOD_S and self._answers.is_original:
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
    """Load the object, then run calls until the parent closes the socket."""
    answers.send("started")
    path, _, name = sys.argv[2].rpartition(":")
    make_calls = getattr(execute_file(path, "hybridrl_calls"), name)
    frame = receive(sock)
    if frame is None:
        return
    request, kind = pickle.loads(frame), "import"
    sys.path[:] = request["sys_path"] or [os.getcwd(), *sys.path]
    try:
        loaded, arguments = load_object(request), pickle.loads(request["arguments"])
        kind = "signature"
        calls = make_calls(loaded, **arguments)
    except BaseException as error:
        kind, reason = error.args if isinstance(error, NotLoaded) else (kind, describe_error(error))
        answers.send("failed", ([kind], reason))
        return
    reporter = ImportReporter(answers)
    sys.meta_path.insert(0, reporter)
    answers.send("ready", getattr(calls, "about", None), is_idle=True)
    while (frame := receive(sock)) is not None:
        run_calls(pickle.loads(frame), calls=calls, answers=answers, reporter=reporter)


def load_object(request: Mapping[str, Any]) -> Any:
    """Return the object that a request names.

    Args:
        request: `pickled`, or `path` (an absolute file path, or a dotted name) and `name` (may have dots). `run` reads
            `sys_path` (the parent's; None: that of this interpreter and the working directory) and `arguments`.

    Raises:
        NotLoaded: It is not there. What the code raises that is loaded is raised as it is.
    """
    if request["pickled"] is not None:
        return pickle.loads(request["pickled"])
    module = load_module(request["path"])
    try:
        return functools.reduce(getattr, request["name"].split("."), module)
    except AttributeError as error:
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise NotLoaded("name", f"no such name there; it has {', '.join(own) or 'none'}") from error


def load_module(path: str) -> Any:
    """Return the module of `path`, an absolute file path or a dotted name."""
    if not os.path.isabs(path):
        if module_is_missing(path):
            raise NotLoaded("path", "no such module on the Python path")
        return importlib.import_module(path)
    if not os.path.isfile(path):
        raise NotLoaded("path", "no such file")
    sys.path.append(os.path.dirname(path))  # last, so that files in the same folder shadow nothing
    return execute_file(path, f"foreign_{os.path.splitext(os.path.basename(path))[0]}")


def execute_file(path: str, name: str) -> Any:
    """Return a new module of this name that a file makes."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NotLoaded("path", "not a Python file, its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle find a class's module by its name
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


def run_calls(requests: list[bytes], *, calls: Any, answers: Answers, reporter: ImportReporter) -> None:
    """Run calls one by one until all are done or `SLICE_S` is used up."""
    stop = time.monotonic() + SLICE_S
    for number, request in enumerate(requests, start=1):
        reporter.active = True
        try:
            kind, value = run_call(calls, request)
        finally:
            reporter.active = False
        is_last = number == len(requests) or time.monotonic() > stop
        try:
            answers.send(kind, value, is_idle=is_last)
        except OverflowError as error:
            answers.send("error", described(error), is_idle=is_last)
        if is_last:
            return


def run_call(calls: Any, request: bytes) -> tuple[str, Any]:
    """Return ("ok", result as plain data) or ("error", what `described` returns) of one call."""
    try:
        method, arguments = pickle.loads(request)
        result = getattr(calls, method)(**arguments)
        if inspect.isawaitable(result):
            result = event_loop().run_until_complete(result)
        return "ok", plain(result, lenient=calls.lenient)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: they fail this call only
        return "error", described(error)


@functools.lru_cache(maxsize=1)
def event_loop() -> Any:
    """Return this process's event loop, always the same one. Clients that are kept between calls stay usable."""
    import asyncio  # slow to import, and sync functions do not need it

    return asyncio.new_event_loop()


def plain(value: Any, *, lenient: bool, is_inside: bool = False) -> Any:
    """Return the value as None, bool, int, float, text, list or dict with texts as keys, for JSON.

    Arrays and tensors become lists, those with one element numbers.

    Args:
        value: What a call returned, or a part of it.
        lenient: Values of other types, and integers that no float holds, become texts inside a list or a mapping.
        is_inside: `value` is a part of a list or a mapping.

    Raises:
        TypeError: The value is neither a number nor plain data.
        OverflowError: A number is larger than a float.
    """
    if getattr(value, "shape", None) is not None and hasattr(value, "tolist"):
        value = value.item() if functools.reduce(lambda a, b: a * b, value.shape, 1) == 1 else value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, numbers.Integral):
        return plain_integer(value, as_text=lenient and is_inside)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        entries = value.items()
        return {plain_text(str(key)): plain(entry, lenient=lenient, is_inside=True) for key, entry in entries}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry, lenient=lenient, is_inside=True) for entry in value]
    if lenient and is_inside:
        return shorten(repr(value))
    raise TypeError(f"it returned a {type(value).__name__}, which is neither a number nor plain data: {value!r}")


def plain_integer(value: Any, *, as_text: bool) -> int | str:
    """Return an integer that a float holds; the name of the type of another one, if that may be a text."""
    num_bits = int(value).bit_length()
    if num_bits <= MAX_INTEGER_BITS:
        return int(value)
    if as_text:
        return type(value).__name__
    raise OverflowError(f"it returned an integer of {num_bits} bits, more than float32 can hold")


def plain_text(text: str) -> str:
    """Return a text that every file can hold: halves of surrogate pairs become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def shorten(text: str) -> str:
    """Return a text of one line with at most `MAX_REASON` characters that every file can hold."""
    text = plain_text(" ".join(text.split()))
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


def described(error: BaseException) -> tuple[list[str], str]:
    """Return the names of an exception's classes, the most special one first, and `describe_error` of it."""
    return [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException)], describe_error(error)


def describe_error(error: BaseException) -> str:
    """Return type, message and innermost code location of an exception in one line."""
    text = shorten(f"{type(error).__name__}: {error}")
    own = (__file__, sys.argv[2].rpartition(":")[0])
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename not in own and not f.filename.startswith("<frozen ")
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
