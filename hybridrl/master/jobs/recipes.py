"""Recipes of a submitted job's processes: what each role constructs, runs and offers.

Made by the job supervisor.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.entry_worker import (
    EntryArgs,
    EntryWorker,
    TrainerEntryWorker,
    offered_arguments,
    select_arguments,
)
from hybridrl.master.jobs.entrypoint import load_entry, unwrap_ray_class
from hybridrl.master.jobs.job_context import JobContext
from hybridrl.master.plan.spec import TRAINER, JobSpec, is_script
from hybridrl.single_controller.invocation import CONCURRENT, CONTROL, MAGIC_ATTR, USER_CODE, Invocation, endpoints_of
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.single_controller.worker_group import ClassWithInitArgs, RayClassWithInitArgs


class EntryRecipe(RayClassWithInitArgs):
    """What the processes of one role construct and run.

    Attributes:
        has_run: They run something by themselves.
        is_callable: They answer calls while they run.
        has_group: The trainer gets a worker group for them.
        endpoints: Name -> invocation, as far as the class and its module show them.
    """

    def __init__(
        self, entry_args: EntryArgs, *, has_run: bool, is_callable: bool, has_group: bool, marked: Mapping[str, Any]
    ) -> None:
        super().__init__(entry_args.cls)
        self.entry_args, self.has_run, self.is_callable, self.has_group = entry_args, has_run, is_callable, has_group
        self.endpoints: dict[str, Invocation] = {name: invocation for name, (_, invocation) in marked.items()}
        if is_callable:
            groups = {USER_CODE: 1, CONTROL: 1}
            concurrency = max((one.concurrency for one in self.endpoints.values()), default=1)
            self.options["concurrency_groups"] = groups | ({CONCURRENT: concurrency} if concurrency > 1 else {})

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs[Any]]:
        return {role: self.entry_args}


def worker_recipes(spec: JobSpec, plan: Plan, *, job: str) -> dict[str, EntryRecipe]:
    """Return role -> recipe, including the trainer's.

    Imports the user's classes.

    Args:
        job: Name of the job.

    Raises:
        ConfigError: If an entry cannot be loaded, requires an unknown argument, or would do nothing.
    """
    contexts = {role.name: JobContext.of_role(spec, role.name, job=job, run=plan.job) for role in spec.roles}
    recipes = {
        role.name: _role_recipe(role.entry, contexts[role.name], role.max_restart, has_trainer=spec.trainer is not None)
        for role in spec.roles
    }
    if spec.trainer is not None:
        context = JobContext.of_role(spec, TRAINER, job=job, run=plan.job)
        recipes[TRAINER] = _trainer_recipe(spec.trainer.entry, context, plan, spec.trainer.max_restart)
    return recipes


def _role_recipe(entry: str, context: JobContext, max_restart: int, *, has_trainer: bool) -> EntryRecipe:
    role = context.role
    if is_script(entry):
        args = EntryArgs(EntryWorker, (entry, context), {}, context=context, functions={}, max_restart=max_restart)
        return EntryRecipe(args, has_run=True, is_callable=False, has_group=False, marked={})
    loaded = unwrap_ray_class(load_entry(role, entry))
    functions, marked = _marked(role, loaded)
    own: dict[str, Any] = {"context": context, "functions": functions, "max_restart": max_restart}
    if not inspect.isclass(loaded):
        select_arguments(role, loaded, offered_arguments(context))
        args = EntryArgs(EntryWorker, (loaded, context), {}, **own)
        return EntryRecipe(args, has_run=True, is_callable=True, has_group=False, marked=marked)
    if not (has_run := runs_by_itself(loaded)) and not has_trainer:
        raise ConfigError(
            f"role {role!r}: {loaded.__name__} has no run(), and without a trainer no process calls it; add run(), "
            "or a trainer"
        )
    kwargs = {} if hasattr(loaded, "from_job") else select_arguments(role, loaded, offered_arguments(context))
    args = EntryArgs(loaded, (), kwargs, has_run=has_run, **own)
    return EntryRecipe(args, has_run=has_run, is_callable=True, has_group=True, marked=marked)


def _trainer_recipe(entry: str, context: JobContext, plan: Plan, max_restart: int) -> EntryRecipe:
    loaded = unwrap_ray_class(load_entry(TRAINER, entry))
    if not hasattr(loaded, "from_job"):
        select_arguments(TRAINER, loaded, {"job": None, "groups": None, "config": None})
    functions, marked = _marked(TRAINER, loaded)
    own: dict[str, Any] = {"context": context, "functions": functions, "max_restart": max_restart}
    args = EntryArgs(TrainerEntryWorker, (loaded, context.config, plan), {}, **own)
    return EntryRecipe(args, has_run=True, is_callable=bool(marked), has_group=False, marked=marked)


def runs_by_itself(cls: type) -> bool:
    """Return whether a class has a `run` without arguments that is no endpoint, so that the job runs it."""
    run = getattr(cls, "run", None)
    if run is None or hasattr(run, MAGIC_ATTR):
        return False
    _, *parameters = inspect.signature(run).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty or one.kind in optional for one in parameters)


def _marked(role: str, entry: Any) -> tuple[dict[str, Callable], dict[str, tuple[str, Invocation]]]:
    """Return the marked functions of an entry's module, and the endpoints of the module and of a class.

    Raises:
        ConfigError: If both have an endpoint of the same name.
    """
    module = sys.modules[entry.__module__]
    of_module, of_class = endpoints_of(module), endpoints_of(entry) if inspect.isclass(entry) else {}
    if both := sorted(of_module.keys() & of_class.keys()):
        raise ConfigError(
            f"role {role!r}: {', '.join(both)} of {entry.__name__} is also a function that {module.__name__} offers to "
            "callers; register one of them with another name"
        )
    return {name: getattr(module, attribute) for name, (attribute, _) in of_module.items()}, of_module | of_class
