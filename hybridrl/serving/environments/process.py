"""`EnvironmentProcess`: one environment seen from its parent. Start it, call it with a deadline, kill it.

Runs in the driver process, on any event loop: between two calls it belongs to none. `process_main` is the child's side
and has the protocol. What a child sends is data and is checked. The limits are for mistakes, and for texts that exhaust
an environment. They are no sandbox for a hostile one.
"""

import asyncio
import json
import math
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.serving.agent_loop.failures import BAD_DATA
from hybridrl.serving.environments.base import Answer, Messages
from hybridrl.serving.environments.settings import KEY, EnvironmentSpec
from hybridrl.serving.sessions.episodes import row_as_json
from hybridrl.system.child_process import ChildProcess

PROCESS_MAIN = Path(__file__).with_name("process_main.py")
MAX_FRAME_BYTES = 16 << 20  # of an answer
MAX_TEXT = 1 << 20  # characters of an observation: more than fits into any response
CRASHED, HANGS, NONSENSE = "environment crashed", "environment hangs", "environment answered nonsense"
DATA_KINDS = frozenset(cls.__name__ for cls in BAD_DATA)
NO_DATA_KINDS = frozenset({"OSError", "AssertionError"})  # also where they are ValueErrors


class EnvironmentProcess:
    """A child that holds one object of an environment's class, and ends with this process.

    After a call that failed the process is of no more use: end it.

    Attributes:
        is_interaction: The class is verl's interaction; known after `load`.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec, self.is_interaction = spec, False
        self._num_calls = 0
        limits = spec.limits.resolved(spec.num_processes)
        self._socket, remote = socket.socketpair()
        self._socket.setblocking(False)
        with remote:
            self._child = ChildProcess(
                [spec.python or sys.executable, "-P", str(PROCESS_MAIN), str(remote.fileno())],
                limits=limits.of_process(),
                environment=limits.environment(os.environ),
                pass_fds=[remote.fileno()],
            )

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    async def load(self, *, has_worked: bool) -> None:
        """Load the class and make the object.

        Args:
            has_worked: Another process has loaded it before, so that a failure now is no mistake of a setting.

        Raises:
            ConfigError: That raised an exception, and has never worked.
            AgentFailed: The process ended or did not answer; or that raised an exception.
        """
        spec = self.spec
        own = [os.getcwd()] + ([] if spec.python else [entry for entry in sys.path if entry])
        request = {"sys_path": own, "address": spec.address, "config": dict(spec.config), "name": spec.name}
        answer = await self._answer("load", request, timeout_s=spec.start_timeout_s)
        if "error" in answer:
            what = f"the environment {spec.name!r} ({spec.address}) cannot be made: {_error_of(answer)[1]}"
            raise AgentFailed(what, cause=CRASHED) if has_worked else ConfigError(f"{KEY}: {what}")
        self.is_interaction = bool(answer["ok"])

    async def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begin an episode and return the messages that follow the row's prompt.

        Raises:
            DataError: The environment refuses the row.
            AgentFailed: It crashed, hangs or answered nonsense.
        """
        return _as_messages(await self._call("reset", {"row": row}), self.spec.name)

    async def step(self, action: str) -> Answer:
        """Return the answer to an action. Raises as `reset`."""
        return _as_answer(await self._call("step", {"action": action}), self.spec.name)

    async def finish(self) -> float | None:
        """Return the reward of an episode that ends before the environment says so; None: it adds none.

        Raises as `reset`.
        """
        value = await self._call("finish", {})
        reward = None if value is None else _as_reward(value)
        if reward is not None and not math.isfinite(reward):
            raise AgentFailed(
                f"the environment {self.spec.name!r} returned {value!r:.200} from `finish`; return a finite number or "
                "None",
                cause=NONSENSE,
            )
        return reward

    async def play(self, task: Mapping[str, Any]) -> Any:
        """Return what the object's `play` returns. The caller limits its time. Raises as `reset`."""
        return await self._call("play", {"task": task}, timeout_s=math.inf)

    async def close_episode(self) -> None:
        """End the episode. Raises as `reset`."""
        await self._call("close", {})

    def end(self) -> None:
        """Kill the process and all that it started, without waiting for that."""
        self._socket.close()
        threading.Thread(target=self._child.end, name="end of an environment", daemon=True).start()

    async def _call(self, do: str, request: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        answer = await self._answer(do, request, timeout_s=timeout_s or self.spec.step_timeout_s)
        if "error" not in answer:
            return answer.get("ok")
        kinds, text = _error_of(answer)
        what = f"the environment {self.spec.name!r} raised {text}"
        if DATA_KINDS & set(kinds) and not NO_DATA_KINDS & set(kinds):
            raise DataError(what)
        raise AgentFailed(what, cause=kinds[0] if kinds else CRASHED)

    async def _answer(self, do: str, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the answer to it."""
        self._num_calls += 1
        payload = row_as_json({"id": self._num_calls, "do": do, **request}).encode()
        loop, name = asyncio.get_running_loop(), self.spec.name
        try:
            async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s) as limit:
                await loop.sock_sendall(self._socket, struct.pack("!I", len(payload)) + payload)
                (size,) = struct.unpack("!I", await self._receive(4))
                if size > MAX_FRAME_BYTES:
                    raise AgentFailed(f"the environment {name!r} sent an answer of {size >> 20} MB", cause=NONSENSE)
                answer = json.loads(await self._receive(size))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise AgentFailed(
                f"the environment {name!r} did not answer `{do}` within {timeout_s:g} s", cause=HANGS
            ) from error
        except (ValueError, RecursionError) as error:
            raise AgentFailed(f"the environment {name!r} sent something that is no answer", cause=NONSENSE) from error
        except OSError as error:
            code = await asyncio.to_thread(self._child.end)
            how = self._child.describe_exit(code)
            raise AgentFailed(f"the process of the environment {name!r} {how} in `{do}`", cause=CRASHED) from error
        if not isinstance(answer, dict) or answer.get("id") != self._num_calls:
            raise AgentFailed(f"the environment {name!r} sent an answer that nobody asked for", cause=NONSENSE)
        return answer

    async def _receive(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._socket, min(size - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError("the process has closed its connection")
            parts += part
        return bytes(parts)


def _error_of(answer: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the classes of an exception and its text."""
    error = answer["error"]
    kinds = error.get("kinds") if isinstance(error, dict) else None
    text = error.get("text") if isinstance(error, dict) else error
    return [str(kind)[:80] for kind in kinds] if isinstance(kinds, list) else [], str(text)


def _as_messages(value: Any, name: str) -> Messages:
    """Return an observation of `reset` as messages. Raises AgentFailed if it is none."""
    if value is None:
        return []
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise AgentFailed(
            f"the environment {name!r} returned {value!r:.200} from `reset`; return a text, messages or None",
            cause=NONSENSE,
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _as_reward(value: Any) -> float:
    """Return a reward; NaN if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _as_answer(value: Any, name: str) -> Answer:
    """Return an answer of `step`. Raises AgentFailed if it is none."""
    observation, reward, is_done = value[:3] if isinstance(value, list) and len(value) >= 3 else (None, None, None)
    number = _as_reward(reward)
    if not isinstance(observation, str) or not math.isfinite(number) or not isinstance(is_done, bool):
        raise AgentFailed(
            f"the environment {name!r} returned {value!r:.200} from `step`; return an observation (a text), a reward "
            "(a finite number), and whether the episode has ended",
            cause=NONSENSE,
        )
    return Answer(observation[:MAX_TEXT], number, is_done)
