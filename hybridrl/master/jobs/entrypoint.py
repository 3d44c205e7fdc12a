"""What a process runs, as text that another process can load: `module:Class`, `file.py:Class`, `module:function`,
`program.py --x 1`.

A command line of torchrun, or of DLRover's dlrover-run, as what a role is told.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError
from hybridrl.master.jobs.spec import is_script


def entry_of(role: str, target: Any, class_name: str | None = None) -> str:
    """Return the entry for a class or function, for `module:Class`, `module.Class` or `module::Class`, for a module and
    a class's name, or for a program with its arguments, whose path becomes an absolute one if it is a file here.

    A class of the program itself becomes one of its file, which is run again where the entry is loaded: what the
    program does belongs under `if __name__ == "__main__":`. Raises ConfigError for what no other process could load.
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
    metadata = getattr(target, "__ray_metadata__", None)  # a class made by ray.remote
    target = metadata.modified_class if metadata is not None else target
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"role {role!r}: {target!r} is not at the top of a module, where other processes find it; move it there"
        )
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(
            f"role {role!r}: {name} was typed into an interactive session; put it into a file, 'file.py:{name}'"
        )
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


LAUNCHERS = ("torchrun", "dlrover-run")


class Torchrun(NamedTuple):
    """program: with its arguments, as text. max_restart: None where the command does not say."""

    program: str
    num_nodes: int
    per_node: int
    max_restart: int | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; known are --nnodes, --nproc_per_node and --max_restarts, then the program and its arguments"
        )


def parse(command: str) -> Torchrun:
    """Return what `torchrun --nnodes 2 --nproc_per_node 4 train.py --lr 0.1` says.

    Raises ConfigError for another launcher, for options that say where processes meet or log (that is the job's to
    say), and for a number of nodes or processes that is not one.
    """
    launcher, *words = shlex.split(command) or [""]
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"command={command!r} does not begin with {' or '.join(LAUNCHERS)}; for a program alone there "
            "is run('train.py')"
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1")
    parser.add_argument("--max_restarts", "--max-restarts", type=int)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    try:
        said = parser.parse_args(words)
    except ConfigError as error:
        raise ConfigError(f"command={command!r}: {error}") from None
    if not said.program or not said.program[0].endswith(".py"):
        raise ConfigError(
            f"command={command!r}: {' '.join(said.program) or 'nothing'!r} is no program that ends with .py"
        )
    counts = {"--nnodes": said.nnodes, "--nproc_per_node": said.nproc_per_node}
    for option, count in counts.items():
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f"command={command!r}: {option} {count} must be a whole number, 1 or more; a job's size is fixed"
            )
    return Torchrun(shlex.join(said.program), int(said.nnodes), int(said.nproc_per_node), said.max_restarts)
