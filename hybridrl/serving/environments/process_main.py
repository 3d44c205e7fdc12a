"""The program of one environment process: make an object, and call its methods until the parent is gone.

`EnvironmentProcess` runs it as a file (`python -P process_main.py FD`), also with another interpreter. It imports only
the standard library, and nothing of `hybridrl`. The parent does not import it.

One socket; each frame is a 4-byte length and JSON. The parent sends `{"id", "do", ...}`. The child answers every one
with `{"id", "ok": value}`, or `{"id", "error": {"kinds", "text"}}` with the names of the exception's classes.

    load    sys_path, address, config    -> whether the class is verl's interaction
    reset   row                          -> text, messages or None
    step    action                       -> [observation, reward, is_done]
    finish                               -> reward or None
    play    task                         -> what the object's `play` returns
    close                                -> None

Standard output and error belong to the environment.
"""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import socket
import struct
import sys
import traceback
from typing import Any

MAX_FRAME_BYTES = 16 << 20
MAX_REASON = 500  # characters


def main() -> None:
    """Answer the requests that arrive on the socket, until the parent closes it."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(ConnectionError):  # the parent was killed
        Host(sock).run()


class Host:
    """Holds the object of this process and calls it."""

    def __init__(self, sock: socket.socket):
        self._socket, self._pid = sock, os.getpid()
        self._environment: Any = None
        self._is_open = False  # whether an episode has begun

    def run(self) -> None:
        """Answer requests until the parent closes the socket."""
        while (frame := receive(self._socket)) is not None:
            request = json.loads(frame)
            try:
                answer = {"id": request["id"], "ok": plain(self._call(request))}
                payload = json.dumps(answer).encode()
                if len(payload) > MAX_FRAME_BYTES:
                    raise OverflowError(f"the answer has {len(payload) >> 20} MB; at most {MAX_FRAME_BYTES >> 20}")
            except BaseException as error:  # also SystemExit: the parent decides what follows
                payload = json.dumps({"id": request["id"], "error": described(error)}).encode()
            if os.getpid() != self._pid:  # a copy that the environment made by os.fork() and let return
                os._exit(0)
            self._socket.sendall(struct.pack("!I", len(payload)) + payload)

    def _call(self, request: dict[str, Any]) -> Any:
        if request["do"] == "load":
            return self._load(request)
        if request["do"] == "reset":
            self._is_open = True
            return run_if_async(self._environment.reset(request["row"]))
        if request["do"] == "step":
            return list(run_if_async(self._environment.step(request["action"])))
        if request["do"] == "play":
            return run_if_async(self._environment.play(request["task"]))
        if request["do"] == "finish":
            finish = getattr(self._environment, "finish", None)
            return None if finish is None else run_if_async(finish())
        close = getattr(self._environment, "close", None) if self._is_open else None
        self._is_open = False
        return None if close is None else run_if_async(close())

    def _load(self, request: dict[str, Any]) -> bool:
        sys.path[:0] = [entry for entry in request["sys_path"] if entry not in sys.path]
        cls = load_class(request["address"])
        is_interaction = hasattr(cls, "generate_response")
        self._environment = Interaction(cls, request) if is_interaction else cls(**request["config"])
        return is_interaction


class Interaction:
    """verl's interaction class as an environment.

    verl calls `start_interaction(instance_id, **kwargs)` once, `generate_response(instance_id, messages, **kwargs)` for
    each turn of the policy, and at last `finalize_interaction(instance_id)`. `kwargs` are the row's
    `extra_info.interaction_kwargs`.
    """

    def __init__(self, cls: type, request: dict[str, Any]):
        self._object = cls({"name": request["name"], **request["config"]})
        self._instance: str | None = None
        self._num_started = 0

    def reset(self, row: dict[str, Any]) -> None:
        self._num_started += 1
        self._kwargs = {"name": row["name"], **row["kwargs"]}
        started = run_if_async(self._object.start_interaction(f"episode-{self._num_started}", **self._kwargs))
        self._instance = started if isinstance(started, str) else f"episode-{self._num_started}"
        self._messages = list(row["raw_prompt"])

    def step(self, action: str) -> tuple[str, float, bool]:
        self._messages.append({"role": "assistant", "content": action})
        answer = self._object.generate_response(self._instance, self._messages, **self._kwargs)
        is_done, text, score, *_ = run_if_async(answer)
        self._messages.append({"role": "user", "content": text})
        return text, score, is_done

    def close(self) -> None:
        finalize = getattr(self._object, "finalize_interaction", None)
        if self._instance is not None and finalize is not None:
            takes_instance = any(p.kind != p.VAR_KEYWORD for p in inspect.signature(finalize).parameters.values())
            run_if_async(finalize(self._instance) if takes_instance else finalize())
        self._instance = None


def load_class(address: str) -> Any:
    """Return the class at `path/to/file.py:Name` or `package.module:Name`."""
    path, _, name = address.rpartition(":")
    if path.endswith(".py"):
        module_name = os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle find a class's module by its name
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    return functools.reduce(getattr, name.split("."), module)


def run_if_async(value: Any) -> Any:
    """Return a value, or the result of an awaitable, always on the same event loop."""
    return event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@functools.lru_cache(maxsize=1)
def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop. Clients that an environment keeps between calls stay usable."""
    return asyncio.new_event_loop()


def plain(value: Any) -> Any:
    """Return a value as JSON has it. Numbers of numpy and torch become Python's."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens
    return value.tolist() if hasattr(value, "tolist") else value


def described(error: BaseException) -> dict[str, Any]:
    """Return the classes of an exception, and its type, message and innermost code location in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    kinds = [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException)]
    return {"kinds": kinds, "text": plain(text + place)}


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
