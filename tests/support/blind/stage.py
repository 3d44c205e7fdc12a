"""Run one command with the faults of a drill, and again without them if it failed.

    python -m tests.support.blind.stage SCENE.json RESULT.json

With root's rights it runs in namespaces of its own (`enter_command`): it then sees only the processes, shared memory,
network and disk of this run, and all that is left ends with it. Otherwise it sees its own descendants, and disk and
network do not fail.
"""

import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.blind.clarity import find_unclear
from tests.support.blind.cluster import DrillCluster
from tests.support.blind.plan import START_SHARE, Drill, Fault
from tests.support.blind.processes import Process, classify, descendants, harm, read_process, resume
from tests.support.blind.surroundings import (
    change_loopback,
    clock_environment,
    cut_network,
    fill_disk,
    mount_disk,
    remove_memory_groups,
    set_clock,
    slow_down_disk,
)

POLL_PERIOD_S = 0.04
APPEAR_TIMEOUT_S = 60.0  # for a process that is to be harmed
LEAVE_TIMEOUT_S = 30.0  # for what the run started, after its end
FOR_EVER = math.inf  # what is undone when the run has ended
SHM_BYTES = 2 * 1024**3
SHM = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER = 36
STEP_LINE = re.compile(r"^step (\d+)/", re.MULTILINE)
TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)


@dataclass(frozen=True)
class Scene:
    """What a stage runs.

    Attributes:
        command, environment: The program.
        folder: For its output; `disk` in it is the run's directory, a small file system of its own.
        steps: Number of steps of the run.
        start_s, step_s: Durations of the calm run: until its first step was complete, and per step.
        deadline_s: After so long the run counts as hanging.
        rerun_deadline_s: The same, for the command started again.
        drill: As JSON.
        apart: Whether this runs in namespaces of its own.
        num_machines: Simulated machines of the run's cluster; 0: the run starts a cluster of its own.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    steps: int
    start_s: float
    step_s: float
    deadline_s: float
    rerun_deadline_s: float
    drill: str
    apart: bool
    num_machines: int = 0


@dataclass
class Outcome:
    """What was observed. `code` is None if the run was still there at its deadline.

    start_s: Seconds until the first step was complete; 0 if there was none.
    unclear: What is wrong with the error of a failed run; "" if nothing is.
    """

    code: int | None = None
    seconds: float = 0.0
    start_s: float = 0.0
    hits: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    has_traceback: bool = False
    unclear: str = ""
    last_line: str = ""
    hanging: list[str] = field(default_factory=list)


def can_be_apart() -> bool:
    """Return whether this machine lets a drill have namespaces of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*enter_command(), "true"], capture_output=True, timeout=30).returncode == 0


def enter_command() -> list[str]:
    return ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]


class Stage:
    """One run of a command, and the harm to it."""

    def __init__(self, scene: Scene, *, name: str, faults: tuple[Fault, ...], cluster: DrillCluster | None = None):
        self.scene, self.name, self.faults, self._cluster = scene, name, list(faults), cluster
        self.outcome = Outcome()
        self._program = 0
        self._status: int | None = None
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._start = time.monotonic()
        self._disk = Path(scene.folder) / "disk"
        self._output, self._errors = (Path(scene.folder) / f"{name}.{end}" for end in ("log", "err"))
        self._reached = [0.0]  # seconds at which steps 0, 1, 2, ... were complete
        self._due: dict[Fault, float] = {}

    def run(self, *, deadline_s: float) -> Outcome:
        shared_before = _shared_memory()
        with open(self._output, "wb") as output, open(self._errors, "wb") as errors:
            self._start = time.monotonic()
            self._program = subprocess.Popen(
                self.scene.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=os.environ | self.scene.environment | self._clock() | self._address(),
                start_new_session=True,
            ).pid
            while self._status is None and self._now() < deadline_s:
                self._act(self._now())
                self._reap()
                time.sleep(POLL_PERIOD_S)
        self.outcome.seconds = round(self._now(), 1)
        if self._status is None:
            self.outcome.hanging = self._labels()
        else:
            self.outcome.code = os.waitstatus_to_exitcode(self._status)
            self.outcome.left = self._leftovers()
        self._undo_until(math.inf)
        self._end_all()
        remove_memory_groups()
        self.outcome.shared_memory = sorted(_shared_memory() - shared_before)
        self._read()
        return self.outcome

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _clock(self) -> dict[str, str]:
        is_set = any(fault.how == "clock" for fault in self.faults)
        return clock_environment(Path(self.scene.folder)) if is_set else {}

    def _address(self) -> dict[str, str]:
        return {"RAY_ADDRESS": self._cluster.address} if self._cluster is not None else {}

    def _note_steps(self, now: float) -> None:
        """Note the steps that have completed since the last call.

        A run that goes back a step does not count again.
        """
        text = self._text()
        run = self._disk / "run"
        numbers = [*STEP_LINE.findall(text), *(path.name.rpartition("_")[2] for path in run.glob("global_step_*"))]
        newest = max((int(number) for number in numbers if number.isdigit()), default=0)
        if newest and not self.outcome.start_s:
            self.outcome.start_s = round(now, 1)
        self._reached += [now] * (newest + 1 - len(self._reached))

    def _is_due(self, fault: Fault, now: float) -> bool:
        """Return whether the run is as far as this fault says."""
        if fault.at < START_SHARE:
            return now >= fault.at / START_SHARE * self.scene.start_s
        position = (fault.at - START_SHARE) / (1 - START_SHARE) * self.scene.steps
        step = int(position)
        return step < len(self._reached) and now >= self._reached[step] + (position - step) * self.scene.step_s

    def _act(self, now: float) -> None:
        """Undo and do what is due."""
        self._note_steps(now)
        self._undo_until(now)
        self._restart_nodes()
        for fault in [fault for fault in self.faults if fault in self._due or self._is_due(fault, now)]:
            due = self._due.setdefault(fault, now)
            if not fault.process:
                self._harm_surroundings(fault, now)
            elif not self._harm_process(fault, now):
                if now < due + APPEAR_TIMEOUT_S:
                    continue
                self.outcome.hits.append(f"{self._when(now)}: no {fault.process}")
            self.faults.remove(fault)

    def _undo_until(self, now: float) -> None:
        for entry in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(entry)
            entry[1]()

    def _restart_nodes(self) -> None:
        if self._cluster is not None:
            for address in self._cluster.restart_lost():
                self.outcome.hits.append(f"{self._when(self._now())}: {address} comes back as a new node")

    def _when(self, now: float) -> str:
        return f"{now:.1f} s, after step {len(self._reached) - 1}"

    def _harm_process(self, fault: Fault, now: float) -> bool:
        found = classify(self._program, descendants(os.getpid())).get(fault.process, [])
        if not found:
            return False
        chosen = found if fault.process == "node" else [found[int(fault.draw * len(found))]]
        for pid in chosen:
            if not harm(pid, fault.how):
                return False
            if fault.how == "pause":
                self._undo.append((now + fault.seconds, lambda pid=pid: resume(pid)))  # type: ignore[misc]
        length = f" {fault.seconds:g} s" if fault.seconds else ""
        number = f" (1 of {len(found)})" if len(found) > len(chosen) else ""
        self.outcome.hits.append(f"{self._when(now)}: {fault.how}{length} {fault.process}{number}")
        return True

    def _harm_surroundings(self, fault: Fault, now: float) -> None:
        if fault.how in ("link", "machine") and self._cluster is not None:
            harm_machine = self._cluster.cut_link if fault.how == "link" else self._cluster.lose_machine
            address, undo = harm_machine(fault.draw, descendants(os.getpid()))
            self._undo.append((now + fault.seconds if fault.seconds else FOR_EVER, undo))
            what = "lost" if fault.how == "machine" else f"cut {fault.seconds:g} s" if fault.seconds else "cut for ever"
            self.outcome.hits.append(f"{self._when(now)}: {fault.how} {address} {what}")
            return
        self.outcome.hits.append(f"{self._when(now)}: {fault.how} {fault.seconds:g} s")
        if fault.how == "clock":
            set_clock(Path(self.scene.folder), fault.seconds)
        elif fault.how == "network":
            self._undo.append((now + fault.seconds, cut_network()))
        else:
            harm_disk = slow_down_disk if fault.how == "slow disk" else fill_disk
            self._undo.append((now + fault.seconds, harm_disk(self._disk)))

    def _reap(self) -> None:
        """Collect processes that have ended: orphans come to this process."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program:
                    self._status = ended[1]

    def _leftovers(self) -> list[str]:
        self._undo = [(at if at < FOR_EVER else self._now(), undo) for at, undo in self._undo]
        until = max([self._now(), *(at for at, _ in self._undo)]) + LEAVE_TIMEOUT_S
        while (left := self._labels()) and self._now() < until:
            self._undo_until(self._now())
            self._restart_nodes()
            self._reap()
            time.sleep(POLL_PERIOD_S)
        return left

    def _labels(self) -> list[str]:
        return [process.label for process in self._of_the_run().values()]

    def _of_the_run(self) -> dict[int, Process]:
        """Return all processes of the run, without those of a cluster that was there before it."""
        below = descendants(os.getpid())
        if self._cluster is None:
            return below
        return {pid: process for pid, process in below.items() if not self._cluster.is_own(pid, below)}

    def _end_all(self) -> None:
        while below := self._of_the_run():
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(POLL_PERIOD_S)

    def _read(self) -> None:
        text = self._text()
        self.outcome.has_traceback = TRACEBACK.search(text) is not None
        lines = [line for line in text.splitlines() if line.strip()]
        self.outcome.last_line = next((line for line in reversed(lines) if "error" in line), lines[-1] if lines else "")
        if self.outcome.code and not self._is_killed():
            self.outcome.unclear = find_unclear(self._errors.read_text(errors="replace"), self.outcome.code)

    def _text(self) -> str:
        return self._output.read_text(errors="replace") + self._errors.read_text(errors="replace")

    def _is_killed(self) -> bool:
        """Return whether the program itself was killed by a drill: nobody is left to say why."""
        return self.outcome.code == -signal.SIGKILL and any(
            f"{how} program" in hit for hit in self.outcome.hits for how in ("kill", "oom")
        )


def _shared_memory() -> set[str]:
    found = {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()
    return {name for name in found if "faketime" not in name}  # killed processes leave those of the changed clock


def set_up(scene: Scene) -> None:
    disk = Path(scene.folder) / "disk"
    disk.mkdir(exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if scene.apart:
        size = ["-t", "tmpfs", "-o", f"size={SHM_BYTES}"]
        subprocess.run(["mount", *size, "tmpfs", str(SHM)], check=True, timeout=10)
        mount_disk(disk)
        change_loopback("up")


def keep(scene: Scene) -> None:
    """Copy the run's directory out of its own file system."""
    if scene.apart:
        shutil.copytree(Path(scene.folder) / "disk", Path(scene.folder) / "kept", dirs_exist_ok=True)


def main(scene_path: str, result_path: str) -> None:
    scene = Scene(**json.loads(Path(scene_path).read_text()))
    set_up(scene)
    drill = Drill.from_json(scene.drill)
    machines = (scene.num_machines, scene.environment, Path(scene.folder))
    with DrillCluster(*machines) if scene.num_machines else nullcontext() as cluster:
        first = Stage(scene, name="run", faults=drill.faults, cluster=cluster).run(deadline_s=scene.deadline_s)
        result = {"first": asdict(first), "again": None}
        if first.code is not None and first.code != 0:
            again = Stage(scene, name="again", faults=(), cluster=cluster).run(deadline_s=scene.rerun_deadline_s)
            result["again"] = asdict(again)
    keep(scene)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    assert read_process(os.getpid()) is not None, "no /proc"
    main(*sys.argv[1:])
