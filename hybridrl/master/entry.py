"""What a process runs, as text that another process can load: `module:Class`, `file.py:Class`, `module:function`, `program.py --x 1`."""

import shlex
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError
from hybridrl.master.spec import is_script


def entry_of(role: str, target: Any, class_name: str | None = None) -> str:
    """Return the entry for a class or function, for `module:Class`, `module.Class` or `module::Class`, for a module and a class's name, or
    for a program with its arguments, whose path becomes an absolute one if it is a file here.

    A class of the program itself becomes one of its file, which is run again where the entry is loaded: what the program does belongs
    under `if __name__ == "__main__":`. Raises ConfigError for what no other process could load.
    """
    if not isinstance(target, str):
        return _entry_of_object(role, target)
    if class_name is not None:
        return f"{target}:{class_name}"
    if is_script(target):
        program, *arguments = shlex.split(target)
        return shlex.join([str(Path(program).resolve()) if Path(program).is_file() else program, *arguments])
    target = target.replace("::", ":")
    if ":" in target:
        return target
    module, _, name = target.rpartition(".")
    if not module or name == "py":
        raise ConfigError(f"role {role!r}: {target!r} names no class; write 'module:Class', 'file.py:Class', or the class itself")
    return f"{module}:{name}"


def _entry_of_object(role: str, target: Any) -> str:
    metadata = getattr(target, "__ray_metadata__", None)  # a class made by ray.remote
    target = metadata.modified_class if metadata is not None else target
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", "")
    if not name.isidentifier():
        raise ConfigError(f"role {role!r}: {target!r} is not at the top of a module, where other processes find it; move it there")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(f"role {role!r}: {name} was typed into an interactive session; put it into a file, 'file.py:{name}'")
    return f"{Path(file).resolve()}:{name}"


def load_entry(role: str, entry: str) -> Any:
    """Return the class or function. One of a file can be sent to other processes, which need not have the file.

    Raises ConfigError, which names the role, when it cannot be loaded.
    """
    module, _, name = entry.rpartition(":")
    try:
        found = load_object(module, name)
    except ConfigError as error:
        raise ConfigError(f"role {role!r}: entry={entry!r}: {error}") from error
    if module.endswith(".py"):
        cloudpickle.register_pickle_by_value(sys.modules[found.__module__])
    return found
