"""Calls of an environment, in its process: `child_program` loads this file by its path, also in another interpreter.

It imports only the standard library. Rows and tasks arrive as JSON, because an interpreter may lack the packages of the
run. What a method returns, the parent checks.
"""

import base64
import inspect
import io
import json
from typing import Any


class EnvironmentCalls:
    """The object of one process.

    Args:
        cls: Class of the environment, or verl's interaction.
        name: Of the environment.
        config: Arguments of the constructor.

    Attributes:
        about: Whether the class is verl's interaction.
    """

    lenient = False

    def __init__(self, cls: Any, *, name: str, config: dict[str, Any]):
        self.about = hasattr(cls, "generate_response")
        self._environment: Any = Interaction(cls({"name": name, **config})) if self.about else cls(**config)
        self._is_open = False  # whether an episode has begun

    async def reset(self, row: str) -> Any:
        self._is_open = True
        return sendable(await result_of(self._environment.reset(json.loads(row))))

    async def step(self, action: str) -> Any:
        return sendable(await result_of(self._environment.step(action)))

    def finish(self) -> Any:
        return self._call_if_there("finish")

    def play(self, task: str) -> Any:
        return self._environment.play(json.loads(task))

    def close(self) -> Any:
        was_open, self._is_open = self._is_open, False
        return self._call_if_there("close") if was_open else None

    def _call_if_there(self, name: str) -> Any:
        method = getattr(self._environment, name, None)
        return None if method is None else method()


class Interaction:
    """verl's interaction class as an environment.

    verl calls `start_interaction(instance_id, **kwargs)` once, `generate_response(instance_id, messages, **kwargs)` for
    each turn of the policy, and at last `finalize_interaction(instance_id)`. `kwargs` are the row's
    `extra_info.interaction_kwargs`.
    """

    def __init__(self, interaction: Any):
        self._object = interaction
        self._instance: str | None = None
        self._num_started = 0

    async def reset(self, row: dict[str, Any]) -> None:
        self._num_started += 1
        name, self._kwargs = f"episode-{self._num_started}", {"name": row["name"], **row["kwargs"]}
        started = await result_of(self._object.start_interaction(name, **self._kwargs))
        self._instance = started if isinstance(started, str) else name
        self._messages = list(row["raw_prompt"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        self._messages.append({"role": "assistant", "content": action})
        answer = self._object.generate_response(self._instance, self._messages, **self._kwargs)
        is_done, text, score, *_ = await result_of(answer)
        self._messages.append({"role": "user", "content": text})
        return text, score, is_done

    async def close(self) -> None:
        finalize = getattr(self._object, "finalize_interaction", None)
        if self._instance is not None and finalize is not None:
            takes_instance = any(p.kind != p.VAR_KEYWORD for p in inspect.signature(finalize).parameters.values())
            await result_of(finalize(self._instance) if takes_instance else finalize())
        self._instance = None


def sendable(value: Any) -> Any:
    """Return a method's result with Pillow's images as parts of a chat message."""
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    if isinstance(value, dict):
        return {key: sendable(item) for key, item in value.items()}
    if not hasattr(value, "tobitmap"):
        return value
    with io.BytesIO() as stream:
        value.save(stream, format="PNG")
        data = base64.b64encode(stream.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def result_of(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    return await value if inspect.isawaitable(value) else value
