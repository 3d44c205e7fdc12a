"""Blind drills one after the other: the calm runs that they are compared with, and the verdicts."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.trainer.checkpoint.ledger_audit import PromptCount
from tests.support.blind.plan import Drill
from tests.support.blind.runs import NUM_MACHINES, ROOT, STEPS, command, digest, make_model, prompt_count
from tests.support.blind.stage import Outcome, Scene, can_be_apart, enter_command
from tests.support.blind.surroundings import possible_harms

CALM_DEADLINE_S = 900.0
CALM_TRIES = 3  # on a busy machine Ray may not start in its time
FAULT_TRIES = 3  # of a drill whose run ends before its first fault
DEADLINE_S = (240.0, 4.0)  # of a drill: seconds, and durations of the calm run on top
RERUN_DEADLINE_S = 300.0
END_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Verdict:
    """How a drill ended. `ended`: "equal", "resumed equal", or what is wrong."""

    drill: Drill
    ended: str
    is_clean: bool
    first: Outcome
    again: Outcome | None
    prompts: PromptCount | None = None  # None for a run without a step ledger

    @property
    def line(self) -> str:
        """The drill on one line."""
        seconds = self.first.seconds + (self.again.seconds if self.again else 0.0)
        hits = "; ".join(self.first.hits) or "nothing happened"
        return f"seed {self.drill.seed}, {self.drill.kind}: {hits} -> {self.ended} ({seconds:.0f} s)"

    def to_json(self) -> dict[str, Any]:
        outcomes = {"first": asdict(self.first), "again": asdict(self.again) if self.again else None}
        outcomes["prompts"] = asdict(self.prompts) if self.prompts else None
        drill = asdict(self.drill)
        return drill | {"ended": self.ended, "clean": self.is_clean} | outcomes


class Drills:
    """Runs drills in `folder`, and keeps there what those wrote that were not clean.

    Attributes:
        possible: Those of `plan.PRIVILEGED` that this machine can do: with namespaces of its own for every run.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.apart = can_be_apart()
        self.possible = possible_harms(apart=self.apart)
        self.model = self.folder / "model"
        if not (self.model / "model.safetensors").exists():
            make_model(self.model)

    def run(self, drill: Drill) -> Verdict:
        """Run one drill, after the calm run of its kind if there was none yet."""
        calm = self.calm(drill.kind)
        base_s, factor = DEADLINE_S
        deadline_s = base_s + factor * calm["seconds"]
        times = {"start_s": calm["start_s"], "step_s": calm["step_s"]}
        for number in range(1, FAULT_TRIES + 1):
            first, again, end, prompts = self._run_stage(drill, _name(drill), **times, deadline_s=deadline_s)
            if first.hits or first.code is None:
                break
            # Over before its first fault: the machine was busier during the calm run, or the last steps are short.
            times = {"start_s": first.start_s, "step_s": (first.seconds - first.start_s) / STEPS / 2**number}
        ended = judge(first, again, end=end, calm_end=calm["end"], prompts=prompts)
        verdict = Verdict(drill, ended, ended in ("equal", "resumed equal"), first, again, prompts)
        if verdict.is_clean:
            shutil.rmtree(self.folder / _name(drill))
        return verdict

    def calm(self, kind: str) -> dict[str, Any]:
        """Return the calm run of this kind: "end", "seconds", "start_s" and "step_s"."""
        path = self.folder / f"calm-{kind}.json"
        with open(self.folder / f"calm-{kind}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other drills in this folder may want it, too
            if not path.exists():
                path.write_text(json.dumps(self._run_calmly(kind)))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _run_calmly(self, kind: str) -> dict[str, Any]:
        calm, times = Drill(0, kind, ()), {"start_s": 0.0, "step_s": 0.0, "deadline_s": CALM_DEADLINE_S}
        for _ in range(CALM_TRIES):
            outcome, _, end, _ = self._run_stage(calm, f"calm-{kind}", **times)
            if outcome.code == 0:
                break
        if outcome.code != 0 or not end.startswith("step"):
            raise RuntimeError(f"the calm run {kind} failed: {outcome}; {end}; see {self.folder}/calm-{kind}")
        step_s = (outcome.seconds - outcome.start_s) / STEPS
        return {"end": end, "seconds": outcome.seconds, "start_s": outcome.start_s, "step_s": step_s}

    def _run_stage(
        self, drill: Drill, name: str, *, start_s: float, step_s: float, deadline_s: float
    ) -> tuple[Outcome, Outcome | None, str, PromptCount | None]:
        """Return how the run ended, how it ended when it was started again, its final state, and its prompts."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment["RAY_worker_niceness"] = "0"  # Ray's 15 would make workers wait for everything else on the machine
        environment["RAY_memory_monitor_refresh_ms"] = "0"  # it would kill workers for what other programs use
        arguments = command(drill.kind, folder, self.model)
        times = start_s, step_s, deadline_s, max(deadline_s, RERUN_DEADLINE_S)
        place = {"apart": self.apart, "num_machines": NUM_MACHINES.get(drill.kind, 0)}
        scene = Scene(arguments, environment, str(folder), STEPS, *times, drill.to_json(), **place)
        scene_path, result_path = folder / "scene.json", folder / "result.json"
        scene_path.write_text(json.dumps(asdict(scene)))
        stage = [sys.executable, "-m", "tests.support.blind.stage", str(scene_path), str(result_path)]
        enter = enter_command() if self.apart else []
        timeout_s = sum(times[2:]) + END_TIMEOUT_S
        done = subprocess.run(
            [*enter, *stage], cwd=ROOT, env=os.environ | environment, timeout=timeout_s, capture_output=True, text=True
        )
        if not result_path.exists():
            raise RuntimeError(f"the stage of {name} failed with code {done.returncode}: {done.stderr[-2000:]}")
        result = json.loads(result_path.read_text())
        again = Outcome(**result["again"]) if result["again"] else None
        run = folder / ("kept" if self.apart else "disk") / "run"
        return Outcome(**result["first"]), again, digest(drill.kind, run), prompt_count(run)


def _name(drill: Drill) -> str:
    return f"seed-{drill.seed}-{drill.kind}"


def judge(first: Outcome, again: Outcome | None, *, end: str, calm_end: str, prompts: PromptCount | None = None) -> str:
    """Return "equal", "resumed equal", or what is wrong with a drill, or why that cannot be told.

    Args:
        first: The run that was harmed.
        again: The same command, started again; None if the first one succeeded or did not end.
        end: State after the last of them.
        calm_end: State after the calm run.
        prompts: What became of the run's prompts, by its ledger.
    """
    if not first.hits:
        return "NOT JUDGED: no fault came up before the end or the deadline"
    if first.code is None:
        return f"HANGS: {len(first.hanging)} processes at the deadline; last line: {first.last_line}"
    faults = [*_left_behind("", first), *_left_behind("again: ", again), *_lost_prompts(prompts)]
    if first.unclear:
        faults.append(f"UNCLEAR, code {first.code}: {first.unclear}")
    elif first.code and first.has_traceback:
        faults.append(f"TRACEBACK, code {first.code}: {first.last_line}")
    if again is not None and again.code != 0:
        faults.append(f"NOT RESUMED, code {again.code}: {again.last_line}")
    elif end != calm_end:
        faults.append(f"DIFFERENT: {end}, calm: {calm_end}")
    return "; ".join(faults) or ("equal" if first.code == 0 else "resumed equal")


def _left_behind(name: str, outcome: Outcome | None) -> list[str]:
    if outcome is None:
        return []
    places = {"": outcome.left, "in /dev/shm ": outcome.shared_memory}
    return [f"{name}LEFT {place}{found}" for place, found in places.items() if found]


def _lost_prompts(prompts: PromptCount | None) -> list[str]:
    return [f"PROMPTS {prompts}"] if prompts is not None and (prompts.lost or prompts.repeated) else []
