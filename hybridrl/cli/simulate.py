"""`hybridrl simulate`: the steps of a schedule on a virtual clock, see docs/simulation.md. Starts nothing."""

import argparse
import json
import logging
import sys
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.simulation import Simulation, SimulationResult
from hybridrl.simulation.costs import DEVICES, MODELS, Costs
from hybridrl.simulation.lengths import Lengths
from hybridrl.simulation.run import simulate as simulate_run

MIN_SHOWN_S = 0.05  # of a stage


def simulate(arguments: argparse.Namespace) -> None:
    """Print the mean step of the schedule that `arguments` and their settings describe."""
    settings: dict[str, str] = {}
    for setting in arguments.settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting}: give settings as key=value, such as trainer.lag=1")
        settings[name] = value
    run = Simulation(
        costs=Costs(
            _known(DEVICES, arguments.device, "--device"),
            _known(MODELS, arguments.model, "--model"),
            decode_table=_read_table(arguments.decode_table),
        ),
        gpus=arguments.gpus,
        rollout_gpus=arguments.rollout_gpus,
        prompts=arguments.prompts,
        n=arguments.n,
        mini_batch=arguments.mini_batch,
        steps=arguments.steps,
        warmup=min(3, arguments.steps - 1),
        lengths=Lengths(arguments.median, arguments.sigma, arguments.cap),
        settings={name: _value(text) for name, text in settings.items()},
    )
    logging.getLogger("hybridrl").setLevel(logging.ERROR)
    sys.stdout.write(describe(run, simulate_run(run)))


def describe(run: Simulation, result: SimulationResult) -> str:
    """Return the result as lines for the console."""
    lengths = run.lengths.statistics(run.prompts * run.n)
    waits = {name: seconds for name, seconds in result.stages_s.items() if seconds >= MIN_SHOWN_S}
    pools = f"{run.gpus} devices train, {run.rollout_gpus} generate" if run.rollout_gpus else f"{run.gpus} devices"
    busy = f"busy: trainer {result.trainer_busy:.0%}, rollout {result.rollout_busy:.0%}"
    return "\n".join(
        [
            f"{pools}; {run.prompts} prompts of {run.n} responses, "
            + ", ".join(f"{name} {value:.0f}" for name, value in lengths.items())
            + " tokens",
            f"step {result.step_s:.1f} s, {result.tokens_per_s:,.0f} tokens/s, mean age {result.age_mean:.2f} versions",
            "the driver waits in " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in waits.items()),
            busy if run.rollout_gpus else f"busy: {result.trainer_busy:.0%}",
            "",
        ]
    )


def _known(table: dict, name: str, argument: str):
    if name not in table:
        raise ConfigError(f"{argument} {name}: unknown; known are {', '.join(table)}")
    return table[name]


def _read_table(path: Path | None) -> tuple[tuple[float, float], ...]:
    """Return pairs of sequences and seconds of a JSON file, ascending.

    Raises:
        ConfigError: The file cannot be read, or is something else.
    """
    if path is None:
        return ()
    try:
        pairs = [(float(size), float(seconds)) for size, seconds in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--decode-table {path}: {error}; give JSON pairs of sequences and seconds: [[1, 0.009], [64, 0.012]]"
        ) from error
    if not pairs:
        raise ConfigError(f"--decode-table {path}: has no pair; give at least [[1, 0.009]]")
    return tuple(sorted(pairs))


def _value(text: str) -> object:
    """Return the value that a command line gives a setting: JSON where it is some, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
