"""What a soak says: a slope and a verdict for every kind of process and every quantity, and the throughput."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.soak.sampling import Usage, worker_roles
from tests.support.soak.slope import SECONDS_PER_HOUR, Slope, fit_slope, median_step_s, steps_per_second

MIB = 1024**2
TENTH = 0.1
WARM_UP_S = 60.0  # of every process at least, in which it loads its model
MAX_WARM_UP = 0.1  # of the soak: the limit of the above
WARM_UP_SHARE = 0.5  # of a process's life at least: its caches fill and level off, whereas a leak goes on
WARM_UP_STEPS = 10  # of the run, which completes none while a process imports
JUMP = 2.0  # open files or threads that come once, such as a thread for Ray's next connection, are no growth
JUMP_SLOPE = 1.5  # the steepest slope of one jump of height 1, half-way through a time of length 1
MIN_SHARE = 0.1  # of the soak: a kind of process that was seen for less has no verdict
SLOWER = 1.25  # CPU time of a step in the last tenth, relative to the first: more is a verdict of its own
WORKER = "worker"


@dataclass(frozen=True)
class Quantity:
    """Something measured of each process.

    Attributes:
        unit: Of the values in the report.
        bound: Growth per hour that is none, in this unit: less than a thousandth of what a small machine has.
        of: Returns it for a process.
    """

    name: str
    unit: str
    bound: float
    of: Callable[[Usage], float]


QUANTITIES = (
    Quantity("memory", "MiB", 10.0, lambda usage: usage.memory / MIB),
    Quantity("open files", "", 2.0, lambda usage: float(usage.files)),
    Quantity("threads", "", 2.0, lambda usage: float(usage.threads)),
)
OF_THE_RUN = (  # name, unit, bound per hour, value of a sample
    ("processes", "", 1.0, lambda sample: float(len(sample["usages"]))),
    ("memory", "MiB", 20.0, lambda sample: sum(usage.memory for usage in sample["usages"]) / MIB),
    ("open files", "", 20.0, lambda sample: float(sum(usage.files for usage in sample["usages"]))),
    ("threads", "", 20.0, lambda sample: float(sum(usage.threads for usage in sample["usages"]))),
    ("/dev/shm", "MiB", 10.0, lambda sample: sample["shm"] / MIB),
)
ALL = "all processes"


@dataclass(frozen=True)
class Row:
    """One line of the table. `slope` is None if there is too little to fit."""

    kind: str
    quantity: str
    unit: str
    bound: float
    slope: Slope | None

    @property
    def verdict(self) -> str:
        if self.slope is None:
            return "too short"
        jumps = self.quantity in ("open files", "threads")
        of_a_jump = JUMP_SLOPE * JUMP / self.slope.seconds * SECONDS_PER_HOUR if jumps else 0.0
        return self.slope.verdict(max(self.bound, of_a_jump))

    def line(self) -> str:
        name = f"{self.quantity}, {self.unit}" if self.unit else self.quantity
        slope = self.slope
        if slope is None:
            return f"| {self.kind} | {name} | | | | {self.verdict} |"
        growth = f"{slope.per_hour:+.1f} ± {slope.error:.1f}"
        return f"| {self.kind} | {name} | {slope.num_incarnations} | {slope.mean:.1f} | {growth} | {self.verdict} |"


@dataclass(frozen=True)
class Report:
    """Result of a soak.

    Attributes:
        rows: Of the table.
        throughput: Sentences about the steps.
        problems: What fails the soak; empty: it passed.
    """

    rows: list[Row]
    throughput: list[str]
    problems: list[str]

    def text(self) -> str:
        head = "| process | quantity | incarnations | mean | change per hour | verdict |\n|---|---|---|---|---|---|"
        verdict = "\n".join(self.problems) or "passed: nothing grows, and no step is slower"
        return "\n".join([head, *(row.line() for row in self.rows), "", *self.throughput, verdict]) + "\n"


def read_samples(folder: Path, run: Path) -> list[dict[str, Any]]:
    """Return the samples, each with "usages"; workers are named after their roles, as the journal has them."""
    labels = worker_roles(run)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        usages = [Usage(*values) for values in sample.pop("processes")]
        sample["usages"] = [Usage(labels.get(u.pid, u.kind) if u.kind == WORKER else u.kind, *_rest(u)) for u in usages]
    return samples


def _rest(usage: Usage) -> tuple[Any, ...]:
    return tuple(vars(usage).values())[1:]


def series_of(samples: Sequence[Mapping[str, Any]], value: Callable[[Usage], float]) -> dict[str, dict]:
    """Return kind -> process -> times and values."""
    found: dict[str, dict] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    for sample in samples:
        for usage in sample["usages"]:
            times, values = found[usage.kind][usage.pid, usage.started]
            times.append(sample["at"])
            values.append(value(usage))
    return found


def settled(samples: Sequence[Mapping[str, Any]], *, warm_up_s: float) -> list[dict[str, Any]]:
    """Return the samples from the first step on, each without the processes that are warming up.

    A process counts in the second half of its life, from `warm_up_s` and `WARM_UP_STEPS` steps after its first sample:
    on a busy machine, imports alone take minutes, and no step completes before they have ended.
    """
    first: dict[tuple[str, int, int], tuple[float, int]] = {}
    last: dict[tuple[str, int, int], float] = {}
    for sample in samples:
        for usage in sample["usages"]:
            first.setdefault(_incarnation(usage), (sample["at"], sample["step"]))
            last[_incarnation(usage)] = sample["at"]
    warm_at = {key: at + max(warm_up_s, WARM_UP_SHARE * (last[key] - at)) for key, (at, _) in first.items()}
    found = []
    for sample in samples:
        if not sample["step"]:
            continue
        usages = []
        for usage in sample["usages"]:
            key = _incarnation(usage)
            if sample["at"] >= warm_at[key] and sample["step"] >= first[key][1] + WARM_UP_STEPS:
                usages.append(usage)
        found.append({**sample, "usages": usages})
    return found


def _incarnation(usage: Usage) -> tuple[str, int, int]:
    return usage.kind, usage.pid, usage.started


def make_rows(samples: Sequence[Mapping[str, Any]], *, seconds: float) -> list[Row]:
    """Return the table.

    Args:
        samples: From `read_samples`.
        seconds: Duration of the soak.
    """
    warm_up_s = min(WARM_UP_S, MAX_WARM_UP * seconds)
    late = [sample for sample in samples if sample["step"] >= WARM_UP_STEPS]
    late = [sample for sample in late if sample["at"] >= late[0]["at"] + WARM_UP_SHARE * seconds]
    rows = []
    for name, unit, bound, of_sample in OF_THE_RUN:
        slope = fit_slope([([sample["at"] for sample in late], [of_sample(sample) for sample in late])])
        rows.append(Row(ALL, name, unit, bound, slope))
    calm = settled(samples, warm_up_s=warm_up_s)
    for quantity in QUANTITIES:
        for kind, incarnations in sorted(series_of(calm, quantity.of).items()):
            slope = fit_slope(list(incarnations.values()))
            if slope is not None and slope.seconds >= MIN_SHARE * seconds:
                rows.append(Row(kind, quantity.name, quantity.unit, quantity.bound, slope))
    return rows


def cpu_per_step(samples: Sequence[Mapping[str, Any]], *, start: float, end: float) -> float:
    """Return the median CPU time of all processes per step, over neighbouring samples with a step between them.

    Other programs on the machine change it far less than the duration of a step. Units: seconds. NaN: no such samples.
    """
    shares = []
    for earlier, later in zip(samples, samples[1:], strict=False):
        steps = later["step"] - earlier["step"]
        if steps > 0 and start <= earlier["at"] and later["at"] <= end:
            before = {(usage.pid, usage.started): usage.cpu_s for usage in earlier["usages"]}
            used = sum(usage.cpu_s - before.get((usage.pid, usage.started), 0.0) for usage in later["usages"])
            shares.append(used / steps)
    return sorted(shares)[len(shares) // 2] if shares else float("nan")


def make_report(result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Report:
    """Return rows, throughput and problems of a soak.

    Args:
        result: `stage.Result`, as a dictionary.
        samples: From `read_samples`.
    """
    reached = result["reached"]
    rows = make_rows(samples, seconds=result["seconds"])
    problems = [f"GROWS: {row.quantity} of {row.kind}" for row in rows if row.verdict == "GROWS"]
    if result["ended_early"]:
        problems.append(f"ENDED EARLY: {result['ended_early']}; see run.log")
    if result["code"] is None:
        problems.append("HANGS after SIGTERM")
    problems += [f"LEFT after the end: {label}" for label in result["left"]]
    problems += [f"LEFT in /dev/shm: {name}" for name in result["shared_memory"]]
    if len(reached) < 20:
        return Report(rows, [f"{len(reached)} steps: too few for a throughput"], problems)
    length = TENTH * (reached[-1] - reached[0])
    tenths = {"first": (reached[0], reached[0] + length), "last": (reached[-1] - length, reached[-1])}
    throughput, cpu = [], {}
    for name, (start, end) in tenths.items():
        cpu[name] = cpu_per_step(samples, start=start, end=end)
        load = [sample["load"] for sample in samples if start <= sample["at"] <= end]
        throughput.append(
            f"{name} tenth: {steps_per_second(reached, start=start, end=end):.3f} steps/s, median "
            f"{median_step_s(reached, start=start, end=end):.2f} s per step, {cpu[name]:.2f} s of CPU per step, "
            f"{sum(start <= at <= end for at, _ in result['hits'])} faults, load {sum(load) / max(1, len(load)):.1f}"
        )
    whole = steps_per_second(reached, start=reached[0], end=reached[-1])
    ratio = whole * median_step_s(reached, start=reached[0], end=reached[-1])
    throughput.append(
        f"{len(reached)} steps in {result['seconds']:.0f} s, {whole:.3f} per second; {len(result['hits'])} faults; "
        f"effective training time ratio {ratio:.2f} (steps times the median step, over their time)"
    )
    if cpu["last"] > SLOWER * cpu["first"]:
        problems.append(f"SLOWER: a step takes {cpu['last'] / cpu['first']:.2f} times the CPU of the first tenth")
    return Report(rows, throughput, problems)


def draw(samples: Sequence[Mapping[str, Any]], hits: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw memory, open files and threads of every process over time, with the faults as vertical lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(QUANTITIES) + 1, 1, figsize=(10, 13), sharex=True, layout="constrained")
    colours: dict[str, str] = {}
    for axis, quantity in zip(axes, QUANTITIES, strict=False):
        for kind, incarnations in sorted(series_of(samples, quantity.of).items()):
            colours.setdefault(kind, f"C{len(colours)}" if len(colours) < 10 else "0.6")
            for number, (times, values) in enumerate(incarnations.values()):
                minutes = [at / 60 for at in times]
                axis.plot(minutes, values, color=colours[kind], lw=1, label="" if number else kind)
        axis.set_ylabel(f"{quantity.name}, {quantity.unit}" if quantity.unit else quantity.name)
        axis.set_yscale("log")
    minutes = [sample["at"] / 60 for sample in samples]
    axes[-1].plot(minutes, [sample["step"] for sample in samples], color="C0", label="steps completed")
    axes[-1].set_ylabel("steps completed")
    other = axes[-1].twinx()
    other.plot(minutes, [sample["shm"] / MIB for sample in samples], color="C1", lw=1)
    other.set_ylabel("/dev/shm, MiB (orange)")
    axes[-1].set_xlabel("minutes")
    for axis in axes:
        for at, _ in hits:
            axis.axvline(at / 60, color="0.85", lw=0.8, zorder=0)
    axes[0].legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.3))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
