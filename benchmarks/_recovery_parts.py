"""Where the seconds of a recovery go: the faults and the table of `recovery.py`.

notice      from the fault until the trainer had noticed
disconnect  what depends on the lost processes is stopped
kill        the rest of the role's processes are ended
start       Ray starts the processes
import      they import the workers' modules, and construct the workers
group       they join their process group; the slowest rank's time, with its wait for the others
model       they import what is left, and load their models
snapshot    all trained roles load the snapshot
push        the rollout gets the snapshot's weights
repeat      the lost step runs again
sum         of all these
CPU         of the new processes, all ranks, from their start until the step starts again: user and system time
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridrl.view.readers.failures import recoveries
from tests.support.end_to_end.failing_runs import events, fault, hits

STEPS = 5  # the last one shows when a lost step has run again
SMALL = {  # two actor processes and one of the rollout
    "algorithm__adv_estimator": "grpo",
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "trainer__colocate": "device",
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": STEPS,
    "trainer__max_ckpt_to_keep": 2,
}
FAULTS = [
    fault(2, "update_actor", "actor", 1, method="update_actor", after_s=0.01),
    fault(3, "gen", "rollout", 0, method="generate_sequences", after_s=0.01),
    fault(4, "update_actor", "actor", 0, method="update_actor", after_s=0.01),
]
NAMES = ("notice", "disconnect", "kill", "start", "import", "group", "model", "snapshot", "push", "repeat")


def recovery_parts(folder: Path, hit: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the first recovery after a fault, by part, and the CPU seconds of its processes."""
    failures = recoveries(str(folder / "run"))
    failure = next((one for one in failures if one["detected_at"] >= hit["at"]), None)
    if failure is None or "parts" not in failure:
        return {}
    back = failure["detected_at"] + failure["seconds"]
    stages = events(folder, "stage")
    after = [stage for stage in stages if stage["at"] >= back]
    found = {"notice": failure["detected_at"] - hit["at"]} | failure["parts"]
    ends = (stage["at"] for stage in after if (stage["name"], stage["step"]) == ("next_batch", hit["step"] + 1))
    if (end := next(ends, None)) is not None:
        found["repeat"] = end - back
    if after:
        before = {pid for stage in stages if stage["at"] < back for pid in stage["pids"]}
        found["CPU"] = sum(s for pid, s in zip(after[0]["pids"], after[0]["cpu_s"], strict=True) if pid not in before)
    return found


def rows_of_run(folder: Path) -> list[dict[str, Any]]:
    """Return a row per loss of a run: role, and parts."""
    found = ((hit, recovery_parts(folder, hit)) for hit in hits(folder))
    return [{"role": hit["role"], "parts": parts} for hit, parts in found if parts]


def split_by_part(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table of the seconds of each part, per role: median, and range; "" without rows."""
    rows = list(rows)
    lines = [f"| lost | losses | {' | '.join(NAMES)} | sum | CPU |", f"|{'---|' * (4 + len(NAMES))}"]
    for role in sorted({row["role"] for row in rows}):
        own = [row["parts"] for row in rows if row["role"] == role]
        cells = [median_and_range([parts[name] for parts in own if name in parts]) for name in NAMES]
        cells.append(median_and_range([sum(parts.get(name, 0.0) for name in NAMES) for parts in own]))
        cells.append(median_and_range([parts["CPU"] for parts in own if "CPU" in parts]))
        lines.append(f"| {role} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines) if rows else ""


def median_and_range(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.2f}" if values else "-"
    return middle if len(values) < 2 else f"{middle} ({min(values):.2f} to {max(values):.2f})"
