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
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.errors import ConfigError, DataError
from hybridrl.import_path import load_module
from hybridrl.serving.agent_loop.tools.tool_threads import call_in_thread
from hybridrl.workers.images import image_of

logger = logging.getLogger(__name__)

TOOL_MARKER = "_is_function_tool"
MAX_ANSWER_CHARACTERS = 1 << 20  # more than fits into any response
ROW_ARGUMENTS = ("create_kwargs", "execute_kwargs")
TOOL_TIMEOUT_S = 30.0  # per call; a tool that never returns would block the step


def function_tool(function: Callable | str | None = None) -> Callable:
    """Mark a function, `async` or not, as a tool under its own name, or under another: `@function_tool("name")`."""

    def mark(tool: Callable) -> Callable:
        setattr(tool, TOOL_MARKER, name or True)
        return tool

    name = None if callable(function) else function
    return mark(function) if callable(function) else mark


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
    marked = [(name, value, getattr(value, TOOL_MARKER, False)) for name, value in vars(module).items()]
    tools = {mark if isinstance(mark, str) else name: value for name, value, mark in marked if mark}
    if not tools:
        raise ConfigError(
            f"{key}={path}: no function in it is marked with @function_tool (from hybridrl.serving.agent_loop)"
        )
    return tools


def row_arguments(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments that a row has for a tool, from verl's `extra_info.tools_kwargs`.

    `{tool: {"create_kwargs": {...}, "execute_kwargs": {...}}}`; a tool here is a function, and gets both together.
    """
    info = row.get("extra_info")
    tools = info.get("tools_kwargs") if isinstance(info, Mapping) else None
    kinds = tools.get(name) if isinstance(tools, Mapping) else None
    given = [kinds.get(kind) or {} for kind in ROW_ARGUMENTS] if isinstance(kinds, Mapping) else []
    # Parquet gives all rows the keys of all rows, with None where a row has none.
    return {key: value for arguments in given for key, value in arguments.items() if value is not None}


async def call_tool(
    tools: dict[str, Callable], name: str, arguments: dict[str, Any], *, given: Mapping[str, Any] | None = None
) -> Any:
    """Return a tool's answer as text; one with images as a list of parts, see `workers/images/content.py`.

    An unknown tool, wrong arguments, an exception and a timeout give an answer that states the error. So does an answer
    that is no text and cannot be written as JSON.

    Args:
        tools: Name to function.
        name: Of the tool.
        arguments: Of the policy.
        given: Arguments of the row, which the policy cannot set.

    Raises:
        ConfigError: The tool has no parameter for an argument of the row.
    """
    function = tools.get(name)
    if function is None:
        return f"Error: there is no tool {name!r}; there are {', '.join(sorted(tools)) or 'none'}"
    _require_parameters(function, name, given or {})
    if taken := sorted({*arguments} & {*(given or {})}):
        return f"Error: {name} has no argument {taken[0]!r}"
    arguments = {**arguments, **(given or {})}
    try:
        inspect.signature(function).bind(**arguments)
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(TOOL_TIMEOUT_S):
                answer = await function(**arguments)
        else:
            answer = await call_in_thread(function, arguments, timeout_s=TOOL_TIMEOUT_S)
        if _has_images(answer):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    except TimeoutError:
        return f"Error: {name} did not answer within {TOOL_TIMEOUT_S:g} s"
    except (Exception, SystemExit) as error:
        logger.debug("tool %s failed", name, exc_info=True)
        text = f"Error: {type(error).__name__}: {error}"
    return text[:MAX_ANSWER_CHARACTERS].encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens


def _has_images(answer: Any) -> bool:
    """Return whether an answer is a list of parts with an image, or an image of Pillow."""
    parts = answer if isinstance(answer, list) else [answer]
    try:
        return any(image_of(part) is not None for part in parts)
    except DataError as error:
        raise ValueError(str(error)) from error  # the policy sees it


def _require_parameters(function: Callable, name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of a row that the function does not have."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and (unknown := sorted({*given} - {*parameters})):
        raise ConfigError(
            f"extra_info.tools_kwargs.{name}: the tool has no parameter {unknown[0]!r}; it has "
            f"{', '.join(parameters) or 'none'}. Add it to the function, or take it out of the data"
        )
