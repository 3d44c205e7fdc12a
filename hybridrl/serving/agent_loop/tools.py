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
from hybridrl.serving.agent_loop.tool_threads import call_in_thread

logger = logging.getLogger(__name__)

TOOL_MARKER = "_is_function_tool"
MAX_ANSWER_CHARACTERS = 1 << 20  # more than fits into any response
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

    An unknown tool, wrong arguments, an exception and a timeout give an answer that states the error. So does an answer
    that is no text and cannot be written as JSON.
    """
    function = tools.get(name)
    if function is None:
        return f"Error: there is no tool {name!r}; there are {', '.join(sorted(tools)) or 'none'}"
    try:
        inspect.signature(function).bind(**arguments)
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(TOOL_TIMEOUT_S):
                answer = await function(**arguments)
        else:
            answer = await call_in_thread(function, arguments, timeout_s=TOOL_TIMEOUT_S)
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    except TimeoutError:
        return f"Error: {name} did not answer within {TOOL_TIMEOUT_S:g} s"
    except (Exception, SystemExit) as error:
        logger.debug("tool %s failed", name, exc_info=True)
        text = f"Error: {type(error).__name__}: {error}"
    return text[:MAX_ANSWER_CHARACTERS].encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens
