"""Worker classes of a submitted job's processes: `TrainerEntryWorker` and `EntryWorker`.

The first runs the trainer, the second a program or function, once in each process of its role. The job supervisor makes
the recipes of all processes from the entries of the job's spec (`worker_recipes`).
"""

import inspect
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entrypoint import load_entry
from hybridrl.master.jobs.job_handle import GroupHandle, JobHandle, ResumePoint
from hybridrl.master.plan.spec import TRAINER, JobSpec, RoleSpec, is_script
from hybridrl.single_controller.placement.plan import Plan, PoolPlan, ProcessPlan
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs


class TrainerEntryWorker:
    """Runs the trainer. entry: its class or function."""

    def __init__(self, entry: Callable, config: Mapping[str, Any], plan: Plan):
        self._entry, self._config, self._plan = entry, config, plan

    def run(self, handles: Mapping[str, GroupHandle], resume_point: ResumePoint, supervisor: Any) -> None:
        """Construct the trainer with those of `job`, `groups`, `config` that it has as parameters, and run it."""
        groups = {role: handle.to_group() for role, handle in handles.items()}
        run_trainer(self._entry, JobHandle(self._plan.job, self._config, groups, self._plan, resume_point, supervisor))


def run_trainer(entry: Callable, job: JobHandle) -> None:
    """Run a trainer: a function, or a class with `run`, or with `fit` and optionally `init`.

    Raises:
        ConfigError: If the class has neither `run` nor `fit`.
    """
    trainer = entry(**select_arguments(TRAINER, entry, {"job": job, "groups": job.groups, "config": job.config}))
    if not inspect.isclass(entry):
        return
    if hasattr(trainer, "run"):
        trainer.run()
    elif hasattr(trainer, "fit"):
        getattr(trainer, "init", lambda: None)()
        trainer.fit()
    else:
        raise ConfigError(
            f"role {TRAINER!r}: {entry.__name__} has neither run() nor fit(); add one of them, it is the training loop"
        )


class EntryWorker:
    """Runs an entry once: a program with its arguments, a function, or a class with `run`.

    A function, and a class's constructor, get those of `config` and `role` that they have as parameters.
    """

    def __init__(self, entry: str | Callable, role: str, config: Mapping[str, Any], job: str, max_restart: int):
        self._entry, self._role, self._offered = entry, role, {"config": config, "role": role}
        self._environment = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_MAX_RESTARTS": str(max_restart)}

    def run(self, restarts: int) -> None:
        """Run the entry to its end. restarts: number of restarts of the role so far."""
        ranks = {
            "GROUP_RANK": os.environ["NODE_RANK"],
            "ROLE_RANK": os.environ["RANK"],
            "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        }
        os.environ.update(
            {**self._environment, **ranks, "ROLE_NAME": self._role, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        )
        if isinstance(self._entry, str):
            return run_program(self._role, self._entry)
        instance = self._entry(**select_arguments(self._role, self._entry, self._offered))
        if inspect.isclass(self._entry):
            instance.run()


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


def worker_recipes(spec: JobSpec, plan: Plan) -> tuple[dict[str, RayClassWithInitArgs], set[str]]:
    """Return role -> constructor recipe, including the trainer's, and the names of the standalone roles.

    Imports the user's classes.

    Raises:
        ConfigError: If an entry cannot be loaded, requires an unknown argument, or would do nothing.
    """
    recipes: dict[str, RayClassWithInitArgs] = {}
    standalone: set[str] = set()
    for role in spec.roles:
        entry = role.entry if is_script(role.entry) else _class_of(load_entry(role.name, role.entry))
        if isinstance(entry, str) or not inspect.isclass(entry) or (spec.trainer is None and hasattr(entry, "run")):
            standalone.add(role.name)
            recipes[role.name] = RayClassWithInitArgs(
                EntryWorker, entry, role.name, spec.config, plan.job, role.max_restart
            )
        else:
            recipes[role.name] = _worker(spec, role, entry)
    if spec.trainer is not None:
        entry = _class_of(load_entry(TRAINER, spec.trainer.entry))
        select_arguments(TRAINER, entry, {"job": None, "groups": None, "config": None})
        recipes[TRAINER] = RayClassWithInitArgs(TrainerEntryWorker, entry, spec.config, plan)
    return recipes, standalone


def _worker(spec: JobSpec, role: RoleSpec, entry: type) -> RayClassWithInitArgs:
    if spec.trainer is None:
        raise ConfigError(
            f"role {role.name!r}: {entry.__name__} has no run(), and without a trainer no process calls it; add run(), "
            "or a trainer"
        )
    recipe: RayClassWithInitArgs = RayClassWithInitArgs(entry)
    recipe.kwargs = select_arguments(role.name, entry, {"config": spec.config, "role": role.name})
    return recipe


def _class_of(entry: Any) -> Any:
    """Return the class inside of a `ray.remote` class, and anything else unchanged."""
    return getattr(getattr(entry, "__ray_metadata__", None), "modified_class", entry)


def add_trainer_process(plan: Plan) -> Plan:
    """Return the plan with its trainer as one more process, so that it is started and restarted like the others."""
    driver = plan.driver
    if driver is None:
        return plan
    [bundle] = driver.reservation.bundles
    process = ProcessPlan(TRAINER, (TRAINER,), ((0, 0),), bundle, environment=driver.environment)
    pool = PoolPlan(TRAINER, (driver.reservation,))
    return replace(plan, processes=(*plan.processes, process), pools=(*plan.pools, pool), driver=None)
