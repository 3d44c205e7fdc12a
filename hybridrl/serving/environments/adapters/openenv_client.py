"""`openenv`: a client of an environment server of the package `openenv` (0.10), over its WebSocket.

    class_name: openenv
    config:
      base_url: http://127.0.0.1:8000           # of a running server, or
      command: [python, server.py, "{port}"]    # a server that each environment process starts for itself
      action: message                           # field of the action that gets the policy's text
      observation: echoed_message               # field that the policy sees; without it: all fields, as JSON

A row's other `extra_info.interaction_kwargs` go to `reset`, such as `seed`, or `split` and `index` of a task.
"""

import json
import socket
import subprocess
import time
from typing import Any

POLL_PERIOD_S = 0.1


class OpenEnvClient:
    """One session with a server.

    Args:
        action: Field of an action that gets the text.
        base_url: Of a running server.
        command: Starts a server; `{port}` stands for a free port of 127.0.0.1.
        observation: Field of an observation that is shown.
        start_timeout_s: Seconds for a started server to listen.
        reset: Further arguments of every `reset`.
    """

    def __init__(
        self,
        action: str,
        base_url: str | None = None,
        command: list[str] | None = None,
        observation: str | None = None,
        start_timeout_s: float = 60.0,
        reset: dict[str, Any] | None = None,
    ):
        from openenv.core import GenericEnvClient

        if (base_url is None) == (command is None):
            raise ValueError("give either base_url or command")
        self._action, self._observation, self._arguments = action, observation, dict(reset or {})
        url = base_url or _start(command or [], start_timeout_s)
        self._client: Any = GenericEnvClient(base_url=url).sync()
        self._client.connect()

    def reset(self, row: dict[str, Any]) -> str:
        result = self._client.reset(**{"seed": row["seed"], **self._arguments, **row["kwargs"]})
        return self._text(result.observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        result = self._client.step({self._action: action})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def _text(self, observation: Any) -> str:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise KeyError(f"the observation has no {self._observation!r}; it has {', '.join(observation)}")
        return str(observation[self._observation])


def _start(command: list[str], timeout_s: float) -> str:
    """Start a server, wait until it listens, and return its URL. It ends with this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([word.replace("{port}", str(port)) for word in command])
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return f"http://127.0.0.1:{port}"
        except OSError as error:
            if server.poll() is not None:
                raise RuntimeError(f"the server {command[0]} ended with status {server.returncode}") from error
            if time.monotonic() > until:
                raise TimeoutError(f"the server {command[0]} does not listen after {timeout_s:g} s") from error
            time.sleep(POLL_PERIOD_S)
