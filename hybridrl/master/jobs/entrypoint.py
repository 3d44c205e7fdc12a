"""Entrypoints: what a process runs, as text that another process can load.

The forms are `module:Class`, `file.py:Class`, `module:function` and `program.py --x 1`. A command line of torchrun, or
of DLRover's dlrover-run, is parsed into a program and its numbers of processes.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from hybridrl.errors import ConfigError
from hybridrl.import_path import load_object
from hybridrl.master.plan.spec import is_script


def parse_entry(role: str, target: Any, class_name: str | None = None) -> str:
    """Return the entry for a class, a function, or a program with its arguments.

    A class of the program itself becomes a class of its file, which is executed again where the entry is loaded. The
    program's own work therefore belongs under `if __name__ == "__main__":`.

    Args:
        role: For error messages.
        target: A class or function; `module:Class`, `module.Class` or `module::Class`; a module, with `class_name`; or
            a program with its arguments. The path of a program that exists here becomes absolute.
        class_name: Name of the class in the module `target`.

    Raises:
        ConfigError: If no other process could load it.
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
        raise ConfigError(
            f"role {role!r}: {target!r} names no class; write 'module:Class', 'file.py:Class', or the class itself"
        )
    return f"{module}:{name}"


def _entry_of_object(role: str, target: Any) -> str:
    metadata = getattr(target, "__ray_metadata__", None)  # a class decorated by ray.remote
    target = metadata.modified_class if metadata is not None else target
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"role {role!r}: {target!r} is not at the top level of a module, where other processes "
            "could import it; move it there"
        )
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(
            f"role {role!r}: {name} is defined in an interactive session; put it into a file, 'file.py:{name}'"
        )
    return f"{Path(file).resolve()}:{name}"


def load_entry(role: str, entry: str) -> Any:
    """Return the class or function of an entry.

    One from a file is pickled by value, so that processes on other machines need no copy of the file.

    Raises:
        ConfigError: If it cannot be loaded. The message names the role.
    """
    module, _, name = entry.rpartition(":")
    try:
        loaded = load_object(module, name)
    except ConfigError as error:
        raise ConfigError(f"role {role!r}: entry={entry!r}: {error}") from error
    if module.endswith(".py"):
        cloudpickle.register_pickle_by_value(sys.modules[loaded.__module__])
    return loaded


LAUNCHERS = ("torchrun", "dlrover-run")


class TorchrunCommand(NamedTuple):
    """A parsed command. program: with its arguments, as text. max_restart: None if the command has none."""

    program: str
    num_nodes: int
    per_node: int
    max_restart: int | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; supported are --nnodes, --nproc_per_node and --max_restarts, then the program with "
            "its arguments"
        )


def parse_torchrun(command: str) -> TorchrunCommand:
    """Parse a command like `torchrun --nnodes 2 --nproc_per_node 4 train.py --lr 0.1`.

    Raises:
        ConfigError: For another launcher, for options about rendezvous or logs (the job decides those), and for counts
            that are not fixed numbers.
    """
    launcher, *words = shlex.split(command) or [""]
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"command={command!r} does not start with {' or '.join(LAUNCHERS)}; for a program without launcher use "
            "run('train.py')"
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1")
    parser.add_argument("--max_restarts", "--max-restarts", type=int)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    try:
        parsed = parser.parse_args(words)
    except ConfigError as error:
        raise ConfigError(f"command={command!r}: {error}") from None
    if not parsed.program or not parsed.program[0].endswith(".py"):
        raise ConfigError(
            f"command={command!r}: {' '.join(parsed.program) or 'nothing'!r} is no program; it has to end with .py"
        )
    counts = {"--nnodes": parsed.nnodes, "--nproc_per_node": parsed.nproc_per_node}
    for option, count in counts.items():
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f"command={command!r}: {option} {count} must be a whole number, 1 or more; a job's size is fixed"
            )
    return TorchrunCommand(
        shlex.join(parsed.program), int(parsed.nnodes), int(parsed.nproc_per_node), parsed.max_restarts
    )
