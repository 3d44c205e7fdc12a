"""Train agents of other people: one per row talks to the endpoint in a session of its own.

`rollout.agent.program` is a Python function (`path/to/file.py:name`, `package.module:name`), plain or `async`, or a
command. The agent uses any client of OpenAI's or Anthropic's API. It sends its messages as ever; the session keeps the
tokens (`serving/sessions`). All conversations of the session are trained, with `agent.train_branches=false` the main
one.

The driver runs a function: an `async` one on the event loop of the agent loops, another one in a thread. A command is a
process of its own on the driver's machine, and ends with all that it started.
"""

import asyncio
import inspect
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.import_path import load_object
from hybridrl.serving.agent_loop.base import AgentLoopContext, register_agent_loop
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.agent_loop.programs.session_agent import SessionAgentLoop, SessionEpisode
from hybridrl.serving.agent_loop.tools.tool_threads import ToolExit, ToolHangs, call_in_thread
from hybridrl.serving.concurrency_limit import slots
from hybridrl.serving.sessions.episodes import row_as_json
from hybridrl.system.child_process import ChildProcess, ProcessLimits

KEY = "actor_rollout_ref.rollout.agent.program"
FUNCTION = re.compile(r"(\S+):([A-Za-z_]\w*)")
# Agents (threads as processes) that begin at the same time; others wait until one ends, or waits for new weights.
MAX_COROUTINES, MAX_PROCESSES = 128, 32
MAX_ROW_BYTES = 100_000  # Linux takes 128 KiB per environment variable
MAX_OUTPUT_MB = 1.0  # of a command
POLL_PERIOD_S = 0.05


@dataclass(frozen=True)
class AgentTask:
    """What an agent gets.

    Attributes:
        base_url: Of OpenAI's API, in a session of this agent alone.
        api_key: For the client; any text if the endpoint needs none.
        model: Name of the policy.
        session: Name of the session.
        row: Columns of the row: `raw_prompt` (its messages), `extra_info`, `reward_model`, ...
    """

    base_url: str
    api_key: str
    model: str
    session: str
    row: dict[str, Any]

    @classmethod
    def of(cls, episode: SessionEpisode) -> "AgentTask":
        host, session = episode.host, episode.session.name
        return cls(host.url_of(session), host.api_key, host.model, session, episode.columns)

    @property
    def anthropic_base_url(self) -> str:
        """The base URL of Anthropic's API, in the same session."""
        return self.base_url.removesuffix("/v1")

    def environment(self) -> dict[str, str]:
        """Return the variables of a command. Raises DataError if the row is too large for one."""
        row = row_as_json(self.row)
        if len(row.encode()) > MAX_ROW_BYTES:
            raise DataError(
                f"row {self.row.get('index')} has {len(row.encode())} bytes, and an environment variable at most "
                f"{MAX_ROW_BYTES}; make extra_info smaller, or use a Python function in {KEY}"
            )
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "HYBRIDRL_SESSION": self.session,
            "HYBRIDRL_ROW": row,
        }


@register_agent_loop("http_agent")
class HTTPAgentLoop(SessionAgentLoop):
    """Starts the program of `rollout.agent.program` for each row."""

    def __init__(self, context: AgentLoopContext):
        super().__init__(context)
        if context.program is None:
            raise ConfigError(f"{KEY}=null: the agent loop http_agent needs a Python function or a command")
        self._function, self._command = load_program(context.program)
        self.player = f"the agent {context.program}"

    async def play(self, episode: SessionEpisode) -> Any:
        """Return what the agent returns, once it has a slot among the agents of this event loop and has ended."""
        task = AgentTask.of(episode)
        limit = MAX_COROUTINES if inspect.iscoroutinefunction(self._function) else MAX_PROCESSES
        async with episode.clock.hold(slots(limit, of=HTTPAgentLoop)):
            return await self._call(task, episode.clock)

    async def _call(self, task: AgentTask, clock: EpisodeClock) -> Any:
        try:
            async with self.time_limit(clock):
                if self._function is None:
                    return await _run_command(self._command, task.environment())
                if inspect.iscoroutinefunction(self._function):
                    return await self._function(task)
                return await call_in_thread(self._run_function, {"task": task}, has_slot=True)
        except (AgentFailed, ConfigError, DataError):
            raise
        except (Exception, ToolHangs, ToolExit) as error:
            raise AgentFailed(
                f"{self.player} raised {type(error).__name__}: {error}", cause=type(error).__name__
            ) from error

    def _run_function(self, task: AgentTask) -> Any:
        assert self._function is not None
        return self._function(task)


def load_program(program: str) -> tuple[Callable | None, list[str]]:
    """Return the function of a program, or None and its command.

    Raises:
        ConfigError: The function cannot be loaded, or the command is none.
    """
    if found := FUNCTION.fullmatch(program.strip()):
        try:
            function = load_object(found[1], found[2])
        except ConfigError as error:
            raise ConfigError(f"{KEY}={program}: {error}") from error
        if not callable(function):
            raise ConfigError(f"{KEY}={program}: {found[2]} is no function")
        return function, []
    try:
        command = shlex.split(program)
    except ValueError as error:
        raise ConfigError(f"{KEY}={program}: is no command ({error})") from error
    if not command:
        raise ConfigError(f"{KEY}={program!r}: give a Python function (file.py:name), or a command")
    return None, command


async def _run_command(command: list[str], environment: dict[str, str]) -> None:
    """Return when the command has ended well. Raises AgentFailed otherwise. It ends when the caller is cancelled.

    Consumes: The command's exit status.
    Waits for: Its end, looking every `POLL_PERIOD_S` seconds.
    Unblocked by: The command; the caller's deadline, which cancels this.
    """
    limits = ProcessLimits(output_mb=MAX_OUTPUT_MB)
    child = ChildProcess(command, limits=limits, environment={**os.environ, **environment})
    try:
        while (code := child.poll()) is None:
            await asyncio.sleep(POLL_PERIOD_S)
    finally:
        await asyncio.to_thread(child.end)
    if code:
        what = child.describe_exit(code)
        raise AgentFailed(f"the agent's command {command[0]} {what}; the log has what it printed", cause=what)
