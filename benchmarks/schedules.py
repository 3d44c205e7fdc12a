"""What the schedules would give: `python benchmarks/schedules.py [PART ...] [--figure docs/schedules.png]`.

    published   pairs of a synchronous and an asynchronous run that others published, and the simulation of the second
    tail        tail batching beside whole synchronous steps, for three sizes of models and responses
    scale       our schedules from 8 to 4096 devices

Nothing is started: `benchmarks.simulation` runs the trainer on a virtual clock. docs/simulation.md explains what is
real, and reads the tables.
"""

import argparse
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.simulation import DEVICES, MODELS, Costs, Lengths, Simulation, SimulationResult, simulate

NO_REFERENCE = {"actor_rollout_ref.actor.use_kl_loss": False}
BYPASS = {"actor_rollout_ref.rollout.calculate_log_probs": True, "algorithm.rollout_correction.bypass_mode": True}
H20_7B = Costs(DEVICES["h20"], MODELS["qwen2.5-7b"])


@dataclass(frozen=True)
class Published:
    """A synchronous run and an asynchronous one. Seconds are means of a step; 512 prompts of 16 responses each.

    Attributes:
        gen, old_log_prob, update, step: Of the synchronous run, on all devices in turn.
        train_gpus, rollout_gpus: Of the asynchronous run.
        async_update, async_step: Of the asynchronous run.
        async_log_prob: Whether the asynchronous run computes log-probs before the update.
    """

    name: str
    gpus: int
    cap: int
    gen: float
    old_log_prob: float
    update: float
    step: float
    train_gpus: int
    rollout_gpus: int
    async_update: float
    async_step: float
    async_log_prob: bool


PAIRS = (  # verl's documentation, docs/advance: fully_async.md of 2025-10 and one_step_off.md of 2025-07
    Published("fully async, 32", 32, 28_672, 357.41, 107.71, 313.81, 790.10, 16, 16, 269.80, 294.77, False),
    Published("fully async, 64", 64, 28_672, 150.72, 70.26, 133.41, 365.28, 32, 32, 156.98, 189.26, False),
    Published("fully async, 128", 128, 28_672, 177.85, 53.92, 113.81, 356.30, 64, 64, 113.16, 150.63, False),
    Published("one step off, FSDP2", 32, 20_480, 321.0, 88.0, 286.0, 749.0, 24, 8, 337.0, 520.0, True),
    Published("one step off, Megatron", 32, 8_192, 207.0, 119.0, 344.0, 699.0, 24, 8, 347.0, 566.0, True),
)


def run(
    costs: Costs, lengths: Lengths, gpus: int, rollout_gpus: int = 0, *, steps: int = 1, **more: Any
) -> SimulationResult:
    warmup = min(3, steps - 1)
    base = Simulation(costs, gpus, rollout_gpus, mini_batch=32, steps=steps, warmup=warmup, lengths=lengths)
    return simulate(replace(base, **more))


def fit(pair: Published) -> tuple[Costs, Lengths, SimulationResult]:
    """Return the costs and lengths with which the synchronous run takes the published times, and that run.

    Fitted are the median length, by the update, and the overhead of a decoding step, by the generation.
    """
    lengths = Lengths(median=700, cap=pair.cap)
    for _ in range(3):
        found = run(H20_7B, lengths, pair.gpus, settings=NO_REFERENCE).stages_s["update_actor"]
        lengths = replace(lengths, median=lengths.median * (pair.update / found) ** 1.1)
    overheads = (0.0, 0.02)
    low, high = (
        run(replace(H20_7B, step_overhead_s=seconds), lengths, pair.gpus, settings=NO_REFERENCE).stages_s["gen"]
        for seconds in overheads
    )
    overhead = max(0.0, (pair.gen - low) / (high - low) * overheads[1])
    costs = replace(H20_7B, step_overhead_s=overhead)
    return costs, lengths, run(costs, lengths, pair.gpus, settings=NO_REFERENCE)


def with_published_update(costs: Costs, lengths: Lengths, pair: Published) -> Costs:
    """Return costs with which the trainer of the asynchronous run takes its published time."""
    stage = run(costs, lengths, pair.train_gpus, settings=NO_REFERENCE).stages_s["update_actor"]
    fixed = 16 * costs.update_overhead_s
    return replace(costs, train_efficiency=costs.train_efficiency * (stage - fixed) / (pair.async_update - fixed))


def published() -> None:
    print(
        f"{'pair':<24}{'median':>7}{'ms':>6}{'log-prob':>15}{'':>2}{'schedule':<18}"
        f"{'published':>10}{'from sync':>11}{'error':>7}{'+ update':>10}{'error':>7}"
    )
    for pair in PAIRS:
        costs, lengths, sync = fit(pair)
        other_s = pair.step - pair.gen - pair.old_log_prob - pair.update  # of the driver, in both runs
        trained = with_published_update(costs, lengths, pair)
        log_prob = f"{sync.stages_s['old_log_prob']:.0f} of {pair.old_log_prob:.0f}"
        head = f"{pair.name:<24}{lengths.median:>7.0f}{costs.step_overhead_s * 1e3:>6.1f}{log_prob:>15}{'':>2}"
        for name, schedule in {"lag 1": {"trainer.lag": 1}, "lag 2, partial": PARTIAL}.items():
            settings = NO_REFERENCE | schedule | ({} if pair.async_log_prob else BYPASS)
            found = [
                run(c, lengths, pair.train_gpus, pair.rollout_gpus, steps=5, settings=settings).step_s + other_s
                for c in (costs, trained)
            ]
            errors = [f"{seconds / pair.async_step - 1:+.0%}" for seconds in found]
            print(
                f"{head}{name:<18}{pair.async_step:>10.0f}{found[0]:>11.0f}{errors[0]:>7}{found[1]:>10.0f}{errors[1]:>7}",
                flush=True,
            )
            head = " " * len(head)
            if pair.async_log_prob:
                break


TAIL = {"algorithm.filter_groups.order": "tail_batching"}
TAIL_RUNS = (("qwen2.5-7b", 16, 8_192), ("qwen2.5-14b", 32, 16_384), ("qwen2.5-32b", 64, 32_768))
PUBLISHED_FACTORS = (2.03, 2.56)  # of RollPacker's whole system over a synchronous run (arXiv 2509.21009, abstract)


def tail() -> None:
    """Print the gain of tail batching: 256 prompts of 8 responses, one optimizer step, H800, 20 steps."""
    low, high = PUBLISHED_FACTORS
    print(f"{'model, devices, longest':<32}{'started':>8}{'step':>16}{'factor':>8}{'of gen':>8}{'error':>16}")
    for model, gpus, cap in TAIL_RUNS:
        base = Simulation(
            Costs(DEVICES["h800"], MODELS[model]), gpus, prompts=256, n=8, steps=20, warmup=0, settings=NO_REFERENCE
        )
        base = replace(base, lengths=Lengths(cap=cap))
        whole = simulate(base)
        for started in (320, 384):
            rounds = simulate(replace(base, settings=NO_REFERENCE | TAIL | {"data.gen_batch_size": started}))
            factor, of_gen = whole.step_s / rounds.step_s, whole.stages_s["gen"] / rounds.stages_s["gen"]
            print(
                f"{f'{model}, {gpus}, {cap}':<32}{started:>8}{f'{whole.step_s:.0f} -> {rounds.step_s:.0f} s':>16}"
                f"{factor:>8.2f}{of_gen:>8.2f}{f'{factor / low - 1:+.0%} to {factor / high - 1:+.0%}':>16}",
                flush=True,
            )


PARTIAL = {"trainer.lag": 2, "trainer.partial_rollout": True}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "lag 1": {"trainer.lag": 1},
    "lag 2, partial": PARTIAL,
    "over-sampled": {"algorithm.filter_groups.order": "shortest"},
    "tail batching": TAIL,
}
GPUS = (8, 32, 128, 512, 1024, 4096)
SHARES = (0.5, 0.75)  # of the devices that only generate
MANY = 512  # devices, from which on half of them generate, and fewer steps are run


def scale(figure: str | None, gpus: tuple[int, ...]) -> None:
    """Print tokens per second and device of each schedule: 2 prompts of 8 responses per device, at least 64."""
    costs = Costs(DEVICES["h100"], MODELS["qwen2.5-7b"])
    print("tokens per second and device (share of the devices that generate)")
    print(f"{'devices':>8}" + "".join(f"{name:>20}" for name in SCHEDULES))
    rates: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for devices in gpus:
        cells = []
        for name, settings in SCHEDULES.items():
            best, share = max(_rates(costs, devices, settings))
            rates[name].append(best)
            cells.append(f"{best:.0f} ({share:.0%})" if share else f"{best:.0f}")
        print(f"{devices:>8}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if figure:
        draw(gpus, rates, figure)


def _rates(costs: Costs, devices: int, settings: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return tokens per second and device, and the share of devices that generate, of each split of the devices."""
    prompts = max(64, 2 * devices)
    base = Simulation(costs, devices, prompts=prompts, n=8, mini_batch=prompts // 4, settings=NO_REFERENCE | settings)
    if "trainer.lag" not in settings:
        drawn = {"data.gen_batch_size": prompts * 5 // 4} if "algorithm.filter_groups.order" in settings else {}
        # Tail batching has a long round after four short ones.
        steps = (5 if devices >= MANY else 10) if settings == TAIL else (2 if devices >= MANY else 7)
        alone = replace(base, steps=steps, warmup=0, settings=base.settings | drawn)
        return [(simulate(alone).tokens_per_s / devices, 0.0)]
    found = []
    many = devices >= MANY
    for share in SHARES[:1] if many else SHARES:
        rollout = int(devices * share)
        steps, warmup = (5, 2) if many else (10, 3)
        split = replace(base, gpus=devices - rollout, rollout_gpus=rollout, steps=steps, warmup=warmup)
        found.append((simulate(split).tokens_per_s / devices, share))
    return found


def draw(gpus: tuple[int, ...], rates: Mapping[str, list[float]], path: str) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 4))
    for name, values in rates.items():
        axes.plot(gpus, values, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(devices) for devices in gpus])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices (2 prompts of 8 responses for each, at least 64 prompts)")
    axes.set_ylabel("tokens per second and device")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    chart.tight_layout()
    chart.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[[], "published", "tail", "scale"], metavar="PART", help="default: all"
    )
    parser.add_argument("--figure", metavar="FILE", help="draw the last table")
    parser.add_argument("--min-gpus", type=int, default=8, help="of the last table (default: %(default)d)")
    parser.add_argument("--max-gpus", type=int, default=512, help="of the last table (default: %(default)d)")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    parts = arguments.parts or ["published", "tail", "scale"]
    if "published" in parts:
        published()
    if "tail" in parts:
        tail()
    if "scale" in parts:
        scale(arguments.figure, tuple(n for n in GPUS if arguments.min_gpus <= n <= arguments.max_gpus))


if __name__ == "__main__":
    main()
