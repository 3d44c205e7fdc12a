"""A task directory of the package `harbor` (0.24, Python 3.12) as an environment: each turn is a shell command.

    class_name: examples/harbor/harbor_task.py:HarborTask
    config:
      tasks: path/to/tasks          # a row's `task` names a directory in it, with instruction.md, task.toml, tests/
      environment: docker           # a kind of the package, module:Class, or sandbox: the sandbox of this library

A turn is the last block of code, a JSON object or a tool call with `command`, or the whole text. An episode ends with a
turn `done`, or where turns or tokens are used up. Then the package's verifier runs the task's tests in the environment,
and the reward file is the reward. `harbor_sandbox.py` has the environment `sandbox`. `environments.yaml` beside this
file is a list to begin with; docs/environments.md has the rest.
"""

import asyncio
import json
import re
import shlex
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

SANDBOX = "harbor_sandbox:SandboxEnvironment"
BLOCK = re.compile(r"```(?:bash|sh|shell|console)?[ \t]*\n(.*?)```", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# Before the tests: what the policy has put there is no test, and no reward. The directories may be mounts.
EMPTY_DIRECTORIES = (
    "for path in /logs /logs/verifier /tests; do if [ -L $path ] || [ ! -d $path ]; then rm -f $path; fi; "
    "mkdir -p $path && chmod 777 $path || exit 1; done; "
    "chmod -R u+rwx /logs/verifier /tests && find /logs/verifier /tests -mindepth 1 -delete"
)
MARGIN_S = 5.0  # from a command's limit of time, which `timeout` keeps, to that of the environment
KILLED = 137
SHOWN_OF_TESTS = 300  # last characters of the tests' output in an error


class HarborTask:
    """One environment of the package at a time, made new for each episode.

    Args:
        tasks: Directory that has the task directories.
        environment: docker or another kind of the package; `module:Class`; or sandbox.
        options: Further arguments of the environment's class.
        command_timeout_s: Of a command of the policy. `step_timeout_s` of the entry must be longer.
        tests_timeout_s: Of the tests; None: `verifier.timeout_sec` of the task. `step_timeout_s` must be longer.
        max_output: Characters of a command's output that the policy sees: the beginning and the end of a longer one.
        done: The turn that ends an episode.
        reward: Key in a reward file with several numbers.

    Raises:
        FileNotFoundError: There is no directory `tasks`.
        RuntimeError: The environment cannot be used on this machine; has the reason and the way out.
    """

    def __init__(
        self,
        tasks: str,
        environment: str = "docker",
        options: dict[str, Any] | None = None,
        command_timeout_s: float = 20.0,
        tests_timeout_s: float | None = None,
        max_output: int = 4000,
        done: str = "done",
        reward: str = "reward",
    ):
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.trial.config import EnvironmentConfig

        self._tasks = Path(tasks).expanduser().resolve()
        if not self._tasks.is_dir():
            raise FileNotFoundError(f"tasks={tasks}: there is no such directory")
        if environment == "sandbox":
            here = Path(__file__).resolve()
            sys.path += [str(here.parent), str(here.parents[2])]  # this folder, and the one that has hybridrl
            environment = SANDBOX
        name = "import_path" if ":" in environment else "type"
        self._environment_config = EnvironmentConfig(**{name: environment, "kwargs": options or {}})
        try:
            EnvironmentFactory.run_preflight(self._environment_config.type, self._environment_config.import_path)
        except SystemExit as error:
            raise RuntimeError(
                f"environment={environment}: {error} Without it, `environment: sandbox` runs tasks that need no image"
            ) from error
        self._command_timeout_s, self._tests_timeout_s = command_timeout_s, tests_timeout_s
        self._max_output, self._done, self._reward = max_output, done, reward
        self._environment: Any = None
        self._files: tempfile.TemporaryDirectory[str] | None = None

    async def reset(self, row: dict[str, Any]) -> str:
        """Start the environment of a row's task and return its instruction."""
        self._task = self._load(row["kwargs"].get("task"))
        await self._start()
        return str(self._task.instruction)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Run a command and return what it printed; after the last turn, the reward."""
        command = command_of(action, self._done)
        if command is None:
            return "", await self.finish(), True
        if not command.strip():
            return f"This is no command. Write one command, or {self._done}.", 0.0, False
        return await self._run(command), 0.0, False

    async def finish(self) -> float:
        """Run the task's tests and return the reward that they wrote.

        It is 0 if the tests are not done in time, or cannot be placed because of what commands have done.

        Raises:
            ValueError: The tests wrote no number.
        """
        from harbor.models.trial.config import VerifierConfig
        from harbor.verifier.factory import VerifierFactory
        from harbor.verifier.verifier import (
            AddTestsDirError,
            RewardFileEmptyError,
            RewardFileNotFoundError,
            VerifierOutputParseError,
        )

        if (await self._environment.exec(EMPTY_DIRECTORIES, cwd="/", user="root")).return_code != 0:
            return 0.0
        config = self._task.config.verifier
        verifier = VerifierFactory.create_verifier_from_config(
            VerifierConfig(), task=self._task, trial_paths=self._paths, environment=self._environment
        )
        try:
            with self._environment.with_default_user(config.user):
                limit_s = self._tests_timeout_s or config.timeout_sec
                result = await asyncio.wait_for(verifier.verify(), limit_s)
        except TimeoutError:
            return 0.0
        except AddTestsDirError as error:
            if getattr(error.__cause__, "is_of_policy", False):
                return 0.0
            raise
        except (RewardFileNotFoundError, RewardFileEmptyError, VerifierOutputParseError) as error:
            what = f"the tests of {self._task.name} gave no reward: {error}"
            raise ValueError(f"{what}; {self._end_of_tests()}") from error
        return self._reward_of(result.rewards or {})

    async def close(self) -> None:
        """Stop the environment and delete what is left of it."""
        environment, self._environment = self._environment, None
        files, self._files = self._files, None
        try:
            if environment is not None:
                await environment.stop(delete=True)
        finally:
            if files is not None:
                files.cleanup()

    def _load(self, name: Any) -> Any:
        """Return a task. Raises ValueError if there is none of this name, or one that needs what is not covered."""
        from harbor.models.task.task import Task
        from harbor.models.task.verifier_mode import task_has_any_separate_verifier

        path = (self._tasks / str(name)).resolve()
        if not isinstance(name, str) or path == self._tasks or not path.is_relative_to(self._tasks):
            raise ValueError(f"task={name!r}: must be the name of a directory below {self._tasks}")
        try:
            task = Task(path)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"task={name}: is no task directory: {error}") from error
        if task.has_steps or task_has_any_separate_verifier(task.config):
            raise ValueError(f"task={name}: tasks of several steps, or with a verifier environment, are not covered")
        if task.config.agent.explicit_phase_policy() or task.config.verifier.explicit_phase_policy():
            raise ValueError(f"task={name}: a network_mode of [agent] or [verifier] is not covered")
        return task

    async def _start(self) -> None:
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.trial.paths import EnvironmentPaths, TrialPaths

        config, paths = self._task.config.environment, EnvironmentPaths()
        self._files = tempfile.TemporaryDirectory(prefix="hybridrl-harbor-", ignore_cleanup_errors=True)
        self._paths = TrialPaths(Path(self._files.name))
        self._paths.mkdir()
        self._paths.chmod_dir()
        mount = {"type": "bind", "source": str(self._paths.verifier_dir), "target": str(paths.verifier_dir)}
        try:
            self._environment = EnvironmentFactory.create_environment_from_config(
                self._environment_config,
                environment_dir=self._task.paths.environment_dir,
                environment_name=self._task.short_name,
                session_id=f"hybridrl-{uuid.uuid4().hex[:12]}",
                trial_paths=self._paths,
                task_env_config=config.model_copy(deep=True),
                mounts=[mount],
                network_policy=config.resolve_baseline(),
            )
        except (FileNotFoundError, RuntimeError) as error:
            raise ValueError(f"the environment does not fit the task {self._task.name}: {error}") from error
        await asyncio.wait_for(self._environment.start(force_build=False), config.build_timeout_sec)
        await self._environment.run_healthcheck()

    async def _run(self, command: str) -> str:
        """Return what a command printed, and its exit status, as the policy sees it."""
        limit_s = self._command_timeout_s
        limited = f"timeout -s KILL {limit_s:g} bash -c {shlex.quote(command)}"
        user = self._task.config.agent.user
        try:
            result = await self._environment.exec(limited, timeout_sec=int(limit_s + MARGIN_S), user=user)
        except RuntimeError as error:  # that of docker says it so
            if "timed out" not in str(error):
                raise
            return f"[killed after {limit_s:g} s]"
        printed = (result.stdout or "") + (result.stderr or "")
        status = "killed" if result.return_code == KILLED else f"exit status {result.return_code}"
        return f"{cut(printed, self._max_output)}\n[{status}]".lstrip("\n")

    def _reward_of(self, rewards: dict[str, float]) -> float:
        if self._reward in rewards:
            return float(rewards[self._reward])
        if len(rewards) == 1:
            return float(next(iter(rewards.values())))
        raise ValueError(
            f"the tests of {self._task.name} gave the rewards {', '.join(rewards) or 'of nothing'}, and none is named "
            f"{self._reward}; name one of them as `reward` in the environment's config"
        )

    def _end_of_tests(self) -> str:
        try:
            text = self._paths.test_stdout_path.read_text(errors="replace").strip()
        except OSError:
            return "they printed nothing"
        return f"they printed {text[-SHOWN_OF_TESTS:]!r}"


def command_of(action: str, done: str = "done") -> str | None:
    """Return the command in a turn of the policy; None: the turn ends the episode."""
    text = action.rpartition("</think>")[2].strip()
    found = TOOL_CALL.findall(text) or BLOCK.findall(text)
    if found:
        text = found[-1].strip()
    command = _command_in_json(text, done) if text.startswith("{") else text
    return None if command is None or command.strip() == done else command


def _command_in_json(text: str, done: str) -> str | None:
    """Return the command in a JSON object or a tool call; the text itself if it is none."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call)
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return text
    if not isinstance(arguments, dict):
        return text
    if call.get("name") == done or arguments.get(done) is True:
        return None
    command = arguments.get("command")
    return command if isinstance(command, str) else text


def cut(text: str, most: int) -> str:
    """Return a text of about `most` characters: the beginning and the end of a longer one."""
    half = most // 2
    if len(text) <= most:
        return text.rstrip("\n")
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}".rstrip("\n")
