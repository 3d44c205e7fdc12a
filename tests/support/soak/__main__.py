"""A soak: a real run for hours with a fault every minute; nothing may grow, and no step may become slower.

    make soak HOURS=1
    python -m tests.support.soak --hours 1 --seed 1 --folder outputs/soak

The run is `main_ppo` on Ray with the tiny model of the drills: two steps ahead, partial rollouts, validation every ten
steps, a checkpoint every five of which two are kept, a master. Every few seconds memory, open files and threads of
each of its processes are measured, and /dev/shm. `report.py` says what is compared. Writes `samples.jsonl`,
`run.log`, `report.md` and `soak.png`; the exit code is 1 if something grows, if the run ends by itself or leaves
something. Ctrl-C and SIGTERM end the soak before its time, with a report.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.support.blind.runs import CHANGES, ON_RAY, ROOT, make_model
from tests.support.blind.stage import can_be_apart, enter_command
from tests.support.end_to_end.runs import settings
from tests.support.soak.report import draw, make_report, read_samples
from tests.support.soak.stage import END_TIMEOUT_S, START_TIMEOUT_S, Scene

SCENE = "scene.json"
STEPS = 1_000_000  # more than the time allows: SIGTERM ends the run
STARTING_AND_ENDING_S = START_TIMEOUT_S + END_TIMEOUT_S + 120.0
RUN = ON_RAY | CHANGES["lag"]
RUN |= {
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 5,
    "trainer__max_ckpt_to_keep": 2,
    "trainer__test_freq": 10,
}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_LOG_MONITOR_MAX_OPEN_FILES": "20",  # by default 200, which a soak of an hour does not reach
    # Freed memory goes back to the kernel, so that what grows is in use. glibc raises its thresholds of 128 KiB by
    # itself otherwise, workers switch them off, and what a process holds is then the most that it ever needed.
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
}


def make_scene(folder: Path, *, seconds: float, fault_every_s: float, sample_every_s: float, seed: int) -> Scene:
    """Write the model and the data into a folder, and return what `stage` needs.

    Removes an earlier soak in it. Raises FileExistsError if the folder has something else in it.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / SCENE).exists():
        raise FileExistsError(f"--folder {folder} has files that are not of a soak; choose a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, run = make_model(folder / "model"), folder / "run"
    words = settings(folder, model, **RUN, trainer__default_local_dir=run)
    return Scene(
        [sys.executable, "-m", "hybridrl.main_ppo", *words],
        ENVIRONMENT,
        folder=str(folder),
        run=str(run),
        seconds=seconds,
        fault_every_s=fault_every_s,
        sample_every_s=sample_every_s,
        seed=seed,
        apart=can_be_apart(),
    )


def soak(scene: Scene) -> int:
    """Run it, write the report, and return the exit code."""
    folder = Path(scene.folder)
    (folder / SCENE).write_text(json.dumps(asdict(scene)))
    stage = [sys.executable, "-m", "tests.support.soak.stage", str(folder / SCENE)]
    enter = enter_command() if scene.apart else []
    process = subprocess.Popen([*enter, *stage], cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True)
    with ended_by_signals(process):
        code = process.wait(scene.seconds + STARTING_AND_ENDING_S)
    if code != 0:
        raise RuntimeError(f"the stage failed with code {code}; {folder}/run.log has the output of the run")
    return judge(folder, Path(scene.run))


@contextmanager
def ended_by_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward SIGTERM and Ctrl-C to a stage, which then ends the run early; kill it if it stays."""

    def forward(*_: object) -> None:
        os.killpg(process.pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def judge(folder: Path, run: Path) -> int:
    """Write the report of a soak that has ended, and return the exit code."""
    result = json.loads((folder / "result.json").read_text())
    samples = read_samples(folder, run)
    report = make_report(result, samples)
    (folder / "report.md").write_text(report.text())
    draw(samples, result["hits"], folder / "soak.png")
    sys.stdout.write(report.text())
    return 1 if report.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hours", type=float, default=1.0, help="duration (default: %(default)s)")
    add(
        "--folder",
        type=Path,
        default=Path("outputs/soak"),
        help="for everything that is written; an earlier soak in it is removed",
    )
    add("--seed", type=int, default=1, help="of the faults (default: %(default)s)")
    add("--fault-every", type=float, default=60.0, metavar="SECONDS", help="0: no faults (default: %(default)s)")
    add(
        "--sample-every", type=float, default=3.0, metavar="SECONDS", help="between measurements (default: %(default)s)"
    )
    add("--report", action="store_true", help="only write the report again, of the soak in the folder")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.report:
        return judge(folder, folder / "run")
    numbers = {"fault_every_s": arguments.fault_every, "sample_every_s": arguments.sample_every}
    try:
        scene = make_scene(folder, seconds=arguments.hours * 3600, seed=arguments.seed, **numbers)
    except FileExistsError as error:
        parser.error(str(error))
    return soak(scene)


if __name__ == "__main__":
    sys.exit(main())
