"""Input and output of a sandbox: `Program`, `Limits`, `Outcome`, and the interface `Sandbox`.

Two sorts of trouble are kept apart. What the program does is an outcome, whatever it does. That a sandbox cannot run
it is an error, `SandboxFailed`: it says nothing about the program, and is never a score.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from hybridrl.errors import ConfigError

MAX_CODE_BYTES = 1 << 20  # longer texts are no programs


class SandboxFailed(ConnectionError):
    """The sandbox itself failed. Like a lost connection: the program was not judged, and may be run again."""


class SandboxUnavailable(ConfigError):
    """This machine, or these settings, have no sandbox. The message has the reasons and the way out."""


class Verdict(StrEnum):
    """How a program ended."""

    OK = "ok"  # by itself, with exit status 0
    RUNTIME_ERROR = "runtime_error"  # with another status, by a signal, with too many processes or files
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    REFUSED = "refused"  # it was not started: too long


@dataclass(frozen=True)
class Limits:
    """What one program may use, all its processes together unless said otherwise.

    Attributes:
        wall_s: Time from its start to its end.
        memory_mb: Memory, and address space of each process.
        processes: Processes and threads at the same time.
        open_files: Of each process.
        output_kb: Standard output, and as much standard error; also the files that are fetched.
        disk_mb: Files in its directory, which is memory of the machine.
    """

    wall_s: float = 10.0
    memory_mb: int = 512
    processes: int = 32
    open_files: int = 64
    output_kb: int = 1024
    disk_mb: int = 64


@dataclass(frozen=True)
class Program:
    """A program and what it reads.

    Attributes:
        code: Source text.
        language: Which interpreter runs it: "python" or "bash"; a remote sandbox may have more.
        stdin: Standard input.
        files: Further files of its working directory, by relative name.
        fetch: Names of files to return when it has ended.

    Raises:
        ValueError: The name of a file leads out of the directory, or hides the program.
    """

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in (*self.files, *self.fetch):
            path = PurePosixPath(name)
            if str(path) != name or path.is_absolute() or ".." in path.parts or name in (".", "main.py", "main.sh"):
                raise ValueError(f"{name!r} is no name of a file below the program's directory")


PROBE = Program("import sys; print(sys.stdin.read()[::-1])", stdin="works")  # prints "skrow" where a sandbox works


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        verdict: How it ended.
        stdout, stderr: What it printed, up to the limit. Bytes that are no UTF-8 are replaced.
        exit_status: Its exit status, negative for a signal; None if it was not there to end.
        files: Those of `Program.fetch` that are there, ordinary files and not too large.
        cpu_s: Processor time of all its processes; None from a sandbox that does not say.
        detail: The verdict's reason in words; "" for `Verdict.OK`.
    """

    verdict: Verdict
    stdout: str = ""
    stderr: str = ""
    exit_status: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    cpu_s: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK


class Sandbox(Protocol):
    """Where programs run that nobody has read."""

    def run(self, program: Program) -> Outcome:
        """Return what became of the program, after its limit of time at the latest.

        Safe to call from several threads. Raises SandboxFailed if the program could not be judged.
        """

    def check(self) -> str:
        """Return what this sandbox is, in a few words, after it has run a program.

        Raises SandboxUnavailable with the reason and the way out.
        """


def refusal(program: Program) -> Outcome | None:
    """Return the outcome of a program that no sandbox runs, or None."""
    size = len(program.code.encode("utf-8", "surrogateescape"))
    if size <= MAX_CODE_BYTES:
        return None
    detail = f"its source has {size >> 10} KiB, more than {MAX_CODE_BYTES >> 10}"
    return Outcome(Verdict.REFUSED, detail=detail)
