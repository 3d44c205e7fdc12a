"""A command line of torchrun, or of DLRover's dlrover-run, as what a role is told."""

import argparse
import shlex
from typing import NamedTuple, NoReturn

from hybridrl.errors import ConfigError

LAUNCHERS = ("torchrun", "dlrover-run")


class Torchrun(NamedTuple):
    """program: with its arguments, as text. max_restart: None where the command does not say."""

    program: str
    num_nodes: int
    per_node: int
    max_restart: int | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; known are --nnodes, --nproc_per_node and --max_restarts, then the program and its arguments")


def parse(command: str) -> Torchrun:
    """Return what `torchrun --nnodes 2 --nproc_per_node 4 train.py --lr 0.1` says.

    Raises ConfigError for another launcher, for options that say where processes meet or log (that is the job's to say), and for a number
    of nodes or processes that is not one.
    """
    launcher, *words = shlex.split(command) or [""]
    if launcher not in LAUNCHERS:
        raise ConfigError(f"command={command!r} does not begin with {' or '.join(LAUNCHERS)}; for a program alone there is run('train.py')")
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
        raise ConfigError(f"command={command!r}: {' '.join(said.program) or 'nothing'!r} is no program that ends with .py")
    counts = {"--nnodes": said.nnodes, "--nproc_per_node": said.nproc_per_node}
    for option, count in counts.items():
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"command={command!r}: {option} {count} must be a whole number, 1 or more; a job's size is fixed")
    return Torchrun(shlex.join(said.program), int(said.nnodes), int(said.nproc_per_node), said.max_restarts)
