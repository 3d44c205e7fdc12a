"""Calls of the Linux kernel that Python 3.11 has no function for, and the filter of a program's system calls.

Limits and signals are set here too: without the modules `resource` and `signal`, a sandbox starts faster.

The filter refuses what a judged program does not need, and what the other limits do not cover: memory that counts
for nobody (`memfd_create`, System V), sockets beyond the network namespace (`AF_VSOCK`), mounts, namespaces, `ptrace`,
and parts of the kernel with a history of errors (`bpf`, `io_uring`, `userfaultfd`, keys).
"""

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = 0x7E020000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = 63
EPERM, EINVAL, ENOSYS, EAFNOSUPPORT = 1, 22, 38, 97
SIG_DFL, SIG_IGN = 0, 1
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces; those of processes apply to its children."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, *, flags: int = 0, data: str = "") -> None:
    """Mount something at a path. The arguments are those of the call of the kernel."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {kind or source} at {target}")


def unmount(target: str) -> None:
    """Detach a mount from the tree at once."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace; the old one is then at `put_old`."""
    number = PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(ctypes.c_long(number), new_root.encode(), put_old.encode()), "pivot_root")


def prctl(option: int, value: int, third: int = 0) -> None:
    """Set an attribute of this process."""
    numbers = (ctypes.c_ulong(number) for number in (value, third, 0, 0))
    _checked(_libc.prctl(option, *numbers), f"prctl {option}")


def set_signal(number: int, action: int) -> None:
    """Let this process ignore a signal (SIG_IGN), or do with it what the kernel does (SIG_DFL)."""
    _libc.signal.restype = ctypes.c_void_p
    _libc.signal(number, ctypes.c_void_p(action))


def set_limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process (setrlimit). A lower one that it has stays."""
    found = (ctypes.c_uint64 * 2)()
    _checked(_libc.getrlimit(kind, found), "getrlimit")
    bounds = (ctypes.c_uint64 * 2)(min(soft, found[1]), min(hard, found[1]))
    _checked(_libc.setrlimit(kind, bounds), f"setrlimit {kind}")


def cpu_s_of_children() -> float:
    """Return the processor time of the children that this process has waited for (getrusage), and of theirs."""
    found = (ctypes.c_long * 32)()  # struct rusage begins with seconds and microseconds, of the user and of the system
    _checked(_libc.getrusage(-1, found), "getrusage")
    return found[0] + found[2] + (found[1] + found[3]) / 1e6


def drop_bounding_set() -> None:
    """Make it impossible for this process, and for all that it starts, to gain a capability by executing a file."""
    for number in range(LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError as error:  # EINVAL: this kernel has fewer; EPERM: there is nothing to drop
            if error.errno not in (EINVAL, EPERM):
                raise


def clear_capabilities() -> None:
    """Give up every capability of this process."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header, data = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(_libc.capset(header, data), "capset")


# -- The filter. Numbers of system calls: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
COMMON = (
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    *(438, 440, 447),  # pidfd_getfd, process_madvise, memfd_secret
)
CLONE3 = 435
REFUSED = {
    "x86_64": {
        *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
        *(165, 166, 155, 161, 272, 308),  # mount, umount2, pivot_root, chroot, unshare, setns
        *(319, 29, 68, 64, 240),  # memfd_create, shmget, msgget, semget, mq_open
        *(321, 298, 323, 250, 248, 249),  # bpf, perf_event_open, userfaultfd, keyctl, add_key, request_key
        *(175, 313, 176, 246, 320, 304, 303),  # modules, kexec, open_by_handle_at, name_to_handle_at
        *(167, 169, 103),  # swapon, reboot, syslog
    },
    "aarch64": {
        *(117, 270, 271, 272),
        *(40, 39, 41, 51, 97, 268),
        *(279, 194, 186, 190, 180),
        *(280, 241, 282, 219, 217, 218),
        *(105, 273, 106, 104, 294, 265, 264),
        *(224, 142, 116),
    },
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, SOCKET = {"x86_64": 56, "aarch64": 220}, {"x86_64": 41, "aarch64": 198}
X32_BIT = 0x40000000  # calls of the 32-bit ABI of x86-64 have other numbers
SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace confines them

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL_PROCESS, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Raises:
        KeyError: There are no numbers of system calls for this kind of machine.
    """
    refuse, missing = ERROR | EPERM, ERROR | ENOSYS
    rules = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        *_returning(AT_LEAST, X32_BIT, refuse),
        *_returning(EQUAL, CLONE3, missing),  # its flags are behind a pointer; the C library then calls clone
        *(rule for number in sorted({*REFUSED[machine], *COMMON}) for rule in _returning(EQUAL, number, refuse)),
        *_returning_if_argument(CLONE[machine], [(ANY_BIT, ALL_NAMESPACES, refuse)], otherwise=ALLOW),
        *_returning_if_argument(
            SOCKET[machine], [(EQUAL, family, ALLOW) for family in SOCKET_FAMILIES], otherwise=ERROR | EAFNOSUPPORT
        ),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def _returning(test: int, operand: int, action: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, operand), (RETURN, 0, 0, action)]


def _returning_if_argument(
    number: int, tests: list[tuple[int, int, int]], *, otherwise: int
) -> list[tuple[int, int, int, int]]:
    """Return rules for one call that decide by its first argument."""
    rules = [(LOAD, 0, 0, FIRST_ARGUMENT)]
    for test, operand, action in tests:
        rules += _returning(test, operand, action)
    rules.append((RETURN, 0, 0, otherwise))
    return [(EQUAL, 0, len(rules), number), *rules]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]


def filter_system_calls() -> None:
    """Apply the filter to this process and to all that it starts. Needs PR_SET_NO_NEW_PRIVS."""
    rules = filter_program(os.uname().machine)
    program = _FilterProgram(len(rules) // 8, rules)
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    _checked(result, "seccomp")
