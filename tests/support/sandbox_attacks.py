"""Attacks on the sandbox, as programs. `tests/rewards/sandbox/test_runner.py` runs each; this prints what happened.

    python -m tests.support.sandbox_attacks [--isolation namespaces|bwrap] [--bwrap PATH] [--session]

A program prints ESCAPED and how, where it got what it should not. The other conditions are looked at from outside:
the verdict, what a stranger at the sockets of this process has said, and processes that are left.
"""

import argparse
import contextlib
import os
import shlex
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from examples.harbor.sandbox_session import SandboxSession
from hybridrl.rewards.sandbox import Limits, LocalSandbox, Outcome, Program, Verdict
from hybridrl.rewards.sandbox.job import refusal
from hybridrl.rewards.sandbox.local import RUN_PYTHON, python_file

SECRET = f"secret-{uuid.uuid4().hex}"
VARIABLE = "HYBRIDRL_TEST_SECRET"
SECOND_DIRECTORY = "/tmp-of-a-session"  # an attack that writes everywhere leaves out what begins with /tmp
ENDS = Limits(wall_s=30.0, memory_mb=256, disk_mb=16, output_kb=64)  # the attack ends by itself
HANGS = replace(ENDS, wall_s=1.0)  # the attack lasts until it is ended

OK, ERROR, TIMEOUT, MEMORY = Verdict.OK, Verdict.RUNTIME_ERROR, Verdict.TIMEOUT, Verdict.MEMORY

# Before every attack. {mark} becomes the name of its processes, {site} what the parent has.
PRELUDE = """
import os, sys, ctypes, signal, socket, resource, time
open("/proc/self/comm", "w").write({mark!r})
secret_file, port, abstract, secret = {site!r}
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, call):
    try:
        result = call()
    except (OSError, ValueError):
        return
    if result != -1:
        print("ESCAPED", what, repr(result)[:80])
"""


@dataclass(frozen=True)
class Attack:
    """A program, and the verdicts that are no escape. `happens`: what is seen, for the table."""

    name: str
    code: str
    happens: str
    verdicts: tuple[Verdict, ...] = (OK,)
    limits: Limits = ENDS
    fetch: tuple[str, ...] = ()
    stdin: str = ""


ATTACKS = (
    Attack(
        "fork bomb",
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "no more than 32 processes; all are killed at the limit of time",
        (TIMEOUT, ERROR),
        HANGS,
    ),
    Attack(
        "memory bomb",
        "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))",
        "killed at the limit",
        (MEMORY,),
    ),
    Attack(
        "memory bomb of 20 processes",
        "for _ in range(20):\n    if os.fork() == 0:\n        hoard = bytearray(os.urandom(1 << 20)) * 60\n"
        "        break\n"
        "time.sleep(600)",
        "their sum counts: killed at the limit",
        (MEMORY,),
    ),
    Attack(
        "shared memory of 20 processes",
        "import mmap\nhoard = []\nfor _ in range(20):\n    if os.fork() == 0:\n"
        "        hoard = mmap.mmap(-1, 60 << 20)\n"
        "        hoard.write(bytes(60 << 20))\n        break\ntime.sleep(600)",
        "killed at the limit",
        (MEMORY,),
    ),
    Attack(
        "memory without an owner (memfd_create, System V)",
        "attempt('memfd', lambda: os.memfd_create('x'))\nattempt('shmget', lambda: libc.shmget(0, 1 << 28, 0o1600))",
        "EPERM",
    ),
    Attack(
        "signals are ignored",
        "for number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n    except (OSError, "
        "ValueError):\n        pass\nwhile True:\n    time.sleep(1)",
        "killed at the limit of time",
        (TIMEOUT,),
        HANGS,
    ),
    Attack("sleeps for ever", "time.sleep(1e6)", "killed at the limit of time", (TIMEOUT,), HANGS),
    Attack(
        "burns the processor in 8 processes",
        "for _ in range(7):\n    if os.fork() == 0:\n        break\nwhile True:\n    pass",
        "killed at the limit of time",
        (TIMEOUT,),
        HANGS,
    ),
    Attack(
        "floods standard output",
        "while True:\n    os.write(1, b'x' * 65536)",
        "ended at 64 KiB",
        (Verdict.OUTPUT_LIMIT,),
    ),
    Attack(
        "floods standard error",
        "while True:\n    os.write(2, b'x' * 65536)",
        "ended at 64 KiB",
        (Verdict.OUTPUT_LIMIT,),
    ),
    Attack(
        "fills the disk",
        "try:\n    number = 0\n    while True:\n        with open(f'f{number}', 'wb') as file:\n"
        "            for _ in range(8):\n                file.write(bytes(1 << 20))\n        number += 1\n"
        "except OSError as error:\n    print(error.errno)\n"
        "size = sum(os.stat(name).st_size for name in os.listdir('.'))\n"
        "if size > 16 << 20: print('ESCAPED', size)",
        "no space left at 16 MiB",
    ),
    Attack(
        "a sparse file of 1 TiB",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nattempt('truncate', lambda: os.truncate(os.open('f', "
        "os.O_CREAT | os.O_RDWR), 1 << 40))\nif os.path.getsize('f'): print('ESCAPED')",
        "too large",
    ),
    Attack(
        "100,000 empty files",
        "try:\n    for number in range(100000):\n        os.close(os.open(f'f{number}', os.O_CREAT))\n"
        "    print('ESCAPED')\nexcept OSError as error:\n    print(error.errno)",
        "no space left",
        (OK, ERROR),
    ),
    Attack(
        "opens 10,000 files",
        "hoard = []\nattempt('raise', lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10000, 10000)))\ntry:\n"
        "    for _ in range(10000):\n        hoard.append(os.open('/dev/null', 0))\n    print('ESCAPED')\n"
        "except OSError as error:\n    print(error.errno)",
        "64 per process; limits cannot be raised",
    ),
    Attack(
        "a daemon in a session of its own",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\nprint('done')",
        "ends with the program",
    ),
    Attack(
        "a flood of zombies",
        "try:\n    for _ in range(10000):\n        if os.fork() == 0:\n            os._exit(0)\n    print('ESCAPED')\n"
        "except OSError as error:\n    print(error.errno)",
        "they count as processes; the first process collects orphans",
    ),
    Attack(
        "reads files of the parent",
        "for path in (secret_file, '/etc/shadow', '/etc/passwd', os.path.join('/root', '.ssh'), '/home',\n"
        "             os.path.join('/proc/1/root', 'etc/passwd'), f'/proc/self/cwd/../{secret_file}',\n"
        "             '/sys/kernel', '/dev/mem', '/dev/sda', '/dev/vda'):\n"
        "    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(100))",
        "they are not there",
    ),
    Attack(
        "reads the environment of every process",
        "if any(secret in value for value in os.environ.values()):\n    print('ESCAPED own')\n"
        "for name in ('self', 'thread-self', *map(str, range(1, 70000))):\n    try:\n"
        "        if secret.encode() in open(f'/proc/{name}/environ', 'rb').read():\n"
        "            print('ESCAPED', name)\n"
        "    except OSError:\n        pass",
        "the parent has no number here; the variables are the sandbox's",
    ),
    Attack(
        "descriptors of the parent",
        "listing = set(os.listdir('/proc/self/fd')) - {'0', '1', '2', '3'}\nif listing: print('ESCAPED', listing)\n"
        "attempt('fds of 1', lambda: os.listdir('/proc/1/fd'))\n"
        "attempt('memory of 1', lambda: open('/proc/1/mem', 'rb'))",
        "it has three; those of the first process are denied",
    ),
    Attack(
        "connects to the network, also loopback",
        "def connect(family, address):\n    s = socket.socket(family, socket.SOCK_STREAM)\n    s.settimeout(2)\n"
        "    s.connect(address)\n"
        "attempt('loopback', lambda: connect(socket.AF_INET, ('127.0.0.1', port)))\n"
        "attempt('outside', lambda: connect(socket.AF_INET, ('8.8.8.8', 53)))\n"
        "attempt('abstract', lambda: connect(socket.AF_UNIX, abstract))\n"
        "for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG):\n"
        "    attempt(family, lambda: socket.socket(family, socket.SOCK_DGRAM))",
        "unreachable; other families are refused",
    ),
    Attack(
        "writes outside its directory",
        "for root, folders, _ in os.walk('/'):\n    if root.startswith(('/proc', '/tmp')):\n        folders.clear()\n"
        "        continue\n    if root.count('/') > 4: folders.clear()\n"
        "    attempt(root, lambda: os.open(f'{root}/x', os.O_CREAT | os.O_WRONLY))",
        "the file system is read-only",
    ),
    Attack(
        "deletes the interpreter",
        "import shutil\nattempt('remove', lambda: os.remove(os.path.realpath(sys.executable)))\n"
        "attempt('write', lambda: open(os.__file__, 'w'))\nshutil.rmtree('/usr', ignore_errors=True)\n"
        "shutil.rmtree('/', ignore_errors=True)\nprint(len(os.listdir('/usr/bin')) > 0)",
        "read-only file system",
    ),
    Attack(
        "kills all it can, and stops the first process",
        "for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):\n"
        "    for pid in (1, os.getppid(), -1):\n        try:\n            os.kill(pid, number)\n"
        "        except OSError:\n            pass\nprint('alive')",
        "the kernel protects the first process; others are not seen",
        (OK, ERROR),
    ),
    Attack(
        "traces and reads other processes",
        "attempt('attach', lambda: libc.ptrace(16, 1, 0, 0))\nattempt('seize', lambda: libc.ptrace(0x4206, 1, 0, 0))\n"
        "attempt('traceme', lambda: libc.ptrace(0, 0, 0, 0))\n"
        "attempt('readv', lambda: libc.process_vm_readv(1, None, 0, None, 0, 0))",
        "EPERM",
    ),
    Attack(
        "makes namespaces, mounts, changes the machine",
        "for flag in (0x00020000, 0x10000000, 0x40000000):\n    attempt('unshare', lambda: libc.unshare(flag))\n"
        "attempt('mount', lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
        "attempt('umount', lambda: libc.umount2(b'/proc', 2))\nattempt('chroot', lambda: libc.chroot(b'/tmp'))\n"
        "clone = 56 if os.uname().machine == 'x86_64' else 220\n"
        "attempt('clone', lambda: libc.syscall(clone, 0x10000011, 0, 0, 0, 0))\n"
        "attempt('hostname', lambda: libc.sethostname(b'x', 1))\nattempt('clock', lambda: time.clock_settime(0, 0))\n"
        "attempt('bpf', lambda: libc.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, None, 0))",
        "EPERM",
    ),
    Attack(
        "becomes somebody else",
        "attempt('setuid', lambda: os.setuid(0) or 'root')\nattempt('setgroups', lambda: os.setgroups([0]))\n"
        "attempt('nice', lambda: os.nice(-10))\n"
        "attempt('capabilities', lambda: libc.prctl(24, 1, 0, 0, 0) == 0 and 'dropped' or -1)\n"
        "open('own', 'w').close()\nattempt('setuid bit', lambda: (os.chmod('own', 0o4755), os.chown('own', 0, 0)))",
        "EPERM",
    ),
    Attack(
        "links and pipes among the returned files",
        "os.symlink('/proc/1/environ', 'a')\nos.symlink(secret_file, 'b')\nos.symlink('/etc', 'c')\nos.mkfifo('d')\n"
        "os.mkdir('e')\nos.symlink('..', 'e/f')\nos.symlink('/dev/zero', 'g')\nopen('h', 'w').write('mine')\n"
        "os.truncate(os.open('i', os.O_CREAT | os.O_RDWR), 1 << 23)",
        "only ordinary files of the directory are returned",
        fetch=("a", "b", "c/ld.so.cache", "d", "e/f/h", "e", "g", "h", "i"),
    ),
    Attack(
        "standard input that is never read",
        "print('done')",
        "nothing waits for it",
        stdin="x" * (4 << 20),
    ),
    Attack(
        "recursion without an end",
        "sys.setrecursionlimit(10**9)\nimport functools\nnested = []\nfor _ in range(10**6):\n    nested = [nested]\n"
        "print(len(repr(nested)))",
        "a signal, or no memory, for this program alone",
        (ERROR, MEMORY),
    ),
    Attack(
        "forges its report and exit status",
        "report = b'ended 0 0.0 0\\n'\n"
        "for number in range(1024):\n    try:\n        os.write(number, report)\n    except OSError:\n        pass\n"
        "for name in os.listdir('/proc'):\n    for number in range(64):\n        try:\n"
        "            open(f'/proc/{name}/fd/{number}', 'wb').write(report)\n        except OSError:\n            pass\n"
        "os._exit(3)",
        "status 3 is reported: the report has a channel of its own",
        (ERROR,),
    ),
    Attack(
        "a terminal to type into",
        "attempt('tty', lambda: os.open('/dev/tty', os.O_RDWR))\nimport fcntl\n"
        "attempt('type', lambda: [fcntl.ioctl(n, 0x5412, b'x') for n in range(3)])",
        "there is none",
    ),
    Attack("a source of 2 MiB", "#" * (2 << 20), "not started", (Verdict.REFUSED,)),
)


class Site:
    """What the parent has that a program must not reach: a file, a variable, sockets that count their visitors."""

    def __init__(self, folder: Path):
        self.file = folder / "secret.txt"
        self.file.write_text(SECRET)
        os.environ[VARIABLE] = SECRET
        self.abstract = f"\0{SECRET}"
        self.visitors = 0
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self._listeners.append(socket.socket(socket.AF_UNIX))
        self._listeners[1].bind(self.abstract)
        self._listeners[1].listen()
        self.port = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            threading.Thread(target=self._count, args=(listener,), daemon=True).start()

    def _count(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                self.visitors += 1

    def close(self) -> None:
        del os.environ[VARIABLE]
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@contextlib.contextmanager
def open_site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        site = Site(Path(folder))
        try:
            yield site
        finally:
            site.close()


class SessionPrograms:
    """Runs each program as a command of a session of its own, with a directory that it may write to besides /tmp."""

    def run(self, program: Program) -> Outcome:
        if refused := refusal(program):
            return refused
        with SandboxSession(writable=(SECOND_DIRECTORY,), limits=program.limits) as session:
            session.run("cat > main.py", stdin=program.code.encode())
            interpreter = shlex.join([python_file(), "-S", "-s", "-c", RUN_PYTHON])
            outcome = session.run(f"exec {interpreter}", stdin=program.stdin.encode())
            after = session.run("echo still here")
            assert after.stdout == "still here\n", after
            return outcome


def run_attack(sandbox: LocalSandbox | SessionPrograms, attack: Attack, site: Site) -> tuple[Outcome, list[str]]:
    """Return what became of an attack, and what it got that it should not: [] if nothing."""
    mark = uuid.uuid4().hex[:12]
    known = (str(site.file), site.port, site.abstract, SECRET)
    code = PRELUDE.replace("{mark!r}", repr(mark)).replace("{site!r}", repr(known)) + attack.code
    program = Program(code, stdin=attack.stdin, fetch=attack.fetch, limits=attack.limits)
    visitors = site.visitors
    outcome = sandbox.run(program)
    escapes = [line for line in outcome.stdout.splitlines() if line.startswith("ESCAPED")]
    if outcome.verdict not in attack.verdicts:
        escapes.append(f"verdict {outcome.verdict}: {outcome.detail} {outcome.stderr[-300:]}")
    if site.visitors > visitors:
        escapes.append("reached a socket of the parent")
    if left := processes_named(mark):
        escapes.append(f"processes are left: {left}")
    if set(outcome.files) - {"h"}:
        escapes.append(f"returned {sorted(outcome.files)}")
    if site.file.read_text() != SECRET:
        escapes.append("changed a file of the parent")
    return outcome, escapes


def table_row(attack: Attack, happened: str, verdict: Verdict) -> str:
    return f"| {attack.name} | {happened} | {verdict} |"


def processes_named(mark: str) -> list[int]:
    """Return the processes of this machine with that name; those that have ended and are not collected do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines()
            if lines[0].endswith(mark) and not lines[2].startswith("State:\tZ"):
                found.append(int(path.parent.name))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolation", choices=("namespaces", "bwrap"), help="default: the one that this machine has")
    parser.add_argument("--bwrap", help="path of bubblewrap")
    parser.add_argument("--session", action="store_true", help="each attack is a command of a session")
    args = parser.parse_args(argv)
    local = LocalSandbox(args.isolation, bwrap=args.bwrap)
    sandbox = SessionPrograms() if args.session else local
    print(f"{local.check()}\n\n| attack | what happens | verdict |\n|---|---|---|")
    failed = 0
    with open_site() as site:
        for attack in ATTACKS:
            outcome, escapes = run_attack(sandbox, attack, site)
            failed += bool(escapes)
            print(table_row(attack, "; ".join(escapes) or attack.happens, outcome.verdict), flush=True)
    print(f"\n{len(ATTACKS)} attacks, {failed} of them got something")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
