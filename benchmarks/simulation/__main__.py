"""`python -m benchmarks.simulation`: the steps of a schedule on a virtual clock. See docs/simulation.md."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation import DEVICES, MODELS, Costs, Lengths, Model, Simulation, SimulationResult, simulate
from hybridrl.cli.plan import read_shape
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.errors import ConfigError

MIN_SHOWN_S = 0.05  # of a stage
NUMBERS = {  # option: default, meaning
    "gpus": (None, "devices that train, and generate if there are no others"),
    "rollout-gpus": (0, "devices that only generate"),
    "prompts": (512, "prompts of a step"),
    "n": (16, "responses per prompt"),
    "mini-batch": (0, "prompts of an optimizer step; 0: all of the step"),
    "steps": (8, "steps, of which the first three do not count"),
    "median": (490.0, "median length of a response in tokens"),
    "sigma": (0.9, "standard deviation of its logarithm"),
    "cap": (16384, "longest response"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the mean step of the schedule that `argv` describes (the command line by default); return the exit code."""
    arguments, settings = command_parser().parse_known_args(argv)
    set_up_logging()
    return run_program(lambda: print_step(arguments, settings))


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; settings of `main_ppo` stand beside them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation",
        usage="%(prog)s [-h] --gpus N [--rollout-gpus N] [...] [key=value ...]",
        description="Runs the trainer's schedule on a virtual clock, with stand-ins for the workers; starts nothing.",
        epilog="key=value: settings of python -m hybridrl.main_ppo, such as trainer.lag=1; see docs/simulation.md",
    )
    for name, (default, text) in NUMBERS.items():
        kind = float if isinstance(default, float) else int
        shown = "" if default is None else " (default: %(default)g)"
        parser.add_argument(f"--{name}", type=kind, default=default, required=default is None, help=text + shown)
    parser.add_argument("--device", choices=DEVICES, default="h100", help="default: %(default)s")
    parser.add_argument(
        "--model",
        default="qwen2.5-7b",
        help=f"{', '.join(MODELS)}, or a directory or hub name with a config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--decode-table",
        type=Path,
        metavar="FILE",
        help="JSON pairs of sequences and measured seconds of one decoding step, instead of the roofline",
    )
    return parser


def print_step(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Print the mean step of the schedule that `arguments` and the settings `words` describe."""
    settings: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: give settings as key=value, such as trainer.lag=1")
        settings[name] = _value(value)
    run = Simulation(
        costs=Costs(
            DEVICES[arguments.device],
            _model(arguments.model),
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
        settings=settings,
    )
    logging.getLogger("hybridrl").setLevel(logging.ERROR)
    sys.stdout.write(describe(run, simulate(run)))


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


def _model(name: str) -> Model:
    """Return a known model, or one by its config.json."""
    if name in MODELS:
        return MODELS[name]
    shape = read_shape(name)
    return Model(shape.params, shape.layers, shape.hidden, shape.kv_width, inactive_params=shape.inactive_params)


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


if __name__ == "__main__":
    sys.exit(main())
