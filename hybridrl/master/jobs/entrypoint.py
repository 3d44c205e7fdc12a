"""Entrypoints: what a process runs, as text that another process can load.

The forms are `module:Class`, `file.py:Class`, `module:function` and `program.py --x 1`. A command line of torchrun, or
of DLRover's dlrover-run, is parsed into a program and its numbers of processes.
"""

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from hybridrl.errors import ConfigError
from hybridrl.import_path import file_of_module, load_object
from hybridrl.master.plan.spec import JobSpec, check_entry, is_script
from hybridrl.master.plan.without_effect import log_without_effect
from hybridrl.system.child_process import ChildProcess


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
    entry = f"{target}:{class_name}" if class_name is not None else _entry_of_text(target)
    check_entry(role, entry)
    return entry


def _entry_of_text(target: str) -> str:
    if is_script(target):
        program, *arguments = shlex.split(target)
        return shlex.join([str(Path(program).resolve()) if Path(program).is_file() else program, *arguments])
    target = target.replace("::", ":")
    if ":" in target:
        return target
    module, separator, name = target.rpartition(".")
    return f"{module}:{name}" if separator else target


def unwrap_ray_class(target: Any) -> Any:
    """Return the user's class that `ray.remote` decorated, and anything else unchanged."""
    metadata = getattr(target, "__ray_metadata__", None)
    if metadata is None:
        return target
    return getattr(metadata.modified_class, "__ray_actor_class__", metadata.modified_class)


def _entry_of_object(role: str, target: Any) -> str:
    target = unwrap_ray_class(target)
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"role {role!r}: {target!r} is not at the top level of a module, where other processes "
            "could import it; move it there"
        )
    if (loaded_from := file_of_module(module)) is not None:
        return f"{loaded_from}:{name}"
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


# -- checking the entries of a job before it starts

CHECK_TIMEOUT_S = 300.0  # for importing the user's modules
CHECK_PROGRAM = """
import os, pathlib, sys
for number in (1, 2):
    os.dup2(os.open(pathlib.Path(sys.argv[1], "printed"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
from hybridrl.errors import ConfigError
from hybridrl.master.jobs.recipes import worker_recipes
from hybridrl.master.plan.planner import plan_job
from hybridrl.master.plan.spec import JobSpec

spec = JobSpec.model_validate_json(pathlib.Path(sys.argv[1], "spec").read_text())
try:
    worker_recipes(spec, plan_job(spec, "check"), job="check")
except ConfigError as error:
    pathlib.Path(sys.argv[1], "error").write_text(str(error))
"""


def check_entries(spec: JobSpec, *, timeout_s: float = CHECK_TIMEOUT_S) -> None:
    """Import the entries of a job in a process of its own, with this program's module path and folder.

    Whatever the entries start ends with that process, and both end with this program.

    Raises:
        ConfigError: If one cannot be imported or would do nothing, if there is no such program here, or if the import
            ends or does not end that process.
    """
    for role in spec.roles:
        program = shlex.split(role.entry)[0] if is_script(role.entry) else None
        if program is not None and not Path(program).is_file():
            raise ConfigError(f"role {role.name!r}: there is no file {program} in {Path.cwd()}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spec").write_text(spec.model_dump_json())
        child = ChildProcess([sys.executable, "-c", CHECK_PROGRAM, folder], environment=environment)
        try:
            code = child.wait(timeout_s)
        finally:
            child.end()
        if code is None:
            raise ConfigError(
                f"the import of the entries did not end within {timeout_s:g} s; put the work of a module under "
                'if __name__ == "__main__"'
            )
        error, printed = Path(folder, "error"), Path(folder, "printed")
        if error.exists():
            raise ConfigError(error.read_text())
        if code != 0:
            text = printed.read_text(errors="replace").strip() if printed.exists() else ""
            last = (text.splitlines() or ["it printed nothing"])[-1]
            raise ConfigError(f"the import of the entries ended with exit code {code}: {last}")


# -- commands of torchrun

LAUNCHERS = ("torchrun", "dlrover-run")
NODE_CHECKS = ("--node_check", "--network_check")
# Options of dlrover-run that change nothing here, without and with a value.
DLROVER_SWITCHES = (
    *NODE_CHECKS,
    "--auto_config",
    "--auto_tunning",
    "--comm_perf_test",
    "--exclude_straggler",
    "--numa_affinity",
    "--save_at_breakpoint",
)
DLROVER_OPTIONS = (
    "--accelerator",
    "--membind_policy",
    "--node_unit",
    "--precheck",
    "--training_port",
    "--ucp_device_type",
)


class TorchrunCommand(NamedTuple):
    """A parsed command.

    Attributes:
        program: With its arguments, as text.
        max_restart: None if the command has none.
        node_check: It asks for a test of the machines.
    """

    program: str
    num_nodes: int
    per_node: int
    max_restart: int | None
    node_check: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; supported are --nnodes, --nproc_per_node and --max_restarts, then the program with "
            "its arguments"
        )


def parse_torchrun(command: str) -> TorchrunCommand:
    """Parse a command like `torchrun --nnodes 2 --nproc_per_node 4 train.py --lr 0.1`.

    Options of dlrover-run that have no effect here are logged.

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
    try:
        parsed = _parser(launcher).parse_args(words)
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
    ignored = [option for option in (*DLROVER_SWITCHES, *DLROVER_OPTIONS) if getattr(parsed, option[2:], None)]
    for option in ignored:
        log_without_effect(option)
    return TorchrunCommand(
        shlex.join(parsed.program),
        int(parsed.nnodes),
        int(parsed.nproc_per_node),
        parsed.max_restarts,
        any(option in NODE_CHECKS for option in ignored),
    )


def _parser(launcher: str) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1")
    parser.add_argument("--max_restarts", "--max-restarts", type=int)
    parser.add_argument("--standalone", action="store_true")
    if launcher == "dlrover-run":
        for option in DLROVER_SWITCHES:
            parser.add_argument(option, f"--{option[2:].replace('_', '-')}", action="store_true")
        for option in DLROVER_OPTIONS:
            parser.add_argument(*dict.fromkeys((option, f"--{option[2:].replace('_', '-')}")))
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser
