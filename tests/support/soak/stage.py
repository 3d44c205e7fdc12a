"""Run one program for hours, harm its processes now and then, and write down what they use.

    python -m tests.support.soak.stage SCENE.json

With root's rights it runs in namespaces of its own (`tests/support/blind/stage.py`), so that /dev/shm is the run's
alone. Writes `samples.jsonl` and, at the end, `result.json` into the scene's folder.
"""

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.blind.processes import classify, descendants, harm, resume
from tests.support.blind.stage import PR_SET_CHILD_SUBREAPER, SHM, SHM_BYTES
from tests.support.blind.surroundings import change_loopback
from tests.support.soak.sampling import directory_bytes, read_usages, used_bytes, worker_roles

POLL_PERIOD_S = 0.2
START_TIMEOUT_S = 1800.0  # until the first step is complete, from which the soak counts
STALL_S = 900.0  # without a new step: the run hangs
END_TIMEOUT_S = 300.0  # from SIGTERM to the end of the program: it commits a checkpoint
LEAVE_TIMEOUT_S = 30.0  # for what the run started, after its end
PAUSE_S = (0.2, 8.0)
STEP = re.compile(rb'"training/global_step": (\d+)')
TAIL_BYTES = 65536  # of the metrics: several steps
HARMS = {  # process of a run -> what is done to it, and how often relative to the rest; the run survives all of it
    ("worker", "kill"): 4,
    ("worker", "freeze"): 2,
    ("worker", "pause"): 2,
    ("driver", "kill"): 2,
    ("driver", "freeze"): 1,
    ("master", "kill"): 1,
    ("master", "freeze"): 1,
    ("snapshot store", "kill"): 1,
    ("reward process", "kill"): 1,
}
LONG_LIVED = ("driver", "master", "snapshot store")  # not harmed in the second half, so that each lives for long
LONG_LIVED_ROLE = "actor"  # of the workers, likewise: its memory takes ten minutes to level off


@dataclass(frozen=True)
class Scene:
    """What a stage runs.

    Attributes:
        command, environment: The program.
        folder: For its output and for the measurements.
        run: Run directory of the program.
        seconds: How long it runs after its first step.
        fault_every_s: Seconds between two faults; 0: none.
        sample_every_s: Seconds between two measurements.
        seed: Of the faults.
        apart: Whether this runs in namespaces of its own.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    run: str
    seconds: float
    fault_every_s: float
    sample_every_s: float
    seed: int
    apart: bool


@dataclass
class Result:
    """What was observed.

    Attributes:
        code: Exit code of the program; None: it hung at its end.
        ended_early: Why it ended before its time; "": it did not.
        reached: Seconds at which steps 1, 2, ... were complete for the first time.
        hits: Seconds and name of each fault.
        left: Processes that were there after the end.
        shared_memory: Files in /dev/shm that were there after the end.
        seconds: Duration of the whole run.
    """

    code: int | None = None
    ended_early: str = ""
    reached: list[float] = field(default_factory=list)
    hits: list[tuple[float, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Stage:
    """One run, its faults, and its measurements."""

    def __init__(self, scene: Scene):
        self.scene, self.result = scene, Result()
        self._folder = Path(scene.folder)
        self._output = self._folder / "run.log"
        self._chance = random.Random(f"soak {scene.seed}")
        self._program = 0
        self._status: int | None = None
        self._start = time.monotonic()
        self._next_fault, self._step_at_fault = 0.0, 0
        self._resume_at: dict[int, float] = {}
        self._is_stopped = False

    def run(self) -> Result:
        before = _shared_files()
        with open(self._output, "wb") as output:
            self._start = time.monotonic()
            environment = os.environ | self.scene.environment
            self._program = subprocess.Popen(
                self.scene.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            ).pid
            self._watch()
        self._end()
        self.result.seconds = round(self._now(), 1)
        self.result.code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        self._leave()
        self.result.shared_memory = sorted(_shared_files() - before)
        return self.result

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _watch(self) -> None:
        """Measure and harm until the time is over, or the run has ended or hangs."""
        next_sample = 0.0
        with open(self._folder / "samples.jsonl", "w", encoding="utf-8") as samples:
            while not self._is_over():
                self._reap()
                self._note_steps()
                self._resume_due()
                self.result.ended_early = self._trouble()
                if self.result.ended_early:
                    return
                if self._now() >= next_sample:
                    next_sample = self._now() + self.scene.sample_every_s
                    samples.write(json.dumps(self._sample()) + "\n")
                    samples.flush()
                self._harm_if_due()
                time.sleep(POLL_PERIOD_S)

    def _is_over(self) -> bool:
        reached = self.result.reached
        return self._is_stopped or (bool(reached) and self._now() >= reached[0] + self.scene.seconds)

    def stop(self, *_: object) -> None:
        """End the soak before its time; what was measured so far is judged. A signal handler."""
        self._is_stopped = True

    def _trouble(self) -> str:
        """Return why the soak cannot go on, "" if it can."""
        if self._status is not None:
            return f"the program ended after {self._now():.0f} s"
        silent_s = self._now() - (self.result.reached or [0.0])[-1]
        limit_s = STALL_S if self.result.reached else START_TIMEOUT_S
        return f"no step was completed for {limit_s:.0f} s" if silent_s > limit_s else ""

    def _note_steps(self) -> None:
        """Note the steps that have completed since the last call; one that runs again does not count again."""
        newest = newest_step(Path(self.scene.run) / "metrics.jsonl")
        self.result.reached += [round(self._now(), 2)] * (newest - len(self.result.reached))

    def _sample(self) -> dict[str, object]:
        return {
            "at": round(self._now(), 2),
            "step": len(self.result.reached),
            "shm": used_bytes(str(SHM)),
            "disk": directory_bytes(Path(self.scene.run)),
            "load": os.getloadavg()[0],
            "processes": [list(asdict(usage).values()) for usage in read_usages(self._program, os.getpid())],
        }

    def _harm_if_due(self) -> None:
        """Do the next fault when it is due, and the run has completed a step since the one before."""
        if not self.scene.fault_every_s or not self.result.reached:
            return
        is_due = self._now() >= max(self._next_fault, self.result.reached[0] + self.scene.fault_every_s)
        if not is_due or self._resume_at or len(self.result.reached) <= self._step_at_fault:
            return
        is_late = self._now() >= self.result.reached[0] + self.scene.seconds / 2
        harms = {harm: often for harm, often in HARMS.items() if not (is_late and harm[0] in LONG_LIVED)}
        process, how = self._chance.choices(list(harms), list(harms.values()))[0]
        found = classify(self._program, descendants(os.getpid())).get(process, [])
        if is_late and process == "worker":
            roles = worker_roles(Path(self.scene.run))
            found = [pid for pid in found if roles.get(pid, LONG_LIVED_ROLE) != LONG_LIVED_ROLE]
        if not found:
            return  # it is being restarted; another one is drawn at the next poll
        pid = self._chance.choice(found)
        if harm(pid, how):
            length_s = self._chance.uniform(*PAUSE_S)
            if how == "pause":
                self._resume_at[pid] = self._now() + length_s
            text = f"{how} {process}" + (f" {length_s:.1f} s" if how == "pause" else "")
            self.result.hits.append((round(self._now(), 1), text))
            self._next_fault = self._now() + self.scene.fault_every_s
            self._step_at_fault = len(self.result.reached)

    def _resume_due(self) -> None:
        for pid in [pid for pid, at in self._resume_at.items() if self._now() >= at]:
            resume(pid)
            del self._resume_at[pid]

    def _end(self) -> None:
        """End the program as a user does, with SIGTERM."""
        for pid in list(self._resume_at):
            resume(pid)
        with suppress(ProcessLookupError):
            os.kill(self._program, signal.SIGTERM)
        until = time.monotonic() + END_TIMEOUT_S
        while self._status is None and time.monotonic() < until:
            self._reap()
            time.sleep(POLL_PERIOD_S)

    def _reap(self) -> None:
        """Collect processes that have ended: orphans come to this process."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program:
                    self._status = ended[1]

    def _leave(self) -> None:
        """Note what is left some time after the end, and end it."""
        until = time.monotonic() + LEAVE_TIMEOUT_S
        while (left := descendants(os.getpid())) and time.monotonic() < until:
            self._reap()
            time.sleep(POLL_PERIOD_S)
        self.result.left = [process.label for process in left.values()]
        while below := descendants(os.getpid()):
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(POLL_PERIOD_S)


def newest_step(metrics: Path) -> int:
    """Return the step of the last whole line of a run's metrics, 0 if there is none. The console leaves steps out."""
    if not metrics.exists():
        return 0
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        numbers = STEP.findall(file.read().rpartition(b"\n")[0])
    return int(numbers[-1]) if numbers else 0


def _shared_files() -> set[str]:
    return {entry.name for entry in SHM.iterdir()}


def main(scene_path: str) -> None:
    scene = Scene(**json.loads(Path(scene_path).read_text()))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if scene.apart:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", str(SHM)], check=True, timeout=10)
        change_loopback("up")
    stage = Stage(scene)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stage.stop)
    result = stage.run()
    (Path(scene.folder) / "result.json").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
