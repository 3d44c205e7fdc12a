"""What each process of a submitted job is made of: the classes and functions that its entries name."""

import inspect
from dataclasses import replace
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.entry import load_entry
from hybridrl.master.entry_process import EntryProcess, TrainerProcess, asked_for
from hybridrl.master.spec import TRAINER, JobSpec, RoleSpec, is_script
from hybridrl.single_controller.plan import Plan, PoolPlan, ProcessPlan
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs


def recipes_of(spec: JobSpec, plan: Plan) -> tuple[dict[str, RayClassWithInitArgs], set[str]]:
    """Return what to construct for each role, the trainer's among them, and the roles that run by themselves.

    Loads the user's classes. Raises ConfigError for what cannot be loaded, asks for what there is not, or would do nothing.
    """
    recipes, by_itself = {}, set()
    for role in spec.roles:
        entry = role.entry if is_script(role.entry) else _class_of(load_entry(role.name, role.entry))
        if isinstance(entry, str) or not inspect.isclass(entry) or (spec.trainer is None and hasattr(entry, "run")):
            by_itself.add(role.name)
            recipes[role.name] = RayClassWithInitArgs(EntryProcess, entry, role.name, spec.config, plan.job, role.max_restart)
        else:
            recipes[role.name] = _worker(spec, role, entry)
    if spec.trainer is not None:
        entry = _class_of(load_entry(TRAINER, spec.trainer.entry))
        asked_for(TRAINER, entry, {"job": None, "groups": None, "config": None})
        recipes[TRAINER] = RayClassWithInitArgs(TrainerProcess, entry, spec.config, plan)
    return recipes, by_itself


def _worker(spec: JobSpec, role: RoleSpec, entry: type) -> RayClassWithInitArgs:
    if spec.trainer is None:
        raise ConfigError(f"role {role.name!r}: nobody calls {entry.__name__} in a job without a trainer, and it has no run()")
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
