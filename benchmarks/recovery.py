"""Cost of losing a process: `python benchmarks/recovery.py [--quick]`, a row per kind of loss, role and moment.

Real runs of PPO on Ray with a tiny model: two actor, critic, reference and reward processes each, a separate rollout
process, a master. A fault hits a process in exactly the intended call (`tests/chaos`). For each loss the table has

- seconds until the master and until the trainer noticed,
- seconds until the processes were back and the step was retried (driver lost: until the next driver continued; master
  lost: until there was another one, and the duration of the step),
- completed steps that were lost, and commits that were lost,
- optimizer updates per step in the final weights.

At the end of its run: whether the parameters are bit-identical to those of an undisturbed run, and the seconds until no
process and no file in /dev/shm was left. An exception in a worker's code must end the run; its row has the seconds
until it did.

--parts N measures where the seconds of a recovery go instead, in N runs of two actor processes and one of the rollout.
`_recovery_parts.py` explains the parts. It prints medians and ranges per role, the CPU seconds of the restarted
processes, and the load. Its rows are stored in --out/parts.jsonl; a further call adds to them.

The other rows are stored in --out/rows.jsonl; rows that exist are not measured again. Seconds are of this machine under
its present load.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _recovery_parts  # noqa: E402
from hybridrl.master.service.journal import history  # noqa: E402
from hybridrl.master.state.events import WorkerFailed  # noqa: E402
from hybridrl.system.process_stat import read_process_stat  # noqa: E402
from hybridrl.trainer.checkpoint.ledger_audit import audit  # noqa: E402
from hybridrl.trainer.checkpoint.step_ledger import read_ledger  # noqa: E402
from hybridrl.view.readers.failures import recoveries  # noqa: E402
from tests.conftest import make_tiny_qwen2  # noqa: E402
from tests.support.end_to_end.failing_runs import SAME, events, fault, hits, run_with  # noqa: E402
from tests.support.end_to_end.runs import largest_difference, metrics, processes_with, weights  # noqa: E402

STEPS, PER_RUN = 6, 4  # one loss in each of steps 2 to 5
NOTHING: dict[str, Any] = {"updates": {}}
LEAK_TIMEOUT_S = 30.0
MEMORY = Path("/dev/shm")
ALL_ROLES = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "reward_model__enable": True,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "trainer__colocate": "device",
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 1,
    "trainer__max_ckpt_to_keep": 2,
    "trainer__master": True,
}
ROUTED = ALL_ROLES | {
    "algorithm__adv_estimator": "grpo",
    "algorithm__use_kl_in_reward": False,
    "reward_model__enable": False,
    "trainer__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__mode": "async",
    "actor_rollout_ref__rollout__n_gpus_per_node": 2,
    "data__max_response_length": 40,
}
CONFIGS = {"all roles": ALL_ROLES, "routed": ROUTED, "small": _recovery_parts.SMALL}
STAGES: dict[str, tuple[str, str | None]] = {
    "idle": ("next_batch", None),
    "generation": ("gen", None),
    "update": ("update_actor", None),
    "push": ("update_weights", None),
    "checkpoint": ("save_checkpoint", None),
    "recovery": ("update_actor", None),
}
# role -> moment -> (stage, call in progress: "" is none, None is any). "recovery": while another role is rebuilt.
MOMENTS: dict[str, dict[str, tuple[str, str | None]]] = {
    "actor": {
        "idle": ("next_batch", ""),
        "update": ("update_actor", "update_actor"),
        "push": ("update_weights", "send_weights"),
        "checkpoint": ("save_checkpoint", "save_checkpoint"),
        "recovery": ("update_critic", "load_snapshot"),
    },
    "rollout": {
        "idle": ("next_batch", ""),
        "generation": ("gen", "generate_sequences"),
        "push": ("update_weights", "receive_weights"),
        "recovery": ("update_critic", "receive_weights"),
    },
    "ref": {
        "idle": ("next_batch", ""),
        "log-probs": ("ref", "compute_ref_log_prob"),
        "recovery": ("update_critic", ""),
    },
    "rm": {"idle": ("next_batch", ""), "scoring": ("reward", "compute_rm_score"), "recovery": ("update_critic", "")},
    "critic": {
        "idle": ("next_batch", ""),
        "update": ("update_critic", "update_critic"),
        "checkpoint": ("save_checkpoint", "save_checkpoint"),
        "recovery": ("update_actor", "load_snapshot"),
    },
    "trainer": STAGES,
    "master": STAGES,
}
AT_WORK = {"actor": "update", "rollout": "generation", "ref": "log-probs", "rm": "scoring", "critic": "update"}
LOST = re.compile(r"(\S+)-(\d+) was lost in .*? of step (\d+) .*from the snapshot of step (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    kind: str
    role: str
    rank: int
    moment: str
    config: str = "all roles"

    def faults(self, step: int) -> list[dict]:
        routed = self.config == "routed" and self.moment == "generation"
        stage, method = ("gen", "serve") if routed else MOMENTS[self.role][self.moment]
        own = fault(step, stage, self.role, self.rank, kind=self.kind, method=method, after_s=0.01 if method else 0.0)
        if self.moment != "recovery":
            return [own]
        other = "actor" if stage == "update_actor" else "critic"
        return [
            fault(step, stage, other, 1, method=stage),
            own | {"after_s": 1.0 if self.role in ("master", "trainer") else 0.0},
        ]

    def key(self) -> str:
        return f"{self.kind} {self.role}-{self.rank} {self.moment} {self.config}"


def cells() -> list[Cell]:
    """Return all cells. A kind of death is the same everywhere, so all kinds are covered only where each role works."""
    found = []
    for role, moments in MOMENTS.items():
        for rank in (0, 1) if role == "actor" else (0,):
            kinds = ("kill",) if role in ("master", "trainer") else ("kill", "freeze")
            found += [Cell(kind, role, rank, moment) for kind, moment in itertools.product(kinds, moments)]
    found += [Cell(kind, role, 0, moment) for kind in ("exit", "memory") for role, moment in AT_WORK.items()]
    found += [Cell(kind, "trainer", 0, "update") for kind in ("freeze", "exit", "memory")]
    found += [
        Cell(kind, "rollout", 1, moment, "routed") for kind in ("kill", "freeze") for moment in ("idle", "generation")
    ]
    return found + [Cell("exception", role, 0, moment) for role, moment in AT_WORK.items()]


QUICK = [
    Cell("kill", "rollout", 0, "generation"),
    Cell("kill", "actor", 1, "update"),
    Cell("memory", "critic", 0, "update"),
    Cell("freeze", "actor", 0, "update"),
    Cell("kill", "master", 0, "update"),
    Cell("exception", "critic", 0, "update"),
]


def runs_of(wanted: Iterable[Cell]) -> list[list[Cell]]:
    """Return groups of cells that can share a run: survivable losses of one configuration, a few at a time.

    An exception ends its run. A master must not be killed again before the first is back.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in wanted:
        single = (
            cell.kind == "exception" or cell.role == "master" or (cell.role, cell.moment) == ("trainer", "recovery")
        )
        name = cell.key() if single else f"{cell.config}, {'trainer' if cell.role == 'trainer' else 'worker'}"
        groups.setdefault(name, []).append(cell)
    return [group[start : start + PER_RUN] for group in groups.values() for start in range(0, len(group), PER_RUN)]


class Bench:
    """Models, runs and rows. out: their directory."""

    def __init__(self, out: Path):
        self.out, self.path = out, out / "rows.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.rows = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.model, self.judge = out / "model", out / "judge"
        if not self.judge.is_dir():
            self.model.mkdir(exist_ok=True)
            make_judge(make_tiny_qwen2(self.model), self.judge)

    def run(self, name: str, config: str, faults: list[dict]) -> tuple[Path, Any, float]:
        """Return the run's directory, its process result and when it ended."""
        folder = self.out / f"{name}-{time.time():.0f}"
        changes = CONFIGS[config] | ({"reward_model__model__path": self.judge} if config == "all roles" else {})
        done = run_with(folder, self.model, *faults, timeout_s=900, **changes)
        return folder, done, time.time()

    def undisturbed(self, config: str) -> Path:
        for folder in sorted(self.out.glob(f"undisturbed-{config.replace(' ', '-')}-*")):
            if (folder / f"run/global_step_{CONFIGS[config]['trainer__total_training_steps']}").is_dir():
                return folder
        folder, done, _ = self.run(f"undisturbed-{config.replace(' ', '-')}", config, [])
        if done.returncode:
            sys.exit(done.stderr)
        return folder

    def measure(self, group: list[Cell]) -> None:
        faults = {cell: cell.faults(step) for step, cell in enumerate(group, 2)}
        wanted = self.undisturbed(group[0].config)
        files_before = {path.name for path in MEMORY.iterdir()}
        folder, done, ended = self.run("run", group[0].config, list(itertools.chain(*faults.values())))
        if not events(folder, "stage"):
            print(f"{folder} did not start; run again to measure its cells\n{done.stderr}", file=sys.stderr)
            return
        left_s = seconds_until_nothing_is_left(folder, ended, files_before)
        if group[0].kind == "exception":
            same = done.returncode == 1 and "planted" in done.stderr
        else:
            same = done.returncode == 0 and is_same(folder, wanted)
        if not same:
            print(f"{folder} differs from the undisturbed run\n{done.stderr}", file=sys.stderr)
        for cell, planted in faults.items():
            row = asdict(cell) | {"key": cell.key(), "same": same, "left_s": left_s, "run": str(folder)}
            row |= ended_by(folder, ended) if cell.kind == "exception" else measured(folder, wanted, cell, planted[-1])
            self.rows.append(row)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)

    def measure_parts(self, num_runs: int) -> bool:
        """Print where the seconds of recoveries go; return whether all runs ended as the undisturbed one."""
        path, wanted, same = self.out / "parts.jsonl", self.undisturbed("small"), True
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for number in range(num_runs):
            folder, done, _ = self.run(f"parts-{number}", "small", _recovery_parts.FAULTS)
            if done.returncode or not is_same(folder, wanted):
                same = False
                print(f"{folder} differs from the undisturbed run\n{done.stderr}", file=sys.stderr)
            rows += _recovery_parts.rows_of_run(folder)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"\n{_recovery_parts.split_by_part(rows)}\nload: {os.getloadavg()}", flush=True)
        return same


def make_judge(policy: Path, folder: Path) -> None:
    """Write a reward model that reads the policy's tokens."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def is_same(folder: Path, wanted: Path) -> bool:
    """Return whether two runs have the same parameters and metrics."""
    newest = [max((f / "run").glob("global_step_*"), key=lambda path: int(path.name[12:])) for f in (folder, wanted)]
    ends = [weights(path, path.parents[1] / f"hf-{time.time_ns()}") for path in newest]
    rows = [[[row.get(name) for name in SAME] for row in metrics(f / "run")] for f in (folder, wanted)]
    return largest_difference(*ends) == 0 and rows[0] == rows[1]


def seconds_until_nothing_is_left(folder: Path, ended: float, files_before: set[str]) -> float | None:
    """Return the seconds until the run's processes and its files in /dev/shm are gone; None on timeout."""
    pids = {pid for stage in events(folder, "stage") for pid in stage["pids"]} | {hit["pid"] for hit in hits(folder)}
    while time.time() < ended + LEAK_TIMEOUT_S:
        alive = processes_with(f"FAULTS_LOG={folder}/") or any(read_process_stat(pid).state for pid in pids)
        if not alive and not unused_files(files_before):
            return time.time() - ended
        time.sleep(0.1)
    return None


def unused_files(before: set[str]) -> set[str]:
    """Return new files in /dev/shm that no process has mapped or open (other programs' files are in use)."""
    new, used = {path.name for path in MEMORY.iterdir()} - before, ""
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with contextlib.suppress(OSError):  # the process has ended
            used += (process / "maps").read_text() + "".join(os.readlink(link) for link in (process / "fd").iterdir())
    return {name for name in new if str(MEMORY / name) not in used}


def ended_by(folder: Path, ended: float) -> dict[str, Any]:
    return {"ended_s": ended - hits(folder)[0]["at"]}


def measured(folder: Path, wanted: Path, cell: Cell, planted: dict) -> dict[str, Any]:
    """Return the figures of one loss."""
    hit = next(
        (h for h in hits(folder) if all(h[name] == planted[name] for name in ("step", "stage", "role", "rank"))), None
    )
    how = {"master": of_master, "trainer": of_trainer}.get(
        cell.role, of_replica if cell.config == "routed" else of_process
    )
    found = None if hit is None else how(folder, cell, hit)
    return {"missed": True} if found is None or hit is None else found | of_ledger(folder, wanted, hit["step"])


def of_process(folder: Path, cell: Cell, hit: dict) -> dict[str, Any] | None:
    """Return the figures of a process that the trainer restarts."""
    logged = [entry for entry in events(folder, "said") if entry["at"] >= hit["at"]]
    matches = (
        entry for entry in logged if (m := LOST.match(entry["text"])) and (m[1], int(m[2])) == (cell.role, cell.rank)
    )
    notice = next(matches, None)
    if notice is None or (lost := LOST.match(notice["text"])) is None:
        return None
    return {
        "known_s": master_detected(folder, hit),
        "told_s": since(hit["at"], notice["at"]),
        "back_s": since(notice["at"], first(logged, "all roles are at the end of step", after=notice["at"])),
        "again_s": since(notice["at"], step_start(folder, hit["step"] + 1, after=notice["at"])),
        "lost_steps": max(0, int(lost[3]) - 1 - int(lost[4])),
    }


def of_replica(folder: Path, cell: Cell, hit: dict) -> dict[str, Any] | None:
    """Return the figures of a process that the router restarts."""
    logged = [entry for entry in events(folder, "said") if entry["at"] >= hit["at"]]
    out, back = (
        first(logged, f"replica {cell.rank} {what}", after=hit["at"]) for what in ("was lost", "was restarted")
    )
    if out is None:
        return None
    return {
        "known_s": master_detected(folder, hit),
        "told_s": since(hit["at"], out),
        "back_s": since(out, back),
        "lost_steps": 0,
    }


def of_master(folder: Path, cell: Cell, hit: dict) -> dict[str, Any]:
    back = next((entry["at"] for entry in events(folder, "back") if entry["at"] > hit["at"]), None)
    processes = {tuple(stage["pids"]) for stage in events(folder, "stage")}
    start = step_start(folder, hit["step"], after=0.0)
    return {
        "back_s": since(hit["at"], back),
        "again_s": since(start, step_start(folder, hit["step"] + 1, after=hit["at"])),
        "lost_steps": 0,
        "pids_changed": len(processes) - 1,
    }


def of_trainer(folder: Path, cell: Cell, hit: dict) -> dict[str, Any] | None:
    """Return the figures of the driver, which the supervisor restarts."""
    failures = recoveries(str(folder / "run"))
    failure = next((one for one in failures if one["lost"][0] == "trainer" and one["detected_at"] >= hit["at"]), None)
    if failure is None:
        return None
    back = failure["detected_at"] + failure["seconds"]
    return {
        "known_s": master_detected(folder, hit),
        "back_s": since(hit["at"], back),
        "again_s": since(hit["at"], step_start(folder, hit["step"] + 1, after=back)),
        "lost_steps": max(0, hit["step"] - 1 - failure["back_at_step"]),
        "pids_changed": len({tuple(stage["pids"]) for stage in events(folder, "stage")}) - 1,
    }


def step_start(folder: Path, step: int, *, after: float) -> float | None:
    """Return when a step first started after `after`."""
    stages = (e for e in events(folder, "stage") if (e["name"], e["step"]) == ("next_batch", step))
    return next((entry["at"] for entry in stages if entry["at"] >= after), None)


def first(logged: list[dict], text: str, *, after: float) -> float | None:
    return next((entry["at"] for entry in logged if entry["at"] >= after and text in entry["text"]), None)


def since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def master_detected(folder: Path, hit: dict) -> float | None:
    """Return the seconds until the master had the loss in its journal."""
    for journal in (folder / "run/master").iterdir():
        for entry in history(str(journal)):
            if isinstance(entry.event, WorkerFailed) and entry.event.pid == hit["pid"]:
                return entry.at - hit["at"]
    return None


def of_ledger(folder: Path, wanted: Path, step: int) -> dict[str, Any]:
    """Return the step's updates as a share of the undisturbed run's, and lost commits."""
    actual, expected = (audit(read_ledger(str(f / "run/ledger.jsonl"))) for f in (folder, wanted))
    share = updates_of(actual.steps, step) / updates_of(expected.steps, step)
    return {"updates": share, "lost_commits": STEPS - len(actual.steps), "problems": actual.problems()}


def updates_of(steps: dict[int, dict], step: int) -> int:
    """Return the optimizer steps of all roles in a step of a ledger."""
    return sum(steps.get(step, NOTHING)["updates"].values()) - sum(steps.get(step - 1, NOTHING)["updates"].values())


# -- the table

COLUMNS = (
    "loss, of, in, master knew, trainer knew, back, step again, steps lost, commits lost, updates per step, "
    "same end, nothing left"
)
HEAD = f"| {COLUMNS.replace(', ', ' | ')} |\n|{'---|' * (1 + COLUMNS.count(','))}"


def line_of(row: dict[str, Any]) -> str:
    process = (
        row["role"]
        if "pids_changed" in row
        else f"{row['role']}-{row['rank']}" + (" (routed)" if row["config"] == "routed" else "")
    )
    head = f"| {row['kind']} | {process} | {row['moment']} |"
    tail = f" {'yes' if row['same'] else 'NO'} | {seconds(row['left_s'])} |"
    if row.get("missed"):
        return f"{head} not hit, or not noticed | | | | | | |{tail}"
    if "ended_s" in row:
        return f"{head} | the run ended after {row['ended_s']:.1f} | | | - | - | - |{tail}"
    noticed = f"{row['pids_changed']} workers changed" if "pids_changed" in row else seconds(row["told_s"])
    times = " | ".join([seconds(row.get("known_s")), noticed, seconds(row["back_s"]), seconds(row.get("again_s"))])
    return f"{head} {times} | {row['lost_steps']} | {row['lost_commits']} | {row['updates']:g} |{tail}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a handful of cells")
    parser.add_argument(
        "--only", default="", help="cells that this regular expression finds, for instance 'freeze actor-0'"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/recovery"))
    parser.add_argument("--parts", type=int, metavar="N", help="where the seconds go, in N runs")
    options = parser.parse_args()
    bench = Bench(options.out.resolve())
    if options.parts is not None:
        sys.exit(0 if bench.measure_parts(options.parts) else "some runs differ from the undisturbed one; see above")
    wanted = [cell for cell in (QUICK if options.quick else cells()) if re.search(options.only, cell.key())]
    done = {row["key"]: row for row in bench.rows}
    print(HEAD)
    for cell in wanted:
        if cell.key() in done:
            print(line_of(done[cell.key()]))
    for group in runs_of(cell for cell in wanted if cell.key() not in done):
        bench.measure(group)
    if not all(row["same"] and not row.get("problems") for row in bench.rows):
        sys.exit("some rows differ from the undisturbed run or have ledger problems; see the table")


if __name__ == "__main__":
    main()
