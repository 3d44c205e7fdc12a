"""`LocalSandbox`: programs run on this machine, in namespaces of the Linux kernel.

There are two kinds of isolation, and `inside` is the same in both. "namespaces" makes the namespaces itself. "bwrap"
leaves that to bubblewrap, for users whom the machine allows namespaces only through that program. A program never runs
without one: where none works, `SandboxUnavailable` is raised.

`docs/sandbox.md` says what is guaranteed, and how to run the attacks on it.
"""

import functools
import marshal
import os
import random
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.rewards.sandbox.job import (
    PROBE,
    Limits,
    Outcome,
    Program,
    SandboxFailed,
    SandboxUnavailable,
    Verdict,
    refusal,
)

HERE = Path(__file__).parent
START = "import sys; sys.path.insert(0, sys.argv[1]); from inside import first_process; first_process.main()"
INSIDE = "/sandbox"  # where bwrap shows this folder
SETUP_TIMEOUT_S = 30.0  # for namespaces on a busy machine; the program's own time begins later
END_TIMEOUT_S = 5.0
FIRST_FREE_USER = 600_000_000  # numbers that no account of a machine has
NUM_USERS = 1 << 24
# Directories of libraries and programs, of those that exist. Links among them are made again.
SYSTEM_PATHS = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/lib32", "/bin", "/lib", "/lib64", "/lib32")
SYSTEM_FILES = ("/etc/ld.so.cache",)
# Without `site`, an interpreter starts three times faster, and sees no installed packages. Programs know exit().
RUN_PYTHON = (
    "import builtins, sys\n"
    "builtins.exit = builtins.quit = sys.exit\n"
    "sys.argv, sys.path[0] = ['main.py'], ''\n"
    "exec(compile(open('main.py', 'rb').read(), 'main.py', 'exec'))"
)
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}
WAY_OUT = (
    "run as a user who may make namespaces (in a container: --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined, or install bubblewrap), or name a remote sandbox: "
    "reward_model.sandbox_fusion.url"
)


class LocalSandbox:
    """Runs programs on this machine.

    Each program has its own namespaces, its own user where this process is root, and only `/tmp` to write to.

    Args:
        isolation: "namespaces" or "bwrap"; None: the first one that works here, found at the first use.
        bwrap: Path of bubblewrap; None: on the search path.
    """

    def __init__(self, isolation: str | None = None, *, bwrap: str | None = None):
        if isolation not in (None, "namespaces", "bwrap"):
            raise ValueError(f"isolation={isolation!r}: must be namespaces or bwrap")
        self._isolation, self._bwrap = isolation, bwrap

    def run(self, program: Program) -> Outcome:
        return refusal(program) or self._run_in(self._working_isolation(), program)

    def check(self) -> str:
        isolation = self._working_isolation()
        own = isolation == "namespaces" and has_free_users()
        return f"local, {isolation}; programs run as {'a user of their own' if own else 'this user'}, without rights"

    def _working_isolation(self) -> str:
        if self._isolation is None:
            self._isolation = find_isolation(self._bwrap)
        return self._isolation

    def _run_in(self, isolation: str, program: Program) -> Outcome:
        command, job = self._bwrap_command(program.limits) if isolation == "bwrap" else own_command(program.limits)
        return SandboxProcess(command, job | _job_of(program), program.limits).outcome(program.fetch)

    def _bwrap_command(self, limits: Limits) -> tuple[list[str], dict[str, Any]]:
        program = self._bwrap or shutil.which("bwrap")
        if program is None:
            raise SandboxUnavailable(f"bwrap is not installed; {WAY_OUT}")
        view = visible_files()
        command = [program, "--unshare-all", "--as-pid-1", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        for path in view["read_only"]:
            command += ["--ro-bind", path, path]
        for name, target in view["links"].items():
            command += ["--symlink", target, name]
        for path in view["hidden"]:
            command += ["--tmpfs", path, "--remount-ro", path]
        command += ["--ro-bind", str(HERE / "inside"), f"{INSIDE}/inside", "--proc", "/proc", "--dev", "/dev"]
        command += ["--remount-ro", "/dev", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/"]
        return [*command, "--", *_interpreter(INSIDE)], {"isolation": None, "user": None}


def _interpreter(folder: str) -> list[str]:
    return [python_file(), "-I", "-S", "-c", START, folder]


def own_command(limits: Limits, *, writable: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Return the command of a sandbox that makes its own namespaces, and its part of the job.

    Args:
        limits: For `disk_mb`.
        writable: Empty directories of the sandbox that programs may write to, besides `/tmp`.
    """
    free = has_free_users()
    isolation = visible_files() | {"user_namespace": not free, "disk_bytes": limits.disk_mb << 20}
    isolation["writable"] = list(writable)
    user = FIRST_FREE_USER + random.SystemRandom().randrange(NUM_USERS) if free else None
    return _interpreter(str(HERE)), {"isolation": isolation, "user": user}


def _job_of(program: Program) -> dict[str, Any]:
    """Return the parts of a job that do not depend on the isolation."""
    name, command = _command_of(program.language)
    return {
        "command": command,
        "environment": ENVIRONMENT,
        "files": {name: program.code.encode("utf-8", "surrogateescape"), **program.files},
        "stdin": program.stdin.encode("utf-8", "surrogateescape"),
        "fetch": list(program.fetch),
        "limits": limits_of_job(program.limits),
    }


def limits_of_job(limits: Limits) -> dict[str, float]:
    """Return limits as the first process reads them."""
    return {
        "wall_s": limits.wall_s,
        "cpu_s": limits.wall_s,
        "memory_bytes": limits.memory_mb << 20,
        "processes": limits.processes,
        "open_files": limits.open_files,
        "output_bytes": limits.output_kb << 10,
        "disk_bytes": limits.disk_mb << 20,
    }


def _command_of(language: str) -> tuple[str, list[str]]:
    """Return the name of a program's file, and the command that runs it."""
    if language == "python":
        return "main.py", [python_file(), "-S", "-s", "-c", RUN_PYTHON]
    if language == "bash":
        return "main.sh", ["/bin/bash", "main.sh"]
    raise SandboxFailed(
        f"language={language!r}: the local sandbox runs python and bash; reward_model.sandbox_fusion.url names one "
        "that runs more"
    )


@functools.cache
def python_file() -> str:
    """Return the file of this interpreter; a virtual environment's is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def visible_files() -> dict[str, Any]:
    """Return which files of the machine a program can read: system libraries and programs, and this interpreter.

    Packages of the interpreter are hidden. `inside.isolation.build_root` has the keys.
    """
    library = os.path.dirname(os.__file__)  # of the interpreter, also in a virtual environment
    own = [python_file(), library, *map(str, Path(library).parent.glob("libpython*.so*"))]
    read_only, links = [], {}
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            read_only.append(path)
    read_only += [path for path in SYSTEM_FILES if os.path.isfile(path)]
    read_only += [path for path in own if not any(path.startswith(f"{seen}/") for seen in read_only)]
    hidden = [path for path in (f"{library}/site-packages", f"{library}/dist-packages") if os.path.isdir(path)]
    return {"read_only": read_only, "links": links, "hidden": hidden}


@functools.cache
def has_free_users() -> bool:
    """Return whether this process may run a program as a user whom nobody else is."""
    if os.geteuid() != 0:
        return False
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_FREE_USER and first + size >= FIRST_FREE_USER + NUM_USERS for first, _, size in ranges)


def isolations_to_try() -> Sequence[str]:
    """Return the kinds of isolation in the order in which they are tried.

    bwrap shows more of `/proc`, and gives every program the user of this process. It is not for root, whose files a
    program could then read.
    """
    return ("namespaces",) if os.geteuid() == 0 else ("namespaces", "bwrap")


@functools.lru_cache(maxsize=1)
def find_isolation(bwrap: str | None = None) -> str:
    """Return the first isolation that works here: a program ran in it and read, printed, and ended.

    Raises:
        SandboxUnavailable: None does. Names why, each.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"this machine has no sandbox: {sys.platform} has no namespaces; name a remote sandbox: "
            "reward_model.sandbox_fusion.url"
        )
    reasons = []
    for isolation in isolations_to_try():
        try:
            outcome = LocalSandbox(isolation, bwrap=bwrap).run(PROBE)
            if outcome.ok and outcome.stdout == "skrow\n":
                return isolation
            reasons.append(f"{isolation}: a program that prints a word ended with {outcome.verdict} {outcome.detail}")
        except (SandboxFailed, SandboxUnavailable) as error:
            reasons.append(f"{isolation}: {str(error).partition('; run as')[0]}")
    raise SandboxUnavailable(f"this machine has no sandbox ({'; '.join(reasons)}): {WAY_OUT}")


def frame_of(job: Mapping[str, Any]) -> memoryview:
    """Return a job as the first process reads it."""
    payload = marshal.dumps(dict(job))
    return memoryview(len(payload).to_bytes(8, "big") + payload)


class SandboxProcess:
    """One program in isolation, seen from outside."""

    def __init__(self, command: list[str], job: Mapping[str, Any], limits: Limits):
        self.limits = limits
        report, report_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(report_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                bufsize=0,
                pass_fds=[report_end],
                start_new_session=True,
            )
        except OSError as error:
            os.close(report)
            raise SandboxFailed(f"{command[0]} cannot be started: {error}") from error
        finally:
            os.close(report_end)
        self._unsent = frame_of(job)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._streams = {"report": report, "stdout": self._process.stdout.fileno()}
        self._streams["stderr"] = self._process.stderr.fileno()
        self.received = {name: bytearray() for name in self._streams}

    def outcome(self, fetch: Sequence[str]) -> Outcome:
        """Return what became of the program. `fetch`: names of the files that it returns.

        Raises SandboxFailed.
        """
        try:
            flooded = self._exchange(time.monotonic() + self.limits.wall_s + SETUP_TIMEOUT_S)
        finally:
            self._end()
        return self._reported(fetch, self.limits, flooded)

    def _exchange(self, deadline: float) -> str:
        """Send the job, receive what comes; return the name of a stream that brought too much, or ""."""
        assert self._process.stdin is not None
        control, most = self._process.stdin.fileno(), self.limits.output_kb << 10
        bounds = {"report": 4096 + 2 * most, "stdout": most, "stderr": most}
        with selectors.DefaultSelector() as selector:
            for name, descriptor in self._streams.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            os.set_blocking(control, False)
            selector.register(control, selectors.EVENT_WRITE, "job")
            while set(selector.get_map()) - {control}:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise SandboxFailed(f"a sandbox did not end after {self.limits.wall_s + SETUP_TIMEOUT_S:g} s")
                for key, _ in selector.select(left_s):
                    if key.data == "job":
                        if self._send(control):
                            selector.unregister(control)
                    elif not (data := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fd)
                    else:
                        self.received[key.data] += data
                        if len(self.received[key.data]) > bounds[key.data]:
                            return key.data
        return ""

    def _send(self, control: int) -> bool:
        """Write a part of the job; return whether nothing is left to write."""
        try:
            self._unsent = self._unsent[os.write(control, self._unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # its end is reported elsewhere
            return True
        return not self._unsent

    def _end(self) -> None:
        """End the sandbox: the first process kills everything when the control pipe is closed."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        os.close(self._streams["report"])
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)

    def _printed(self, limits: Limits) -> Outcome:
        most = limits.output_kb << 10
        stdout, stderr = (self.received[name][:most].decode(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(Verdict.OK, stdout=stdout, stderr=stderr)

    def _reported(self, fetch: Sequence[str], limits: Limits, flooded: str) -> Outcome:
        """Return the outcome of a program with these limits, from the report of the first process.

        `flooded`: name of a stream to which it printed too much, or "".
        """
        if flooded:
            detail = f"it printed more than {limits.output_kb} KiB to {flooded}"
            return replace(self._printed(limits), verdict=Verdict.OUTPUT_LIMIT, detail=detail)
        head, _, rest = bytes(self.received["report"]).partition(b"\n")
        if not head:
            last = self.received["stderr"].decode(errors="replace").strip().splitlines()[-1:]
            raise SandboxFailed(f"the sandbox ended without a report: {' '.join(last) or 'it was killed'}")
        ended, *words = head.decode(errors="replace").split()
        if ended == "error":
            raise SandboxFailed(f"the sandbox could not start the program: {' '.join(words)}")
        status, cpu_s, num_files = words
        files = {}
        for _ in range(int(num_files)):
            head, _, rest = rest.partition(b"\n")
            index, size = map(int, head.split())
            files[fetch[index]], rest = rest[:size], rest[size:]
        exit_status = os.waitstatus_to_exitcode(int(status)) if ended == "ended" else None
        outcome = replace(self._printed(limits), exit_status=exit_status, cpu_s=float(cpu_s), files=files)
        return judged(outcome, ended, limits)


def judged(outcome: Outcome, ended: str, limits: Limits) -> Outcome:
    """Return the outcome with the verdict that follows from why the wait for the program has ended."""
    out_of_memory = outcome.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
    if ended == "timeout" or (outcome.exit_status in (-9, -24) and (outcome.cpu_s or 0.0) >= limits.wall_s):
        return replace(outcome, verdict=Verdict.TIMEOUT, detail=f"it was not done after {limits.wall_s:g} s")
    if ended == "memory" or (outcome.exit_status not in (0, None) and out_of_memory):
        return replace(outcome, verdict=Verdict.MEMORY, detail=f"it needed more than {limits.memory_mb} MB")
    if ended in ("processes", "files"):
        detail = f"it had more than {limits.processes} processes" if ended == "processes" else "it made too many files"
        return replace(outcome, verdict=Verdict.RUNTIME_ERROR, detail=detail)
    if ended == "ended" and outcome.exit_status == 0:
        return outcome
    if outcome.exit_status is None:
        raise SandboxFailed("a sandbox was cancelled")
    how = f"by signal {-outcome.exit_status}" if outcome.exit_status < 0 else f"with status {outcome.exit_status}"
    return replace(outcome, verdict=Verdict.RUNTIME_ERROR, detail=f"it ended {how}")
