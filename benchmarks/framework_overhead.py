"""Cost of the loop: microseconds per stage of `Task`, against calling the same functions in a plain `for`.

    python benchmarks/framework_overhead.py

Stages in threads do nothing here, so their figure is the cost of a thread. It pays where a stage takes milliseconds.
"""

import argparse
import time
from collections.abc import Callable

from hybridrl.framework import OnlineRLContext, StepTimer, Task, stage


def plain(ctx: OnlineRLContext) -> None:
    pass


def onion(ctx: OnlineRLContext):
    yield


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Return the shortest wall time of `repeats` runs: the one least disturbed by other load."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def call_directly(fn: Callable, stages: int, steps: int) -> Callable[[], None]:
    def run() -> None:
        ctx = OnlineRLContext()
        for _ in range(steps):
            waiting = [fn(ctx) for _ in range(stages)]
            for half in [half for half in waiting if half is not None]:
                next(half)
                next(half, None)

    return run


def call_in_task(fn: Callable, stages: int, steps: int, *, timer: bool) -> Callable[[], None]:
    def run() -> None:
        with Task(ctx=OnlineRLContext()) as task:
            if timer:
                task.use_wrapper(StepTimer(print_per_step=0))
            for _ in range(stages):
                task.use(fn)
            task.run(max_step=steps)

    return run


def call_concurrently(stages: int, steps: int, *, async_mode: bool) -> Callable[[], None]:
    """Run independent stages: all of a step start at once, in threads or with submitted work."""

    def submitted(ctx):
        yield

    def run() -> None:
        with Task(async_mode=async_mode, ctx=OnlineRLContext(batch={})) as task:
            for i in range(stages):
                fn = (lambda ctx: None) if async_mode else submitted
                task.use(stage(f"stage {i}", writes=[f"column {i}"], submits=not async_mode)(fn))
            task.run(max_step=steps, overlap=None if async_mode else {})

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    calls = args.stages * args.steps
    print(f"{args.stages} stages, {args.steps} steps, least of {args.repeats} runs; microseconds per stage")
    for fn in (plain, onion):
        bare = seconds(call_directly(fn, args.stages, args.steps), args.repeats) / calls * 1e6
        print(f"  {fn.__name__:6} called directly      {bare:6.2f}")
        for timer in (False, True):
            cost = seconds(call_in_task(fn, args.stages, args.steps, timer=timer), args.repeats) / calls * 1e6
            name = "Task with StepTimer" if timer else "Task"
            print(f"  {fn.__name__:6} in {name:20} {cost:6.2f}   overhead {cost - bare:6.2f}")
    for async_mode in (False, True):
        steps = args.steps // 10
        cost = (
            seconds(call_concurrently(args.stages, steps, async_mode=async_mode), args.repeats)
            / (args.stages * steps)
            * 1e6
        )
        name = "threads, async_mode" if async_mode else "Task with overlap"
        print(f"  plain  in {name:20} {cost:6.2f}")


if __name__ == "__main__":
    main()
