"""Isolation of a sandbox: namespaces, and a file system with only an interpreter in it.

`enter` is the isolation "namespaces". That of "bwrap" is made by this program (`hybridrl/rewards/sandbox/local.py`).
"""

import os

from . import kernel

BASE = "/tmp"  # any existing directory: the new root is mounted over it, in this mount namespace only
OLD_ROOT = "/.old"
BASE_BYTES = 1 << 20
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
MAX_INODES = 8192  # of the directory that can be written
# struct statvfs -> mount(2): a remount in a user namespace must keep what the host has set
KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def enter(isolation: dict) -> None:
    """Move this process into new namespaces. Its next child is the first process of the sandbox.

    Args:
        isolation: `user_namespace` (bool): make one, because this user may not mount otherwise.
    """
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    flags |= kernel.CLONE_NEWCGROUP
    if not isolation["user_namespace"]:
        kernel.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    # The user id is unchanged inside, so file ownership is, and no privilege is gained.
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def build_root(isolation: dict) -> None:
    """Make a new root file system and leave the old one. Runs in the first process.

    Args:
        isolation: `read_only`: paths that the program sees; `links`: symbolic links, name to target; `hidden`:
            directories in these paths that are empty inside; `writable`: empty directories that the program may write
            to, besides `/tmp`; `disk_bytes`: size of all that can be written.
    """
    kernel.mount(None, "/", None, flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in isolation["read_only"]}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    kernel.mount("tmpfs", BASE, "tmpfs", flags=kernel.MS_NOSUID, data=f"size={BASE_BYTES},mode=755")
    for path, descriptor in {**sources, **devices}.items():
        _bind(path, descriptor, is_device=path in devices)
    for name, target in {**isolation["links"], **{f"/dev/{name}": target for name, target in LINKS.items()}}.items():
        os.makedirs(BASE + os.path.dirname(name), exist_ok=True)
        os.symlink(target, BASE + name)
    for name in ("/proc", "/tmp", OLD_ROOT):
        os.makedirs(BASE + name, exist_ok=True)
    _mount_proc(BASE + "/proc")
    data = f"size={isolation['disk_bytes']},nr_inodes={MAX_INODES},mode=700"
    inner = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", BASE + "/tmp", "tmpfs", flags=inner, data=data)
    _share_tmp(isolation["writable"])
    for path in isolation["hidden"]:
        kernel.mount("tmpfs", BASE + path, "tmpfs", flags=inner | kernel.MS_RDONLY, data="size=4096,mode=755")
    for descriptor in (*sources.values(), *devices.values()):
        os.close(descriptor)
    kernel.pivot_root(BASE, BASE + OLD_ROOT)
    os.chdir("/")
    kernel.unmount(OLD_ROOT)
    os.rmdir(OLD_ROOT)
    kernel.mount(None, "/", None, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _bind(path: str, descriptor: int, *, is_device: bool) -> None:
    """Show a file or directory of the host at the same path, read-only; devices can be used."""
    target, source = BASE + path, f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, flags=kernel.MS_BIND)
    found = os.statvfs(target).f_flag
    kept = sum(mount_flag for flag, mount_flag in KEPT_FLAGS.items() if found & flag)
    added = kernel.MS_NOSUID | (0 if is_device else kernel.MS_RDONLY | kernel.MS_NODEV)
    kernel.mount(None, target, None, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kept | added)


def _share_tmp(writable: list) -> None:
    """Show directories of the file system at `/tmp` at further paths, so that they have one size together.

    Then `/tmp` is one of them, too: none is seen at two paths.
    """
    paths = [*writable, "/tmp"] if writable else []
    for index, path in enumerate(paths):
        os.mkdir(f"{BASE}/tmp/{index}", 0o755)
        os.makedirs(BASE + path, exist_ok=True)
    for index, path in enumerate(paths):  # /tmp is the last: it hides the others
        kernel.mount(f"{BASE}/tmp/{index}", BASE + path, None, flags=kernel.MS_BIND)


def _mount_proc(target: str) -> None:
    """Mount the processes of this sandbox; of other files in it as few as this kernel can hide."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    for data in ("hidepid=2,subset=pid", ""):
        try:
            kernel.mount("proc", target, "proc", flags=flags, data=data)
            return
        except OSError:
            if not data:
                raise
