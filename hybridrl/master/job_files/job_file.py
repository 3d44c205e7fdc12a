"""`load_job_file`: the job that a file describes.

`hybridrl job submit FILE` and `hybridrl job graph FILE` call it.

    job.yaml, job.json     the whole job, as `Job.model_dump_json` writes it, or `workloads` (`workload_mapping.py`)
    job.py, job.py:NAME    Python that defines `build()`, a job, or a builder (`job_module.py`)

Unknown and repeated keys are refused: a misspelled one would otherwise have no effect.
"""

import json
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridrl.errors import ConfigError
from hybridrl.master.job_files.job_module import job_of_module
from hybridrl.master.job_files.spec_mapping import job_of_spec
from hybridrl.master.job_files.workload_mapping import job_of_workloads
from hybridrl.master.jobs.builder import Job

DATA_SUFFIXES = (".yaml", ".yml", ".json")
PYTHON_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class JobFile:
    """A job from a file.

    Attributes:
        name: The name in the file, else the file's name without suffix.
        folder: The file's directory, from which Python imports modules as it does for a program.
    """

    job: Job
    name: str
    folder: Path


def names_job_file(text: str) -> bool:
    """Return whether an argument of the command line is the path of a job file, by its suffix."""
    return text.endswith(DATA_SUFFIXES) or PYTHON_FILE.fullmatch(text) is not None


def load_job_file(text: str) -> JobFile:
    """Return the job that a file describes.

    Args:
        text: A path, for Python also `path.py:NAME`.

    Raises:
        ConfigError: If there is no such file, or it does not describe exactly one job.
    """
    python = PYTHON_FILE.fullmatch(text)
    path = Path(python["path"] if python else text).expanduser()
    if not names_job_file(text):
        raise ConfigError(f"{text}: a job is described in .yaml, .json or .py; give a file with one of these suffixes")
    if not path.is_file():
        raise ConfigError(f"{text}: there is no file {path} in {Path.cwd()}")
    try:
        if python:
            return JobFile(job_of_module(path, python["name"]), _name_of(path), path.resolve().parent)
        data = _read(path)
        name = data.pop("name", _name_of(path))
        check_job_name(name, "name")
        return JobFile(_job_of_mapping(data), name, path.resolve().parent)
    except ConfigError as error:
        raise error if str(error).startswith(str(path)) else ConfigError(f"{text}: {error}") from error


def _name_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-") or "job"


def check_job_name(name: Any, key: str) -> None:
    """Raise ConfigError unless processes and directories can have this name. key: where it was given."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{key}={name!r}: a job's name has letters, digits, '.', '_' and '-', and starts with one")


def _job_of_mapping(data: dict[str, Any]) -> Job:
    if "workloads" in data and "roles" in data:
        raise ConfigError("it describes two jobs: one by 'workloads', one by 'roles' and 'pools'; remove one of them")
    return job_of_spec(data) if "roles" in data else job_of_workloads(data)


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a file of YAML or JSON."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"it cannot be read ({error.strerror})") from error
    try:
        data = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _read_yaml(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError("it is nested too deeply to be a job") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits, an impossible date
        raise ConfigError(f"it has a value that cannot be read: {error}") from error
    if not isinstance(data, dict):
        what = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"it is {what}; a job is a mapping with 'workloads', or one that model_dump_json() wrote")
    return data


def _read_yaml(text: str) -> Any:
    try:
        documents = list(yaml.load_all(text, Loader=_StrictLoader))  # safe: a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "it"
        raise ConfigError(f"{line} is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not YAML: {' '.join(str(error).split())}") from error
    if len(documents) > 1:
        raise ConfigError(f"it has {len(documents)} YAML documents; give every job a file of its own")
    return documents[0] if documents else None


class _StrictLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping. Raises ConfigError for a repeated key."""
        pairs = [(self.construct_object(key, deep=True), None) for key, _ in node.value if key.tag != MERGE_TAG]
        _unique(pairs)
        return super().construct_mapping(node, deep=deep)


# PyYAML reads 1e-6 as text; YAML 1.2 and JSON as a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)
MERGE_TAG = "tag:yaml.org,2002:merge"


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dict. Raises ConfigError for a repeated key."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, Hashable):
            raise ConfigError(f"{key!r} is no key; write text")
        if key in found:
            raise ConfigError(f"the key {key!r} is there twice in one mapping; remove one of them")
        found[key] = value
    return found
