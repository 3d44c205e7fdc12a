"""The first process of a sandbox: it starts the program, keeps its limits, ends all of it, and reports.

`LocalSandbox` starts it with a bare interpreter:

    python -I -S -c "..." DIRECTORY REPORT_FD

Standard input is the control pipe: 8 bytes of length, the job as JSON, and then nothing until the parent closes it or
ends, which ends the sandbox. Standard output and error are the program's. The report is one JSON object at REPORT_FD,
which the program does not have: it may print what it likes, but how it ended is said by this process alone.

This process is number 1 of a process namespace. So the kernel protects it from the program's signals, gives it the
orphans, and kills what is left when it ends.
"""

import binascii
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from . import kernel, walls

WATCH_PERIOD_S = 0.02  # between two looks at memory and number of processes
WORK_DIRECTORY = "/tmp"
MIB = 1 << 20


def main() -> NoReturn:
    """Read the job, enter the sandbox if this is not done, and be its first process."""
    report, job = int(sys.argv[2]), read_job()
    os.set_inheritable(report, False)
    try:
        if job["wall"] is None:
            serve(job, report)
        walls.enter(job["wall"])
        first = os.fork()
        if first == 0:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            serve(job, report)
    except BaseException as error:
        send(report, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    for descriptor in (0, 1, 2, report):
        os.close(descriptor)
    os.waitpid(first, 0)  # the first process ends at its job's limit of time
    os._exit(0)


def read_job() -> dict[str, Any]:
    """Return the job at the control pipe."""
    size = int.from_bytes(read_exactly(8), "big")
    return json.loads(read_exactly(size))


def read_exactly(size: int) -> bytes:
    """Return so many bytes of the control pipe; end if the parent has."""
    parts = []
    while size:
        part = os.read(0, min(size, MIB))
        if not part:
            os._exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(report: int, answer: dict[str, Any]) -> None:
    """Write the report."""
    data = json.dumps(answer).encode()
    with suppress(BrokenPipeError):
        while data:
            data = data[os.write(report, data) :]


def serve(job: dict[str, Any], report: int) -> NoReturn:
    """Run the job's program as the first process, report, and end with all that it started."""
    if os.getpid() != 1:  # everything here would then apply to the machine
        raise RuntimeError("this process is not the first of a process namespace")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    if job["wall"] is not None:
        walls.build_root(job["wall"])
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the program may have the same user, but not this process's descriptors
    place_files(job)
    child, failure = start(job)
    if failure:
        send(report, {"error": failure})
        os._exit(1)
    watched = Watched(child, job["limits"])
    ended = watched.wait()
    kill_all(watched)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = {"ended": ended, "status": watched.status, "cpu_s": usage.ru_utime + usage.ru_stime}
    send(report, answer | {"files": fetch_files(job["fetch"], max_bytes=job["limits"]["output_bytes"])})
    os._exit(0)


def place_files(job: dict[str, Any]) -> None:
    """Write the program's files, which then belong to its user."""
    os.chdir(WORK_DIRECTORY)
    for name, content in job["files"].items():
        if directory := os.path.dirname(name):
            os.makedirs(directory, exist_ok=True)
        with open(name, "wb") as file:
            file.write(binascii.a2b_base64(content))
    if job["user"] is not None:
        for root, directories, files in os.walk("."):
            for name in (root, *(os.path.join(root, entry) for entry in directories + files)):
                os.chown(name, job["user"], job["user"])


def start(job: dict[str, Any]) -> tuple[int, str]:
    """Return the program's process id, and why it could not be started or ""."""
    told, tell = os.pipe()
    stdin = open_input(job["stdin"])
    child = os.fork()
    if child == 0:
        try:
            become_program(job, stdin, keep=tell)
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(1)
    os.close(tell)
    os.close(stdin)
    with open(told, "rb") as file:
        failure = file.read().decode(errors="replace")  # ends with the exec: the program does not inherit the pipe
    return child, failure


def open_input(text: str) -> int:
    """Return a descriptor that reads a text: a file without a name, so that nobody has to write."""
    descriptor = os.open(WORK_DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return reader


def become_program(job: dict[str, Any], stdin: int, *, keep: int) -> NoReturn:
    """Give up all rights and execute the program. Raises if something fails."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # a program inherits what is ignored
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.dup2(stdin, 0)
    os.closerange(3, keep)
    os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    set_limits(job["limits"])
    kernel.drop_bounding_set()
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(*[job["user"]] * 3)
        os.setresuid(*[job["user"]] * 3)
    kernel.clear_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.filter_system_calls()
    os.execve(job["command"][0], job["command"], job["environment"])


def set_limits(limits: dict[str, Any]) -> None:
    """Set the limits of the program's processes; those of this process, if lower, stay."""
    cpu_s = int(limits["cpu_s"]) + 1
    wanted = {
        resource.RLIMIT_AS: (limits["memory_bytes"],) * 2,
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NPROC: (limits["processes"],) * 2,
        resource.RLIMIT_NOFILE: (limits["open_files"],) * 2,
        resource.RLIMIT_FSIZE: (limits["disk_bytes"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for kind, values in wanted.items():
        hard = resource.getrlimit(kind)[1]
        soft, most = (value if hard == resource.RLIM_INFINITY else min(value, hard) for value in values)
        resource.setrlimit(kind, (soft, most))


class Watched:
    """A running program.

    Attributes:
        status: Its wait status; None while it runs.
    """

    def __init__(self, child: int, limits: dict[str, Any]):
        self.child, self.limits = child, limits
        self.status: int | None = None
        self._deadline = time.monotonic() + limits["wall_s"]

    def wait(self) -> str:
        """Return why the wait has ended: "ended", "timeout", "memory", "processes", or "cancelled" by the parent."""
        control = select.poll()
        control.register(0, select.POLLIN)
        while True:
            self.reap()
            if self.status is not None:
                return "ended"
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            if control.poll(0):
                return "cancelled"
            memory_bytes, processes = usage_of_all()
            if memory_bytes > self.limits["memory_bytes"]:
                return "memory"
            if processes > self.limits["processes"]:
                return "processes"
            signal.sigtimedwait([signal.SIGCHLD], min(WATCH_PERIOD_S, left_s))

    def reap(self) -> bool:
        """Collect the processes that have ended; return whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status


def usage_of_all() -> tuple[int, int]:
    """Return the memory of all processes but this one, in bytes, and their number. Files do not count."""
    memory_kib = processes = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        processes += 1
        with suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
            for line in file:
                if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                    memory_kib += int(line.split()[1])
    return memory_kib << 10, processes


def kill_all(watched: Watched) -> None:
    """Kill every other process of the sandbox and wait for their ends."""
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not watched.reap():
            return
        signal.sigtimedwait([signal.SIGCHLD], WATCH_PERIOD_S)


def fetch_files(names: list[str], *, max_bytes: int) -> dict[str, str]:
    """Return the named files of the working directory that are ordinary files, base64.

    Links are not followed, in no part of a path. Nothing runs any more that could exchange one.
    """
    found: dict[str, str] = {}
    for name in names:
        with suppress(OSError):
            content = read_ordinary_file(name, max_bytes=max_bytes)
            max_bytes -= len(content)
            found[name] = binascii.b2a_base64(content, newline=False).decode()
    return found


def read_ordinary_file(name: str, *, max_bytes: int) -> bytes:
    """Return the content of a file below the working directory. Raises OSError for anything else."""
    directory = os.open(WORK_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    finally:
        os.close(directory)
    with open(descriptor, "rb") as file:
        kind = os.fstat(descriptor)
        if not stat.S_ISREG(kind.st_mode) or kind.st_size > max_bytes:
            raise OSError(f"{name} is no ordinary file of at most {max_bytes} bytes")
        return file.read()
