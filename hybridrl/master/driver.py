"""What the trainer's process of a submitted job does: launch the workers, run the trainer, give everything back."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.entry import load_entry
from hybridrl.master.placement import plan_job
from hybridrl.master.spec import TRAINER, JobSpec
from hybridrl.single_controller.launch import launch, pools_of
from hybridrl.single_controller.plan import Plan
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup


@dataclass(frozen=True)
class JobRun:
    """What a trainer works with. groups: role -> its worker group. config: the job's."""

    name: str
    config: Mapping[str, Any]
    groups: Mapping[str, RayWorkerGroup]
    plan: Plan


def run_job(spec: JobSpec, job: str) -> None:
    """Start the job's workers, run its trainer to the end, and end the workers. Needs a connection to Ray.

    The trainer's class is made with those of `job` (a `JobRun`), `groups` and `config` that its constructor asks for; then its `run` is
    called, or `init`, where there is one, and `fit`. A function is called with the same. Workers are made with `config` and `role`.
    """
    assert spec.trainer is not None
    plan = plan_job(spec, job)
    trainer = load_entry(TRAINER, spec.trainer.entry)
    recipes = {role.name: _recipe(role.name, load_entry(role.name, role.entry), spec.config) for role in spec.roles}
    pools = pools_of(plan)
    groups: dict[str, RayWorkerGroup] = {}
    try:
        groups = launch(plan, recipes, pools)
        _run_trainer(trainer, JobRun(job, spec.config, groups, plan))
    finally:
        for group in groups.values():
            group.shutdown()
        for pool in pools.values():
            pool.release()


def _recipe(role: str, worker_cls: Any, config: Mapping[str, Any]) -> RayClassWithInitArgs:
    recipe = RayClassWithInitArgs(worker_cls)
    recipe.kwargs = _asked_for(role, recipe.cls, {"config": config, "role": role})
    return recipe


def _run_trainer(entry: Callable, job: JobRun) -> None:
    given = _asked_for(TRAINER, entry, {"job": job, "groups": job.groups, "config": job.config})
    trainer = entry(**given)
    if not inspect.isclass(entry):
        return
    if hasattr(trainer, "run"):
        trainer.run()
    elif hasattr(trainer, "fit"):
        getattr(trainer, "init", lambda: None)()
        trainer.fit()
    else:
        raise ConfigError(f"role {TRAINER!r}: {entry.__name__} has neither run() nor fit(); one of them is the training")


def _asked_for(role: str, entry: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments that a constructor or function has by name. Raises ConfigError if it needs another."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(entry).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in offered:
            given[name] = offered[name]
        elif parameter.default is parameter.empty:
            raise ConfigError(f"role {role!r}: {entry.__name__} asks for {name!r}; it can be given {', '.join(offered)}")
    return given
