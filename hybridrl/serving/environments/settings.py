"""The environments of a run: which classes there are by name, how they are started, and what they may use.

`rollout.multi_turn.interaction_config_path` names a YAML or JSON file with the list `interaction`, in verl's form:

    interaction:
      - name: maze                     # a row's extra_info.interaction_kwargs.name
        class_name: my_env.py:Maze     # next to this file; or package.module:Name, package.module.Name,
        config: {size: 4}              # gymnasium, openenv, verifiers. config: of the constructor

Names in the file of `rollout.agent.path` (`@register_environment`) are known, too. Data name an environment, and never
a file or a class: who writes a dataset does not choose which code runs.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.errors import ConfigError, DataError
from hybridrl.serving.environments.environment import ADDRESSES

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
ADAPTERS = Path(__file__).with_name("adapters")
BUILT_IN = {
    "gymnasium": f"{ADAPTERS / 'gymnasium_text.py'}:GymnasiumText",
    "openenv": f"{ADAPTERS / 'openenv_client.py'}:OpenEnvClient",
    "verifiers": f"{ADAPTERS / 'verifiers_task.py'}:VerifiersTask",
}
MOVED = {"harbor": "path/to/hybridrl/examples/harbor/harbor_task.py:HarborTask"}
REWARDS = ("sum", "last", "none")


@dataclass(frozen=True)
class EnvironmentSpec:
    """How one environment is started.

    Attributes:
        name: In the data.
        address: `path/to/file.py:Name` or `package.module:Name`.
        config: Arguments of the constructor.
        reward: The reward of an episode: "sum" or "last" of its steps, or "none": the run's reward function scores.
            None: "none" for a class with verl's `generate_response`, else "sum".
        python: Interpreter of its processes; None: that of the run.
        num_processes: Episodes at the same time; other rows wait.
        start_timeout_s, step_timeout_s: Seconds to load the class and make the object; for one `reset` or `step`.
        limits: Of each process.
    """

    name: str
    address: str
    config: Mapping[str, Any] = field(default_factory=dict)
    reward: str | None = None
    python: str | None = None
    num_processes: int = 32
    start_timeout_s: float = 120.0
    step_timeout_s: float = 30.0
    limits: RewardLimits = field(default_factory=RewardLimits)


def load_environments(path: str | None) -> dict[str, EnvironmentSpec]:
    """Return the environments of a file and those that are registered, by name.

    Raises:
        ConfigError: The file cannot be read, or an entry is wrong. Names the entry and its key.
    """
    specs = {name: EnvironmentSpec(name, address) for name, address in ADDRESSES.items()}
    for number, entry in enumerate(_entries(path) if path is not None else []):
        where = f"{KEY}={path}: interaction[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}={entry!r}: must have the keys name and class_name")
        spec = _spec(entry, where, Path(path or "").expanduser().parent)
        if spec.name in specs:
            raise ConfigError(f"{where}.name={spec.name!r}: there is another environment of this name")
        specs[spec.name] = spec
    return specs


def spec_of_row(specs: Mapping[str, EnvironmentSpec], row: Mapping[str, Any]) -> tuple[EnvironmentSpec, dict[str, Any]]:
    """Return the environment that a row names, and the row's arguments for it.

    Raises:
        DataError: The row names none.
        ConfigError: There is no environment of this name.
    """
    info = row.get("extra_info")
    kwargs = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
    if not isinstance(kwargs, Mapping):
        raise DataError(
            f"row {info.get('index') if isinstance(info, Mapping) else None} has no extra_info.interaction_kwargs; the "
            "agent loop needs its `name`"
        )
    name = kwargs.get("name") or (next(iter(specs)) if len(specs) == 1 else None)
    if not isinstance(name, str) or name not in specs:
        near = difflib.get_close_matches(str(name), specs, n=1)
        raise ConfigError(
            f"extra_info.interaction_kwargs.name={name!r}: there is no such environment"
            f"{f'; did you mean {near[0]!r}?' if near else '.'} There are: {', '.join(sorted(specs)) or 'none'}. List "
            f"it in {KEY}, or register its class in the file actor_rollout_ref.rollout.agent.path"
        )
    # Parquet gives all rows the keys of all rows, with None where a row has none.
    return specs[name], {key: value for key, value in kwargs.items() if key != "name" and value is not None}


def _entries(path: str) -> list[Any]:
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{KEY}={path}: cannot be read ({type(error).__name__}: {error})") from error
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}={path}: has no list `interaction` of environments")
    return entries


def _spec(entry: Mapping[str, Any], where: str, folder: Path) -> EnvironmentSpec:
    known = [f.name for f in fields(EnvironmentSpec) if f.name != "address"] + ["class_name"]
    for name in entry:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise ConfigError(f"{where}.{name}: there is no such key; did you mean {near[0]}?")
    values = dict(entry)
    address = _address(values.pop("class_name", None), where, folder)
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise ConfigError(f"{where}.name={values.get('name')!r}: must be the name that rows use")
    if not isinstance(values.setdefault("config", {}), Mapping):
        raise ConfigError(f"{where}.config={values['config']!r}: must have the arguments of the constructor")
    _check_values(values, where)
    limits = values.pop("limits", None) or {}
    if not isinstance(limits, Mapping):
        raise ConfigError(f"{where}.limits={limits!r}: must have limits by name")
    return EnvironmentSpec(address=address, limits=RewardLimits.of(limits, key=f"{where}.limits"), **values)


def _check_values(values: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a value of a wrong type or out of range."""
    rules = {
        "reward": (lambda value: value in REWARDS, f"must be one of {', '.join(REWARDS)}"),
        "python": (lambda value: isinstance(value, str), "must be the path of an interpreter"),
        "num_processes": (lambda value: isinstance(value, int) and 0 < value <= 4096, "must be from 1 to 4096"),
        "start_timeout_s": (_is_positive, "must be seconds above 0"),
        "step_timeout_s": (_is_positive, "must be seconds above 0"),
    }
    for name, (holds, rule) in rules.items():
        if values.get(name) is not None and (isinstance(values[name], bool) or not holds(values[name])):
            raise ConfigError(f"{where}.{name}={values[name]!r}: {rule}")
        if name in values and values[name] is None:
            del values[name]
    if "python" in values:
        values["python"] = os.path.expanduser(values["python"])
        if not os.access(values["python"], os.X_OK):
            raise ConfigError(f"{where}.python={values['python']}: there is no such program")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _address(name: Any, where: str, folder: Path) -> str:
    """Return where a class is. A dotted name is verl's form of `package.module:Name`.

    Args:
        name: As it is written.
        where: For errors.
        folder: Of the file of environments; paths begin there.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}.class_name={name!r}: must be path/to/file.py:Name, package.module:Name, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in MOVED:
        raise ConfigError(f"{where}.class_name={name}: is an example now; give {MOVED[name]}")
    path, colon, attribute = name.rpartition(":")
    if not colon:
        path, _, attribute = name.rpartition(".")
    if not path or not attribute.isidentifier():
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; give path/to/file.py:Name or package.module:Name"
        raise ConfigError(f"{where}.class_name={name}: names no class{hint}")
    if path.endswith(".py"):
        path = str((folder / Path(path).expanduser()).resolve())
        if not os.path.isfile(path):
            raise ConfigError(f"{where}.class_name={name}: no file {path}")
    return f"{path}:{attribute}"
