"""The commands of a launch script: bash runs it in a sandbox, without its programs.

Programs are noted, and the sandbox is that of rewards. What a program would print becomes a mark in the text, so that
no value that depends on it is made up. Every program counts as successful, but for `python -c "import PACKAGE"`, which
says whether this machine has the package. Directories are names only: `cd` and `pwd` work without them. Other files
than the script are not there.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.rewards.sandbox.job import Limits, Program, SandboxFailed, SandboxUnavailable
from hybridrl.rewards.sandbox.local import LocalSandbox

UNKNOWN, BLANK = "\1", "\2"  # encloses the words of a program whose output would be here; between them
LIMITS = Limits(processes=128)
WAY_OUT = "give its command line: hybridrl import-verl python3 -m verl.trainer.main_ppo key=value ..."
SCRIPT, COMMANDS, UNDECIDED = "script.sh", "commands", "undecided"
WITHOUT_PROGRAMS = Path(__file__).with_name("without_programs.sh")


class ScriptRun(NamedTuple):
    """What bash made of a script.

    Attributes:
        commands: Words of each program that the script would run, in its order.
        problems: What bash or a test could not do without the output of a program.
    """

    commands: list[list[str]]
    problems: list[str]


def run_script(text: str, environment: Mapping[str, str], *, path: str, arguments: list[str]) -> ScriptRun:
    """Run a bash script without its programs.

    Args:
        text: The script.
        environment: Variables; the script sees those that it names.
        path: Of the script, which is `$0`.
        arguments: The script's own arguments.

    Raises:
        ConfigError: This machine has no sandbox, or the script did not end in time, with its memory and output.
    """
    packages = {name for name in re.findall(r"import (\w+)", text) if PathFinder.find_spec(name)}
    given = {name: environment.get(name, "/") for name in ("HOME", "PWD")}
    given |= {name: environment[name] for name in {*re.findall(r"[A-Za-z_]\w*", text)} & environment.keys() - {"PATH"}}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
    lines += [f"BASH_ARGV0={shlex.quote(path)}", f"installed_packages={shlex.quote(' '.join(packages))}"]
    lines += [shlex.join(["set", "--", *arguments]), WITHOUT_PROGRAMS.read_text()]
    script = text.replace("BASH_SOURCE", "BASH_ARGV0").encode("utf-8", "surrogateescape")
    program = Program("\n".join(lines), "bash", files={SCRIPT: script}, fetch=(COMMANDS, UNDECIDED), limits=LIMITS)
    try:
        outcome = LocalSandbox().run(program)
    except (SandboxUnavailable, SandboxFailed) as error:
        raise ConfigError(f"{path}: bash reads it in a sandbox, and {error}; or {WAY_OUT}") from None
    is_too_long = ": cannot allocate " in outcome.stderr
    if outcome.exit_status is None or outcome.exit_status < 0 or is_too_long:
        why = "a variable is too long" if is_too_long else outcome.detail
        raise ConfigError(f"{path}: bash could not follow it: {why}; {WAY_OUT}")
    said = outcome.stderr.replace(f"/tmp/{SCRIPT}", path).splitlines()
    problems = [line for line in said if re.search(r": line \d+: ", line)]
    problems += outcome.files.get(UNDECIDED, b"").decode("utf-8", "surrogateescape").splitlines()
    shown = [line.replace(UNKNOWN, "`").replace(BLANK, " ") for line in dict.fromkeys(problems)]
    return ScriptRun([*_noted(outcome.files.get(COMMANDS, b""))], shown)


def unresolved(word: str) -> list[str]:
    """Return the programs on whose output a word depends."""
    return re.findall(f"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}", word.replace(BLANK, " "))


def _noted(content: bytes) -> Iterator[list[str]]:
    """Yield the words of each command: their number, and each word, all ended by a zero byte."""
    words = iter(content.decode("utf-8", "surrogateescape").split("\0")[:-1])
    while (number := next(words, "")).isdecimal():  # the script may have written anything there
        yield [*islice(words, int(number[:6]))]
