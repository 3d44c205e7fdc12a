"""A job from a mapping of workloads.

Its keys are the methods of the builders, and DLRover's names of the same things.

    device_type: CPU
    config: {lr: 1.0e-6}
    collocations: [[actor, rollout]]
    weights: [[actor, rollout]]
    workloads:
      trainer: {run: "my_project.train:Trainer"}
      actor: {run: "my_project.workers:Actor", nnodes: 2, nproc_per_node: 4}
      rollout: {run: "my_project.workers:Rollout", total: 8, per_node: 4, resource: {accelerator: 1}}

With a trainer and an actor it is what `RLJobBuilder` builds, else what `DLJobBuilder` does.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.master.job_files.known_keys import check_keys, check_type
from hybridrl.master.jobs.builder import DLJobBuilder, Job, RLJobBuilder
from hybridrl.master.plan.spec import TRAINER


class Key(NamedTuple):
    """What a key does: `apply(builder, value)` for a value of these types."""

    types: tuple[type, ...]
    apply: Callable[[Any, Any], Any]


def _method(name: str, *types: type) -> Key:
    return Key(types, lambda builder, value: getattr(builder, name)(value))


def _keywords(name: str) -> Key:
    return Key((dict,), lambda builder, value: getattr(builder, name)(**value))


def _names(name: str) -> Key:
    return Key((list,), lambda builder, value: getattr(builder, name)(*value))


def _flag(name: str, *, if_: bool = True) -> Key:
    return Key((bool,), lambda builder, value: getattr(builder, name)() if value is if_ else None)


def _strategy(name: str) -> Key:
    """Return the key of `spread` or `pack`: true, false, or "strict"."""

    def apply(builder: Any, value: Any) -> None:
        if value not in (True, False, "strict"):
            raise ConfigError(f"{name}={value!r}: must be true, false or 'strict'")
        if value:
            getattr(builder, name)(strict=value == "strict")

    return Key((bool, str), apply)


def _collocations(builder: Any, sets: list[Any]) -> None:
    for roles in sets:
        check_type(roles, (list,), "", "collocations")
        builder.with_collocation(*map(str, roles))


def _edges(name: str) -> Key:
    """Return the key of `feeds` or `weights`: a list of [source, target] or [source, target, weight]."""

    def apply(builder: Any, edges: list[Any]) -> None:
        for edge in edges:
            if not isinstance(edge, list) or len(edge) not in (2, 3) or not all(isinstance(e, str) for e in edge[:2]):
                raise ConfigError(f"{name}: {edge!r} must be [source, target] or [source, target, weight]")
            getattr(builder, name)(edge[0], edge[1], **({"weight": edge[2]} if len(edge) == 3 else {}))

    return Key((list,), apply)


def _aliases(key: Key, *names: str) -> dict[str, Key]:
    return dict.fromkeys(names, key)


JOB_KEYS: dict[str, Key] = {
    **_aliases(_method("config", dict), "config", "user_config"),
    **_aliases(_method("global_env", dict), "env", "global_env", "global_envs"),
    **_aliases(_method("node_num", int), "node_num", "node_number"),
    "device_per_node": _method("device_per_node", int),
    **_aliases(_method("device_type", str), "device_type", "accelerator_type"),
    **_aliases(Key((list,), _collocations), "collocations", "with_collocation"),
    "with_collocation_all": _names("with_collocation_all"),
    "feeds": _edges("feeds"),
    "weights": _edges("weights"),
}
ROLE_KEYS: dict[str, Key] = {
    **_aliases(_method("run", str), "run", "entry", "entry_point", "entrypoint"),
    "train": _method("train", str),
    **_aliases(_method("total", int), "total", "num"),
    **{name: _method(name, int) for name in ("per_node", "per_group", "nnodes", "nproc_per_node", "max_restart")},
    **_aliases(_keywords("resource"), "resource", "res"),
    **_aliases(_method("env", dict), "env", "envs"),
    "restart": _method("restart", str),
    "spread": _strategy("spread"),
    "pack": _strategy("pack"),
    "node_labels": _method("node_labels", dict),
    "anti_affinity": _names("anti_affinity"),
    "is_driver": _flag("not_driver", if_=False),
    "enable_node_group_failover": _keywords("enable_node_group_failover"),
}


def job_of_workloads(data: Mapping[str, Any]) -> Job:
    """Return the job that the mapping describes.

    Raises:
        ConfigError: For unknown keys, and for what the builders refuse. The message names the key.
    """
    check_keys(data, ["name", "workloads", *JOB_KEYS], "")
    workloads = data.get("workloads")
    if workloads is None:
        raise ConfigError("workloads: is missing; give each role what it runs: {actor: {run: 'module:Class'}}")
    check_type(workloads, (dict,), "", "workloads")
    names = [str(name).lower() for name in workloads]
    builder = RLJobBuilder() if {"actor", TRAINER} <= set(names) else DLJobBuilder()
    for name, workload in workloads.items():
        check_type(name, (str,), "workloads", str(name))
        where = f"workloads.{name}"
        check_type(workload, (dict,), "", where)
        _apply(builder.role(name), workload, ROLE_KEYS, where)
    _apply(builder, {key: value for key, value in data.items() if key != "workloads"}, JOB_KEYS, "")
    return builder.build()


def _apply(builder: Any, data: Mapping[str, Any], keys: Mapping[str, Key], where: str) -> None:
    """Call the builder's method of each key.

    Raises ConfigError for unknown keys and two keys of one meaning.
    """
    check_keys(data, keys, where)
    used: dict[Key, str] = {}
    for name, value in data.items():
        key = keys[name]
        if key in used:
            raise ConfigError(f"{where}{'.' if where else ''}{name}: says the same as {used[key]!r}; remove one")
        used[key] = name
        check_type(value, key.types, where, name)
        try:
            key.apply(builder, value)
        except TypeError as error:
            raise ConfigError(f"{where}{'.' if where else ''}{name}={value!r}: {error}") from error
