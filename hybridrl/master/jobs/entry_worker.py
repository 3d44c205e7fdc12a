"""`EntryArgs` and the worker classes of a submitted job's processes: what is constructed and runs in each.

The job supervisor sends an `EntryArgs` per role (`recipes.py`). In the process, it sets the `JobContext`, constructs
the worker, and exports its endpoints. What a role runs by itself is another endpoint (`RUN`), which the supervisor
calls:

  - A class's `run()`, and a function, run in a thread of their own (`USER_CODE`), so the process also answers calls.
  - A program runs in the main thread and cannot be called.
  - A trainer runs in the main thread, unless its class or module has endpoints.
"""

import ctypes
import inspect
import os
import runpy
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.job_context import JobContext, set_context
from hybridrl.master.jobs.job_handle import GroupHandle, JobHandle, ResumePoint
from hybridrl.master.plan.spec import TRAINER
from hybridrl.single_controller import endpoints, invocation
from hybridrl.single_controller.monitoring.process import PROCESS
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.single_controller.worker_group import ClassWithInitArgs

# Endpoints of the job itself: run what a role runs by itself; end that by SystemExit; list all others.
RUN, INTERRUPT, LIST = "run", "__interrupt__", "__list__"


class UserRun:
    """Runs user code that nobody calls, at most once at a time.

    `interrupt` ends it from another thread.
    """

    def __init__(self, role: str, target: Callable[..., Any]) -> None:
        self._role, self._target = role, target
        self._thread: int | None = None
        self._is_interrupted = False

    def run(self, *arguments: Any) -> None:
        """Run it to its end.

        SystemExit with a code other than 0 is a RuntimeError, unless `interrupt` raised it.
        """
        self._thread = threading.get_ident()
        try:
            self._target(*arguments)
        except SystemExit as exit_:
            if hasattr(exit_, "ray_terminate_msg"):  # raised by Ray to end this process, not by the user
                raise
            if exit_.code not in (None, 0) and not self._is_interrupted:
                raise RuntimeError(f"run() of role {self._role!r} exited with code {exit_.code}") from exit_
        finally:
            self._thread = None

    def interrupt(self) -> None:
        """Raise SystemExit in it, at its next line of Python."""
        self._is_interrupted = True
        if self._thread is not None:
            thread = ctypes.c_ulong(self._thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))


class EntryWorker:
    """The worker of a role that is a program or a function; its `run` executes it once.

    A function gets those of `config` and `role` that it has as parameters.
    """

    def __init__(self, entry: str | Callable, context: JobContext):
        self._entry, self._context = entry, context

    def run(self) -> None:
        """Run the entry to its end."""
        if isinstance(self._entry, str):
            run_program(self._context.role, self._entry)
        else:
            self._entry(**select_arguments(self._context.role, self._entry, offered_arguments(self._context)))


class TrainerEntryWorker:
    """The worker of the trainer's process. entry: the trainer's class or function."""

    def __init__(self, entry: Callable, config: Mapping[str, Any], plan: Plan):
        self._entry, self._config, self._plan = entry, config, plan

    def run(self, handles: Mapping[str, GroupHandle], resume_point: ResumePoint, supervisor: Any) -> None:
        """Construct the trainer and run it."""
        groups = {role: handle.to_group() for role, handle in handles.items()}
        run_trainer(self._entry, JobHandle(self._plan.job, self._config, groups, self._plan, resume_point, supervisor))


def run_trainer(entry: Callable, job: JobHandle) -> None:
    """Run a trainer: a function, or a class with `run`, or with `fit` and optionally `init`.

    A class with a classmethod `from_job` is constructed by it. Any other one, and a function, gets those of `job`,
    `groups`, `config` that it has as parameters.

    Raises:
        ConfigError: If the class has neither `run` nor `fit`.
    """
    if hasattr(entry, "from_job"):
        trainer = entry.from_job(job)
    else:
        trainer = entry(**select_arguments(TRAINER, entry, {"job": job, "groups": job.groups, "config": job.config}))
    if not inspect.isclass(entry):
        return
    _export_methods(trainer)
    if hasattr(trainer, "run"):
        trainer.run()
    elif hasattr(trainer, "fit"):
        getattr(trainer, "init", lambda: None)()
        trainer.fit()
    else:
        raise ConfigError(
            f"role {TRAINER!r}: {entry.__name__} has neither run() nor fit(); add one of them, it is the training loop"
        )


def run_program(role: str, command: str) -> None:
    """Run a Python program in this process, as `python program.py arguments` would.

    Raises:
        ConfigError: If there is no such file on this machine.
        RuntimeError: If the program exits with a code other than 0.
    """
    program, *arguments = shlex.split(command)
    if not Path(program).is_file():
        raise ConfigError(
            f"role {role!r}: there is no file {program} on {os.uname().nodename}, in {os.getcwd()}; put it "
            "on every machine"
        )
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as exit_:
        if hasattr(exit_, "ray_terminate_msg"):  # raised by Ray to end this process, not by the program
            raise
        if exit_.code not in (None, 0):
            raise RuntimeError(f"{Path(program).name} of role {role!r} exited with code {exit_.code}") from exit_


def select_arguments(role: str, entry: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments that a constructor or function has as parameters.

    Raises:
        ConfigError: If it requires another argument.
    """
    selected: dict[str, Any] = {}
    for name, parameter in inspect.signature(entry).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in offered:
            selected[name] = offered[name]
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"role {role!r}: {entry.__name__} requires the argument {name!r}; it can get {', '.join(offered)}"
            )
    return selected


# -- in the process


class EntryArgs(ClassWithInitArgs):
    """Constructs the worker of a role in its process, and exports what the process offers.

    It sets the process's `JobContext` before the user's modules are imported: its pickle has the class as bytes.

    Args:
        cls: The worker's class.
        args, kwargs: Of its constructor, unless it has a classmethod `from_job`.
        functions: Name -> function, the marked functions of the user's module.
        max_restart: Of the role, for its environment.
        has_run: The worker's `run` is executed once.
    """

    def __init__(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        context: JobContext,
        functions: Mapping[str, Callable],
        max_restart: int,
        has_run: bool = True,
    ) -> None:
        super().__init__(cls, *args, **kwargs)
        self.context, self.functions, self.max_restart, self.has_run = context, dict(functions), max_restart, has_run

    def __reduce__(self) -> tuple[Any, ...]:
        user_code = cloudpickle.dumps((self.cls, self.args, self.kwargs, self.functions))
        return _load_entry_args, (self.context, user_code, self.max_restart, self.has_run)

    def __call__(self) -> Any:
        set_context(self.context)
        role = self.context.role
        worker = self.cls.from_job(self.context) if hasattr(self.cls, "from_job") else super().__call__()
        for name, function in self.functions.items():
            _export(name, function)
        _export_methods(worker)
        if self.has_run:
            user_run = UserRun(role, worker.run if role == TRAINER else _RunOfRole(self, worker))
            endpoints.export(RUN, user_run.run)
            endpoints.export(INTERRUPT, user_run.interrupt)
        endpoints.export(LIST, exported_invocations)
        return worker


def _load_entry_args(context: JobContext, user_code: bytes, max_restart: int, has_run: bool) -> EntryArgs:
    set_context(context)
    PROCESS.expects_reports = True
    cls, args, kwargs, functions = cloudpickle.loads(user_code)
    return EntryArgs(cls, args, kwargs, context=context, functions=functions, max_restart=max_restart, has_run=has_run)


@dataclass
class _RunOfRole:
    """Calls a worker's `run`, with the environment of torchrun."""

    recipe: EntryArgs
    worker: Any

    def __call__(self, restarts: int) -> None:
        """restarts: Number of restarts of the role so far."""
        context = self.recipe.context
        os.environ.update(
            {
                "TORCHELASTIC_RUN_ID": context.run,
                "TORCHELASTIC_MAX_RESTARTS": str(self.recipe.max_restart),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "GROUP_RANK": os.environ["NODE_RANK"],
                "ROLE_RANK": os.environ["RANK"],
                "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
                "ROLE_NAME": context.role,
            }
        )
        self.worker.run()


def _export_methods(worker: Any) -> None:
    for name, (attribute, _) in invocation.endpoints_of(type(worker)).items():
        _export(name, getattr(worker, attribute))


def _export(name: str, function: Callable) -> None:
    """Export what the user's code did not export itself, when it was imported or constructed."""
    if name not in endpoints.names():
        endpoints.export(name, function)


def exported_invocations() -> dict[str, invocation.Invocation]:
    """Return name -> invocation of what this process offers to others.

    One without a mark goes to all ranks.
    """
    exported = {name: endpoints.find(name) for name in endpoints.names() if name not in (RUN, INTERRUPT, LIST)}
    default = invocation.Invocation(invocation.Dispatch.ONE_TO_ALL)
    return {name: getattr(function, invocation.MAGIC_ATTR, default) for name, function in exported.items()}


def offered_arguments(context: JobContext) -> dict[str, Any]:
    """Return what the constructors and functions of a role, other than the trainer, can have as parameters."""
    return {"config": context.config, "role": context.role}
