"""The plan of a job on this machine beside the job's memory, seconds and time left.

    python benchmarks/plan_against_run.py [key=value ...]     settings of main_ppo, as for `hybridrl plan`

The job runs twice, in a process of its own with `trainer.backend=local`. The first run is for memory: its allocator
gives freed memory back at once, because a plan counts what is held. Peaks are those of its resident memory (VmHWM,
reset before each stage), Python and the libraries included. The second run is for seconds, with the usual allocator.
The first step is left out: optimizer and caches come into being in it. Seconds are medians of the others, and the plan
counts with their mean response length. Its memory is for responses of the full length: give
actor_rollout_ref.rollout.ignore_eos=true. ETA is what the line of each step said, beside the seconds that were then
left until the last step's line.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import GeneratorType
from typing import Any

GIB = 2**30
MOMENTS = {  # stage: moments of the plan, of which the largest counts
    "gen": ("generate",),
    "old_log_prob": ("actor log_probs",),
    "update_actor": ("actor backward_start", "actor backward_end", "actor optimizer_step"),
    "update_weights": ("push",),
}
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
ETA = re.compile(r"\bstep (\d+)/(\d+) .*\beta (?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
UNITS_S = (3600, 60, 1)


def peak_bytes() -> int:
    """Return the peak of this process's resident memory since it was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def run(words: list[str], out: str) -> int:
    """Train with these settings, and write stage, step, seconds and peak as JSON lines to `out`."""
    from hybridrl import main_ppo
    from hybridrl.framework.stage import StageFn, spec_of
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

    def measured(fn: StageFn) -> StageFn:
        name = spec_of(fn).name

        def note(ctx: Any, work: Callable[[], Any]) -> Any:
            Path("/proc/self/clear_refs").write_text("5")
            start = time.perf_counter()
            result = work()
            if not isinstance(result, GeneratorType):
                tokens = float(ctx.batch.batch["response_mask"].sum(-1).float().mean()) if name == "update_actor" else 0
                entry = {"stage": name, "step": ctx.step_number, "s": time.perf_counter() - start, "peak": peak_bytes()}
                with open(out, "a") as file:
                    file.write(json.dumps({**entry, "tokens": tokens}) + "\n")
            return result

        def stage(ctx: Any) -> Any:
            result = note(ctx, lambda: fn(ctx))
            return halves(ctx, result) if isinstance(result, GeneratorType) else result

        def halves(ctx: Any, work: Generator) -> Generator[Any, None, None]:
            yield note(ctx, lambda: next(work))
            note(ctx, lambda: next(work, None))

        return stage

    class Measured(RayPPOTrainer):
        def step_wrappers(self) -> Any:
            return [*super().step_wrappers(), measured]

    return main_ppo.main(words, trainer_cls=Measured)


def measure(words: list[str], environment: dict[str, str]) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Run in a child process; return the stages after the first step, and seconds left, expected and real."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/stages.jsonl"
        own = [*words, "trainer.backend=local", f"trainer.default_local_dir={folder}/run"]
        command = [sys.executable, __file__, "--run", out, *own]
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        said: list[tuple[float, float]] = []
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if found := ETA.search(line):
                left = sum(unit * int(text or 0) for unit, text in zip(UNITS_S, found.groups()[2:], strict=True))
                said.append((time.monotonic(), left))
        if process.wait():
            sys.exit("".join(["the run failed:\n", *lines[-30:]]))
        stages = [json.loads(line) for line in Path(out).read_text().splitlines()]
        later = [entry for entry in stages if entry["step"] > stages[0]["step"]]
        return later, [(left, said[-1][0] - at) for at, left in said[:-1]]


def planned(words: list[str], tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the plan's bytes by moment, and its seconds by stage, for responses of so many tokens."""
    from hybridrl.cli.plan import PlannedDevice, planned_seconds, shape_reader
    from hybridrl.config import PPOConfig, load_config
    from hybridrl.planning.machine import this_machine
    from hybridrl.planning.processes import plan_processes

    here = this_machine()
    config = load_config(PPOConfig, words, program="plan_against_run", config_name="ppo_trainer")
    assert config is not None, "--cfg is no setting"
    config = replace(config, trainer=replace(config.trainer, backend="local"))
    [process] = plan_processes(config, read_shape=shape_reader(config), device=here.device, memory=here.memory)
    seconds = planned_seconds(config, PlannedDevice(str(here), here.device, here.memory, is_here=True), tokens=tokens)
    assert seconds is not None, "the speeds of this machine can be measured"
    print(here)
    moments = {moment.name: moment.total for moment in process.moments()}
    return moments, seconds


def row(name: str, plan: float, found: float, digits: int = 2) -> None:
    print(f"{name:>24} {plan:10.{digits}f} {found:10.{digits}f} {plan / found:6.2f}", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        return run(sys.argv[3:], sys.argv[2])
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    planned(words, 1)  # measures the speeds of this machine while it is idle
    held, _ = measure(words, FREED_AT_ONCE)
    stages, left = measure(words, {})
    peaks: defaultdict[str, float] = defaultdict(float)
    seconds: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for entry in held:
        peaks[entry["stage"]] = max(peaks[entry["stage"]], entry["peak"])
    for entry in stages:
        seconds[entry["stage"]][entry["step"]] += entry["s"]
    lengths = [entry["tokens"] for entry in stages if entry["tokens"]]
    moments, expected = planned(words, round(sum(lengths) / len(lengths)))
    print(f"load {os.getloadavg()[0]:.1f}; responses of {sum(lengths) / len(lengths):.1f} tokens")
    print(f"{'GiB':>24} {'plan':>10} {'run':>10}  ratio")
    for stage, names in MOMENTS.items():
        if stage in peaks and (known := [moments[name] for name in names if name in moments]):
            row(stage, max(known) / GIB, peaks[stage] / GIB)
    row("largest", max(moments.values()) / GIB, max(peaks.values()) / GIB)
    print(f"{'seconds of a step':>24} {'plan':>10} {'run':>10}  ratio")
    for stage, plan_s in expected.items():
        row(stage, plan_s, median(seconds[stage].values()))
    steps = {entry["step"] for entry in stages}
    whole = [sum(by_step.get(step, 0.0) for by_step in seconds.values()) for step in steps]
    row("all stages", sum(expected.values()), median(whole))
    print(f"{'seconds left':>24} {'ETA':>10} {'run':>10}  ratio")
    for number, (said, was) in enumerate(left, 1):
        row(f"after step {number}", said, was, digits=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
