"""`SandboxSession`: shell commands that run one after the other on the same files, each as a program in a sandbox.

A terminal of a policy needs files that stay; `LocalSandbox` gives each program new ones. Isolation and limits are
the same. A command ends with all processes that it started, so the next one finds files, and no process.

    with SandboxSession(writable=("/app",)) as session:
        session.run("echo 4 > number", directory="/app")
        print(session.run("cat number", directory="/app").stdout)
"""

import errno
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self

from hybridrl.rewards.sandbox.job import Limits, Outcome, SandboxFailed, SandboxUnavailable, Verdict
from hybridrl.rewards.sandbox.local import (
    ENVIRONMENT,
    SETUP_TIMEOUT_S,
    WAY_OUT,
    SandboxProcess,
    frame_of,
    limits_of_job,
    own_command,
    visible_files,
)

SHELL = ["/bin/bash", "-c", 'cd -- "$1" && exec /bin/bash -c "$2"', "bash"]
MAX_COMMAND_BYTES = 100_000  # the kernel allows 131,072 per argument
POLL_PERIOD_S = 0.1  # for `cancel`
DEFAULT_LIMITS = Limits()
LAST_LINES = 3  # of a sandbox that did not start


class SandboxSession(SandboxProcess):
    """A directory tree of its own in which commands run until `close`, or until this process ends.

    Args:
        writable: Directories of the root, such as "/app", that commands can write to besides `/tmp`.
        limits: `disk_mb` is that of all files together; the others are of each command.

    Raises:
        SandboxUnavailable: This machine cannot make the namespaces. bubblewrap does not serve for sessions.
        ValueError: A directory that is none of the root, or one of the system.
    """

    def __init__(self, *, writable: Sequence[str] = (), limits: Limits = DEFAULT_LIMITS):
        taken = system_directories()
        for path in writable:
            if PurePosixPath(path).parent != PurePosixPath("/") or path in taken:
                raise ValueError(
                    f"{path!r}: a directory to write to is one of the root, and none of {', '.join(sorted(taken))}"
                )
        command, job = own_command(limits, writable=writable)
        opening = {"command": None, "files": {}, "limits": limits_of_job(limits)}
        super().__init__(command, job | opening, limits)
        self._lock, self._is_cancelled, self._is_open = threading.Lock(), False, True
        for descriptor in self._streams.values():
            os.set_blocking(descriptor, False)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._receive_report(time.monotonic() + SETUP_TIMEOUT_S, most=4096)
        except SandboxFailed as error:
            self.close()
            raise SandboxUnavailable(f"this machine has no sandbox for sessions: {error}; {WAY_OUT}") from error
        if not self.received["report"].startswith(b"ready"):
            reason = self.received["report"].decode(errors="replace").strip()
            self.close()
            raise SandboxUnavailable(f"this machine has no sandbox for sessions: {reason}; {WAY_OUT}")

    def run(
        self,
        command: str,
        *,
        directory: str = "/tmp",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Return what became of a command of bash. Safe to call from several threads: one runs at a time.

        Args:
            command: Text for `bash -c`.
            directory: Where it starts.
            environment: Variables besides those of every program.
            stdin: Standard input.
            limits: Of this command; `disk_mb` stays that of the session. None: those of the session.

        Raises:
            SandboxFailed: The sandbox has ended, or could not start the command.
        """
        size = len(command.encode("utf-8", "surrogateescape"))
        if size > MAX_COMMAND_BYTES or "\0" in command:
            detail = f"a command has at most {MAX_COMMAND_BYTES} bytes, and no zero byte"
            return Outcome(Verdict.REFUSED, detail=detail)
        limits = replace(limits or self.limits, disk_mb=self.limits.disk_mb)
        job = {
            "command": [*SHELL, directory, command],
            "environment": {**ENVIRONMENT, **(environment or {})},
            "stdin": stdin,
            "fetch": [],
            "limits": limits_of_job(limits),
        }
        with self._lock:
            return self._run_next(job, limits)

    def cancel(self) -> None:
        """End the command that runs, soon. Its outcome is a timeout. Does nothing if none runs."""
        self._is_cancelled = True

    def close(self) -> None:
        """End the sandbox with all its processes and files. Safe to call again."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_next(self, job: Mapping[str, object], limits: Limits) -> Outcome:
        if not self._is_open:
            raise SandboxFailed("the session is closed")
        self._is_cancelled = False
        self._unsent = memoryview(b"j" + bytes(frame_of(job)))
        self.received = {name: bytearray() for name in self._streams}
        flooded = self._receive_report(time.monotonic() + limits.wall_s + SETUP_TIMEOUT_S, most=limits.output_kb << 10)
        report = self.received["report"]
        if not flooded and report.startswith(b"cancelled "):
            return replace(self._printed(limits), verdict=Verdict.TIMEOUT, detail="it was cancelled")
        if not flooded and report.startswith(b"error ") and os.strerror(errno.ENOSPC).encode() in report:
            detail = "there is no space left for its input"
            return replace(self._printed(limits), verdict=Verdict.RUNTIME_ERROR, detail=detail)
        return self._reported((), limits, flooded)

    def _receive_report(self, deadline: float, *, most: int) -> str:
        """Send what is to be sent, and receive until a report is there. Return the name of a stream with too much.

        What a command printed is in the pipes when its report comes: its processes have ended.
        """
        assert self._process.stdin is not None
        control, has_asked = self._process.stdin.fileno(), False
        with selectors.DefaultSelector() as selector:
            for name, descriptor in self._streams.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            selector.register(control, selectors.EVENT_WRITE, "job")
            while b"\n" not in self.received["report"]:
                if time.monotonic() > deadline:
                    raise SandboxFailed("a sandbox did not answer in time")
                for key, _ in selector.select(POLL_PERIOD_S):
                    if key.data != "job":
                        self._read(key.data, most)
                    elif self._send(control):
                        selector.unregister(control)
                is_over = self._is_cancelled or self._flooded_stream(most)
                if is_over and not has_asked and not self._unsent:
                    has_asked, self._unsent = True, memoryview(b"c")
                    selector.register(control, selectors.EVENT_WRITE, "job")
        for name in ("stdout", "stderr"):
            while self._read(name, most):
                continue
        return self._flooded_stream(most)

    def _read(self, name: str, most: int) -> bool:
        """Receive a part of a stream; keep one byte more than `most`. Return whether there was one.

        Raises:
            SandboxFailed: The stream has ended, and so has the sandbox.
        """
        try:
            data = os.read(self._streams[name], 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            raise SandboxFailed(f"the sandbox has ended: {self._last_words()}")
        room = None if name == "report" else most + 1 - len(self.received[name])
        self.received[name] += data[:room]
        return True

    def _flooded_stream(self, most: int) -> str:
        return next((name for name in ("stdout", "stderr") if len(self.received[name]) > most), "")

    def _last_words(self) -> str:
        report = self.received["report"].decode(errors="replace").strip()
        lines = self.received["stderr"].decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        return report or " ".join(lines) or "it was killed"


def system_directories() -> frozenset[str]:
    """Return the directories of the root that the sandbox needs, or in which it shows files of the machine."""
    view = visible_files()
    shown = {"/" + path.split("/")[1] for path in (*view["read_only"], *view["links"])}
    return frozenset({"/", "/dev", "/proc", "/tmp", *shown})
