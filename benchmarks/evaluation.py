"""What evaluation in a separate process costs training: `python benchmarks/evaluation.py` after `make train`.

1. Stages that sleep: 100 ms of training per step and 300 ms of evaluation every step, as on DI-engine's page. Without
   evaluation, in the loop, and in another process (`Parallel`, `filter_labels`).
2. The quick start's GRPO from its SFT model, with 100 held-out problems after every step: without evaluation, in the
   loop, and by an evaluator (`trainer.eval_n_gpus=1`).

The table has the median seconds per step, and the ratio to training without evaluation. The stages of 2 need a core
each: trainer, evaluator.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _quickstart import run_grpo, sft_model

from hybridrl.framework import Context, Parallel, Task

SKIPPED_STEPS = 3  # the first steps include allocations and imports
TRAIN_S, EVALUATE_S = 0.1, 0.3
REAL = {
    "none": {"trainer.test_freq": -1},
    "in the loop": {"trainer.test_freq": 1},
    "in another process": {"trainer.test_freq": 1, "trainer.eval_n_gpus": 1},
}


def sleeping(steps: int, evaluated: bool) -> list[float] | None:
    """The `main` of every process; returns the step times of the one that trains."""
    seconds: list[float] = []

    def train(ctx: Context) -> None:
        start = time.perf_counter()
        time.sleep(TRAIN_S)
        ctx.state_dict = {"step": ctx.total_step}
        yield
        seconds.append(time.perf_counter() - start)

    def evaluate(ctx: Context) -> None:
        time.sleep(EVALUATE_S)

    with Task() as task:
        task.use(train, filter_labels=["standalone", "node.0"])
        if evaluated:
            task.use(evaluate, filter_labels=["standalone", "node.1"])
        task.run(max_step=steps)
    return seconds or None


def sleeping_stages(steps: int) -> dict[str, float]:
    elsewhere = Parallel.runner(n_parallel_workers=2, topology="star")(sleeping, steps, True)
    found = {"none": sleeping(steps, False), "in the loop": sleeping(steps, True), "in another process": elsewhere[0]}
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def real_stages(quickstart: Path, steps: int) -> dict[str, float]:
    found = {}
    for name, changes in REAL.items():
        with tempfile.TemporaryDirectory() as folder:
            history = run_grpo(quickstart, Path(folder), steps=steps, changes={"data.val_max_samples": 100, **changes})
        found[name] = statistics.median(entry["timing_s/step"] for entry in history[SKIPPED_STEPS:-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=Path("outputs/quickstart"), help="what `make train` wrote")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    logging.getLogger("hybridrl").setLevel(logging.WARNING)
    if not sft_model(options.quickstart).is_dir():
        sys.exit(f"no SFT model under {options.quickstart}: run `make train` first, or give --quickstart DIR")
    print(f"{'s/step':<14}" + "".join(f"{name:>22}" for name in REAL))
    for kind, seconds in (
        ("sleeping", sleeping_stages(options.steps)),
        ("GRPO", real_stages(options.quickstart, options.steps)),
    ):
        cells = [f"{value:.3f} ({value / seconds['none']:.2f})" for value in seconds.values()]
        print(f"{kind:<14}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
