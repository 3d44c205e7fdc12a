"""`EnvironmentProcess`: one environment seen from its parent. Start it, call it with a deadline, kill it.

Runs in the driver process, on any event loop: between two calls it belongs to none. `environment_calls` is the child's
side, and `system/child_process` has the protocol.
"""

import asyncio
import math
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.serving.agent_loop.failures import BAD_DATA
from hybridrl.serving.environments.environment import Answer, Messages
from hybridrl.serving.environments.settings import KEY, EnvironmentSpec
from hybridrl.serving.sessions.episodes import row_as_json
from hybridrl.system.child_process import ChildProgram, ProtocolError, frame_of_request, pickled_call

CALLS = f"{Path(__file__).with_name('environment_calls.py')}:EnvironmentCalls"
MAX_TEXT = 1 << 20  # characters of an observation: more than fits into any response
CRASHED, HANGS, NONSENSE = "environment crashed", "environment hangs", "environment answered nonsense"
DATA_KINDS = frozenset(cls.__name__ for cls in BAD_DATA)
NO_DATA_KINDS = frozenset({"OSError", "AssertionError"})  # also where they are ValueErrors


class EnvironmentProcess(ChildProgram):
    """A child that holds one object of an environment's class, and ends with this process.

    After a call that failed the process is of no more use: end it.

    Attributes:
        is_interaction: The class is verl's interaction; known after `load`.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec, self.is_interaction = spec, False
        limits = spec.limits.resolved(spec.num_processes)
        environment = limits.environment(os.environ)
        super().__init__(CALLS, python=spec.python, limits=limits.of_process(), environment=environment)
        self.socket.setblocking(False)

    async def load(self, *, has_worked: bool) -> None:
        """Load the class and make the object.

        Args:
            has_worked: Another process has loaded it before, so that a failure now is no mistake of a setting.

        Raises:
            ConfigError: That raised an exception, and has never worked.
            AgentFailed: The process ended or did not answer; or that raised an exception.
        """
        spec = self.spec
        path, _, name = spec.address.rpartition(":")
        arguments = pickle.dumps({"name": spec.name, "config": dict(spec.config)})
        own = None if spec.python else [os.getcwd(), *(entry for entry in sys.path if entry)]
        frame = frame_of_request(path=path, name=name, arguments=arguments, sys_path=own)
        kind, value = await self._answer("load", frame, timeout_s=spec.start_timeout_s)
        if kind == "failed":
            what = f"the environment {spec.name!r} ({spec.address}) cannot be made: {value[1]}"
            raise AgentFailed(what, cause=CRASHED) if has_worked else ConfigError(f"{KEY}: {what}")
        self.is_interaction = bool(value)

    async def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begin an episode and return the messages that follow the row's prompt.

        Raises:
            DataError: The environment refuses the row.
            AgentFailed: It crashed, hangs or answered nonsense.
        """
        return _as_messages(await self._call("reset", row=row_as_json(dict(row))), self.spec.name)

    async def step(self, action: str) -> Answer:
        """Return the answer to an action. Raises as `reset`."""
        return _as_answer(await self._call("step", action=action), self.spec.name)

    async def finish(self) -> float | None:
        """Return the reward of an episode that ends before the environment says so; None: it adds none.

        Raises as `reset`.
        """
        return self._checked_reward("finish", await self._call("finish"))

    async def play(self, task: Mapping[str, Any]) -> float | None:
        """Return the reward of an episode that the object plays. The caller limits its time. Raises as `reset`."""
        return self._checked_reward("play", await self._call("play", task=row_as_json(dict(task)), timeout_s=math.inf))

    async def close_episode(self) -> None:
        """End the episode. Raises as `reset`."""
        await self._call("close")

    def end_soon(self) -> None:
        """Kill the process and all that it started, without waiting for that.

        The thread of `end`:
            Consumes: Nothing.
            Waits for: The processes to end.
            Unblocked by: The kernel; the deadlines of `end`.
        """
        self.socket.close()
        threading.Thread(target=self.end, name="end of an environment", daemon=True).start()

    def _checked_reward(self, method: str, value: Any) -> float | None:
        reward = None if value is None else _as_reward(value)
        if reward is not None and not math.isfinite(reward):
            what = f"the environment {self.spec.name!r} returned {value!r:.200} from `{method}`"
            raise AgentFailed(f"{what}; return a finite number or None", cause=NONSENSE)
        return reward

    async def _call(self, method: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        frame = self.frame_of_calls([method], [pickled_call(method, **arguments)])
        kind, value = await self._answer(method, frame, timeout_s=timeout_s or self.spec.step_timeout_s)
        if kind == "ok":
            return value
        kinds, reason = value
        what = f"the environment {self.spec.name!r} raised {reason}"
        if DATA_KINDS & set(kinds) and not NO_DATA_KINDS & set(kinds):
            raise DataError(what)
        raise AgentFailed(what, cause=kinds[0][:80])

    async def _answer(self, what: str, frame: bytes, *, timeout_s: float) -> tuple[str, Any]:
        """Return what `_exchange` returns within a time. Raises as `reset`."""
        name = self.spec.name
        try:
            async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s) as limit:
                return await self._exchange(frame)
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"the environment {name!r} did not answer `{what}` within {timeout_s:g} s"
            raise AgentFailed(text, cause=HANGS) from error
        except ProtocolError as error:
            raise AgentFailed(f"the environment {name!r} was ended: {error}", cause=NONSENSE) from error
        except OSError as error:
            how = self.describe_exit(await asyncio.to_thread(self.end))
            raise AgentFailed(f"the process of the environment {name!r} {how} in `{what}`", cause=CRASHED) from error

    async def _exchange(self, frame: bytes) -> tuple[str, Any]:
        """Send a frame and return kind and value of the answer to it.

        Consumes: What the process writes to its socket.
        Waits for: The answer.
        Unblocked by: The process, or its end; the caller's deadline, which cancels this.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, frame)
        while data := await loop.sock_recv(self.socket, 1 << 20):
            for kind, value, _ in self.answers(data):
                if kind not in ("started", "importing"):
                    return kind, value
        raise ConnectionResetError("the process has closed its connection")


def _as_messages(value: Any, name: str) -> Messages:
    """Return an observation of `reset` as messages. Raises AgentFailed if it is none."""
    if value is None:
        return []
    is_content = isinstance(value, str) or (isinstance(value, list) and not any(map(_has_role, value)))
    messages = [{"role": "user", "content": value}] if is_content and value != [] else value
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise AgentFailed(
            f"the environment {name!r} returned {value!r:.200} from `reset`; return a text, messages or None",
            cause=NONSENSE,
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _has_role(part: Any) -> bool:
    return isinstance(part, dict) and "role" in part


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
    )


def _as_reward(value: Any) -> float:
    """Return a reward; NaN if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _as_answer(value: Any, name: str) -> Answer:
    """Return an answer of `step`. Raises AgentFailed if it is none."""
    observation, reward, is_done = value[:3] if isinstance(value, list) and len(value) >= 3 else (None, None, None)
    number = _as_reward(reward)
    if not isinstance(observation, str | list) or not math.isfinite(number) or not isinstance(is_done, bool):
        raise AgentFailed(
            f"the environment {name!r} returned {value!r:.200} from `step`; return an observation (a text), a reward "
            "(a finite number), and whether the episode has ended",
            cause=NONSENSE,
        )
    return Answer(observation[:MAX_TEXT], number, is_done)
