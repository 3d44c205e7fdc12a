"""The first process of a sandbox: it starts the program, keeps its limits, ends all of it, and reports.

`LocalSandbox` starts it with a bare interpreter, and it imports little, because it starts once per program:

    python -I -S -c "..." DIRECTORY REPORT_FD

Standard input is the control pipe: 8 bytes of length, the job as `marshal` writes it, and then nothing until the parent
closes it or ends, which ends the sandbox. Standard output and error are the program's. The report goes to REPORT_FD,
which the program does not have: it may print what it likes, but how it ended is said by this process alone.

    ENDED STATUS CPU_S NUMBER_OF_FILES      then per file: INDEX SIZE, and its bytes
    error TEXT                              the sandbox failed

A job without a command opens a session, in which programs run one after the other on the same files. Its report is
"ready". Each further job on the control pipe, after the byte "j", has a report of its own. The byte "c" ends the
program that runs.

This process is number 1 of a process namespace. So the kernel protects it from the program's signals, gives it the
orphans, and kills what is left when it ends.
"""

import marshal
import os
import select
import stat
import sys
import time

from . import isolation, kernel

WATCH_PERIOD_S = 0.02  # between two looks at memory and number of processes
REAP_PERIOD_S = 0.002  # while killed processes end
WORK_DIRECTORY = "/tmp"
MIB = 1 << 20
SIGINT, SIGKILL, SIGPIPE, SIGXFSZ = 2, 9, 13, 25
# bits/resource.h
LIMITS = {"AS": 9, "CPU": 0, "NPROC": 6, "NOFILE": 7, "FSIZE": 1, "CORE": 4, "MSGQUEUE": 12, "MEMLOCK": 8}
MAX_FILES = 1 << 16  # descriptors that are closed before the program


def main() -> None:
    """Read the job, enter the sandbox if this is not done, and be its first process. Does not return."""
    report, job = int(sys.argv[2]), read_job()
    os.set_inheritable(report, False)
    try:
        if job["isolation"] is None:
            serve(job, report)
        isolation.enter(job["isolation"])
        first = os.fork()
        if first == 0:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
            serve(job, report)
    except BaseException as error:
        send(report, f"error {type(error).__name__}: {error}".encode())
        os._exit(1)
    for descriptor in (0, 1, 2, report):
        os.close(descriptor)
    os.waitpid(first, 0)  # the first process ends at its job's limit of time
    os._exit(0)


def read_job() -> dict:
    """Return the job at the control pipe."""
    return marshal.loads(read_exactly(int.from_bytes(read_exactly(8), "big")))


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


def send(report: int, data: bytes) -> None:
    """Write a part of the report."""
    try:
        while data:
            data = data[os.write(report, data) :]
    except BrokenPipeError:  # the parent has what it wants, or has ended
        pass


def serve(job: dict, report: int) -> None:
    """Run the job's program as the first process, report, and end with all that it started. Does not return."""
    if os.getpid() != 1:  # everything here would then apply to the machine
        raise RuntimeError("this process is not the first of a process namespace")
    kernel.set_signal(SIGINT, kernel.SIG_IGN)
    if job["isolation"] is not None:
        isolation.build_root(job["isolation"])
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the program may have the same user, but not this process's descriptors
    place_files(job)
    if job["command"] is None:
        send(report, b"ready\n")
        while True:  # read_next ends this process when the parent closes the pipe
            run_program(job | read_next(), report)
    is_judged = run_program(job, report)
    os._exit(0 if is_judged else 1)


def read_next() -> dict:
    """Return the next job of a session. "c" before it was meant for a program that had ended."""
    while read_exactly(1) == b"c":
        continue
    return read_job()


def run_program(job: dict, report: int) -> bool:
    """Run one program until it and all that it started have ended, and report. Return whether it was started."""
    cpu_s_before = kernel.cpu_s_of_children()
    try:
        child, failure = start(job)
    except OSError as error:  # such as a directory that is full
        child, failure = 0, str(error)
    if failure:
        send(report, f"error {failure}\n".encode())
        return False
    watched = Watched(child, job["limits"])
    ended = watched.wait()
    kill_all(watched)
    files = fetch_files(job["fetch"], max_bytes=job["limits"]["output_bytes"])
    cpu_s = kernel.cpu_s_of_children() - cpu_s_before
    send(report, f"{ended} {watched.status} {cpu_s:.6f} {len(files)}\n".encode())
    for index, content in files.items():
        send(report, f"{index} {len(content)}\n".encode() + content)
    return True


def place_files(job: dict) -> None:
    """Write the program's files. They, and the directories that it may write to, then belong to its user."""
    os.chdir(WORK_DIRECTORY)
    for name, content in job["files"].items():
        if directory := os.path.dirname(name):
            os.makedirs(directory, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    if job["user"] is None:
        return
    for root, directories, files in os.walk("."):
        for name in (root, *(os.path.join(root, entry) for entry in directories + files)):
            os.chown(name, job["user"], job["user"])
    for name in job["isolation"]["writable"]:
        os.chown(name, job["user"], job["user"])


def start(job: dict) -> tuple[int, str]:
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


def open_input(content: bytes) -> int:
    """Return a descriptor that reads the input: a file without a name, so that nobody has to write."""
    if not content:
        return os.open("/dev/null", os.O_RDONLY)
    descriptor = os.open(WORK_DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return reader


def become_program(job: dict, stdin: int, *, keep: int) -> None:
    """Give up all rights and execute the program. Does not return; raises if something fails."""
    os.setsid()
    for number in (SIGINT, SIGPIPE, SIGXFSZ):  # a program inherits what is ignored
        kernel.set_signal(number, kernel.SIG_DFL)
    os.dup2(stdin, 0)
    os.closerange(3, keep)
    os.closerange(keep + 1, MAX_FILES)
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


def set_limits(limits: dict) -> None:
    """Set the limits of the program's processes."""
    cpu_s = int(limits["cpu_s"]) + 1
    wanted = {"AS": limits["memory_bytes"], "CPU": cpu_s, "NPROC": limits["processes"], "NOFILE": limits["open_files"]}
    wanted |= {"FSIZE": limits["disk_bytes"], "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    for name, value in wanted.items():
        kernel.set_limit(LIMITS[name], value, value + (name == "CPU"))


class Watched:
    """A running program.

    Attributes:
        status: Its wait status; None while it runs.
    """

    def __init__(self, child: int, limits: dict):
        self.child, self.limits = child, limits
        self.status: int | None = None
        self._deadline = time.monotonic() + limits["wall_s"]
        self._control = select.poll()
        self._control.register(0, select.POLLIN)
        self._either = select.poll()
        for descriptor in (0, os.pidfd_open(child)):
            self._either.register(descriptor, select.POLLIN)

    def wait(self) -> str:
        """Return why the wait has ended.

        This is "ended", "timeout", "memory", "processes", "files", or "cancelled" by the parent.
        """
        while True:
            self.reap()
            if self.status is not None:
                return "ended"
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            if self._control.poll(0):
                return "cancelled"
            memory_bytes, processes = usage_of_all()
            if memory_bytes > self.limits["memory_bytes"]:
                return "memory"
            if processes > self.limits["processes"]:
                return "processes"
            disk = os.statvfs(WORK_DIRECTORY)
            if disk.f_files - disk.f_ffree > isolation.MAX_INODES:  # bwrap cannot set it for the directory
                return "files"
            self._either.poll(min(WATCH_PERIOD_S, left_s) * 1000)

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
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                        memory_kib += int(line.split()[1])
        except OSError:  # it has ended
            continue
    return memory_kib << 10, processes


def kill_all(watched: Watched) -> None:
    """Kill every other process of the sandbox and wait for their ends."""
    while watched.reap():
        try:
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            continue
        time.sleep(REAP_PERIOD_S)


def fetch_files(names: list[str], *, max_bytes: int) -> dict[int, bytes]:
    """Return the contents of those named files of the working directory that are ordinary files, by index.

    Links are not followed, in no part of a path. Nothing runs any more that could exchange one.
    """
    found: dict[int, bytes] = {}
    for index, name in enumerate(names):
        try:
            found[index] = read_ordinary_file(name, max_bytes=max_bytes)
        except OSError:
            continue
        max_bytes -= len(found[index])
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
