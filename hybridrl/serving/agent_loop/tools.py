"""Function tools: plain Python functions in a user's file, marked with `@function_tool`.

    @function_tool
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

Tools run in the driver process. A call that fails is answered with the error: the policy can react, and the run
continues.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.import_path import load_module

logger = logging.getLogger(__name__)

TOOL_MARKER = "_is_function_tool"
TOOL_TIMEOUT_S = 30.0  # per call; a tool that never returns would block the step


def function_tool(function: Callable) -> Callable:
    """Mark a function, `async` or not, as a tool under its own name."""
    setattr(function, TOOL_MARKER, True)
    return function


def load_tools(path: str | None, *, key: str) -> dict[str, Callable]:
    """Return the marked functions of a Python file by name; an empty dict if path is None.

    Raises:
        ConfigError: The file cannot be loaded or has no marked function. `key` is the setting to name.
    """
    if path is None:
        return {}
    try:
        module = load_module(path)
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    tools = {name: value for name, value in vars(module).items() if getattr(value, TOOL_MARKER, False)}
    if not tools:
        raise ConfigError(
            f"{key}={path}: no function in it is marked with @function_tool (from hybridrl.serving.agent_loop)"
        )
    return tools


async def call_tool(tools: dict[str, Callable], name: str, arguments: dict[str, Any]) -> str:
    """Return a tool's answer as text.

    An unknown tool, wrong arguments, an exception and a timeout give an answer that states the error.
    """
    function = tools.get(name)
    if function is None:
        return f"Error: there is no tool {name!r}; there are {', '.join(sorted(tools)) or 'none'}"
    try:
        inspect.signature(function).bind(**arguments)
        call = (
            function(**arguments) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, **arguments)
        )
        answer = await asyncio.wait_for(call, TOOL_TIMEOUT_S)
    except TimeoutError:
        return f"Error: {name} did not answer within {TOOL_TIMEOUT_S:g} s"
    except Exception as error:
        logger.debug("tool %s failed", name, exc_info=True)
        return f"Error: {type(error).__name__}: {error}"
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
