"""What runs in a process of a submitted job: its trainer, or a program or function that runs once in each process of
its role.

What each process of a submitted job is made of: the classes and functions that its entries name.
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
from hybridrl.master.jobs.job_handle import JobRun, Roster, Standing
from hybridrl.master.jobs.spec import TRAINER, JobSpec, RoleSpec, is_script
from hybridrl.single_controller.placement.plan import Plan, PoolPlan, ProcessPlan
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs


class TrainerProcess:
    """Holds a trainer. entry: its class or function."""

    def __init__(self, entry: Callable, config: Mapping[str, Any], plan: Plan):
        self._entry, self._config, self._plan = entry, config, plan

    def run(self, rosters: Mapping[str, Roster], standing: Standing, keeper: Any) -> None:
        """Make the trainer with what it asks for by name (`job`, `groups`, `config`), and run it to its end."""
        groups = {role: roster.group() for role, roster in rosters.items()}
        run_trainer(self._entry, JobRun(self._plan.job, self._config, groups, self._plan, standing, keeper))


def run_trainer(entry: Callable, job: JobRun) -> None:
    """Run a trainer: a function, or a class with `run`, or with `fit` and perhaps `init`.

    Raises ConfigError for another one.
    """
    trainer = entry(**asked_for(TRAINER, entry, {"job": job, "groups": job.groups, "config": job.config}))
    if not inspect.isclass(entry):
        return
    if hasattr(trainer, "run"):
        trainer.run()
    elif hasattr(trainer, "fit"):
        getattr(trainer, "init", lambda: None)()
        trainer.fit()
    else:
        raise ConfigError(
            f"role {TRAINER!r}: {entry.__name__} has neither run() nor fit(); one of them is the training"
        )


class EntryProcess:
    """Runs an entry once.

    entry: a program with its arguments, a function, or a class with `run`, which get what they ask for by name.
    """

    def __init__(self, entry: str | Callable, role: str, config: Mapping[str, Any], job: str, max_restart: int):
        self._entry, self._role, self._offered = entry, role, {"config": config, "role": role}
        self._environment = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_MAX_RESTARTS": str(max_restart)}

    def run(self, restarts: int) -> None:
        """Run it to its end. restarts: how often it was started before, in this process or in those before it."""
        place = {
            "GROUP_RANK": os.environ["NODE_RANK"],
            "ROLE_RANK": os.environ["RANK"],
            "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        }
        os.environ.update(
            {**self._environment, **place, "ROLE_NAME": self._role, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        )
        if isinstance(self._entry, str):
            return run_program(self._role, self._entry)
        made = self._entry(**asked_for(self._role, self._entry, self._offered))
        if inspect.isclass(self._entry):
            made.run()


def run_program(role: str, command: str) -> None:
    """Run a Python program in this process, as `python program.py arguments` would.

    Raises RuntimeError for a bad exit code.
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
    except SystemExit as left:
        if hasattr(left, "ray_terminate_msg"):  # Ray ends this process, not the program itself
            raise
        if left.code not in (None, 0):
            raise RuntimeError(f"{Path(program).name} of role {role!r} left with exit code {left.code}") from left


def asked_for(role: str, entry: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments that a constructor or function has by name.

    Raises ConfigError if it needs another.
    """
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(entry).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in offered:
            given[name] = offered[name]
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"role {role!r}: {entry.__name__} asks for {name!r}; it can be given {', '.join(offered)}"
            )
    return given


def recipes_of(spec: JobSpec, plan: Plan) -> tuple[dict[str, RayClassWithInitArgs], set[str]]:
    """Return what to construct for each role, the trainer's among them, and the roles that run by themselves.

    Loads the user's classes. Raises ConfigError for what cannot be loaded, asks for what there is not, or would do
    nothing.
    """
    recipes, by_itself = {}, set()
    for role in spec.roles:
        entry = role.entry if is_script(role.entry) else _class_of(load_entry(role.name, role.entry))
        if isinstance(entry, str) or not inspect.isclass(entry) or (spec.trainer is None and hasattr(entry, "run")):
            by_itself.add(role.name)
            recipes[role.name] = RayClassWithInitArgs(
                EntryProcess, entry, role.name, spec.config, plan.job, role.max_restart
            )
        else:
            recipes[role.name] = _worker(spec, role, entry)
    if spec.trainer is not None:
        entry = _class_of(load_entry(TRAINER, spec.trainer.entry))
        asked_for(TRAINER, entry, {"job": None, "groups": None, "config": None})
        recipes[TRAINER] = RayClassWithInitArgs(TrainerProcess, entry, spec.config, plan)
    return recipes, by_itself


def _worker(spec: JobSpec, role: RoleSpec, entry: type) -> RayClassWithInitArgs:
    if spec.trainer is None:
        raise ConfigError(
            f"role {role.name!r}: nobody calls {entry.__name__} in a job without a trainer, and it has no run()"
        )
    recipe = RayClassWithInitArgs(entry)
    recipe.kwargs = asked_for(role.name, entry, {"config": spec.config, "role": role.name})
    return recipe


def _class_of(entry: Any) -> Any:
    """The class that ray.remote has made an actor of; anything else as it is."""
    return getattr(getattr(entry, "__ray_metadata__", None), "modified_class", entry)


def with_trainer(plan: Plan) -> Plan:
    """Return the plan with its trainer as one process more, which is started as all others are, and again."""
    driver = plan.driver
    if driver is None:
        return plan
    [bundle] = driver.reservation.bundles
    process = ProcessPlan(TRAINER, (TRAINER,), ((0, 0),), bundle, environment=driver.environment)
    pool = PoolPlan(TRAINER, (driver.reservation,))
    return replace(plan, processes=(*plan.processes, process), pools=(*plan.pools, pool), driver=None)
