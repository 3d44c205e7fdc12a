"""A job from the mapping that `Job.model_dump_json` writes: `roles`, `pools`, `trainer`, `edges` and settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.master.job_files.known_keys import check_keys, check_type
from hybridrl.master.jobs.builder import DLJob, Job
from hybridrl.master.plan.planner import check_declared_size, plan_job
from hybridrl.master.plan.spec import EdgeSpec, JobSpec, PoolSpec, Resource, RoleSpec, TrainerSpec

LISTS = {"roles": RoleSpec, "pools": PoolSpec, "edges": EdgeSpec}


def job_of_spec(data: Mapping[str, Any]) -> Job:
    """Return the job whose spec has these fields.

    Raises:
        ConfigError: For unknown or missing fields, and for values that no job can have.
    """
    full = {"trainer": None, "edges": [], **data}
    _check_fields(full, JobSpec, "")
    for name, kind in LISTS.items():
        if name not in full:
            raise ConfigError(f"{name}: is missing; a job has roles and the pools that they are on")
        check_type(full[name], (list,), "", name)
        full[name] = [_part(part, kind, f"{name}[{i}]") for i, part in enumerate(full[name])]
    if full["trainer"] is not None:
        full["trainer"] = _part(full["trainer"], TrainerSpec, "trainer")
    try:
        spec = JobSpec.from_dict(full)
        check_declared_size(spec, plan_job(spec, "job"))
    except ConfigError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"it is not what model_dump_json() writes ({type(error).__name__}: {error}); describe the job by "
            "'workloads', or with a builder"
        ) from error
    return DLJob(spec)


def _part(data: Any, kind: type, where: str) -> dict[str, Any]:
    """Return the fields of one role, pool, edge or trainer.

    A resource and a list that may be left out are there.
    """
    check_type(data, (dict,), "", where)
    _check_fields(data, kind, where)
    if kind in (RoleSpec, TrainerSpec):
        resource = data.get("resource", {})
        check_type(resource, (dict,), where, "resource")
        _check_fields(resource, Resource, f"{where}.resource")
        return {**data, "resource": resource}
    return {"apart_from": [], **data} if kind is PoolSpec else dict(data)


def _check_fields(data: Mapping[str, Any], kind: type, where: str) -> None:
    check_keys(data, [field.name for field in fields(kind)], where)
