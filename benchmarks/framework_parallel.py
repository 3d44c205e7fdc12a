"""Communication cost between processes of `Parallel.runner`, and the time that overlapping stages save.

    python benchmarks/framework_parallel.py

1. Round trips: an event to another process and its answer (`task.emit`, `task.wait_for`), and the same with listeners
   on both sides (`router.on`), against a call of a bare Ray actor from the same process, in turns.
2. Weights: from one process to three others as a task's event, until all have deserialized it. Against one `ray.put`
   and three calls of bare actors that fetch and copy the weights, so that they may be modified.
3. Stages: three independent stages that sleep, in sequence, overlapped, in async mode; and one sleep.

Round trips are in milliseconds: median and 95th percentile. Weights and stages: median of the repeats. One torch
thread.
"""

import argparse
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray
import torch
from _contest import clock, median_ms

from hybridrl.framework import Context, OnlineRLContext, Parallel, Task, stage

TENSORS = 32
WARM_UP = 20  # rounds that do not count
TIMEOUT_S = 60.0


@ray.remote(num_cpus=0)
class Bare:
    """The actor that a user would write without a framework."""

    def echo(self, value: int) -> int:
        return value

    def take(self, weights: dict[str, np.ndarray]) -> int:
        own = {name: array.copy() for name, array in weights.items()}
        return sum(array.nbytes for array in own.values())


def warm_actors(count: int) -> list:
    actors = [Bare.remote() for _ in range(count)]
    ray.get([actor.echo.remote(0) for actor in actors], timeout=TIMEOUT_S)
    return actors


# -- 1. round trips


def round_trips(rounds: int) -> dict[str, list[float]] | None:
    """`main` of two processes: the first sends in every step, the second answers.

    Returns:
        The first process's milliseconds per kind; None in the second.
    """
    with Task(auto_sync_ctx=False) as task:
        if task.router.node_id == 1:
            task.router.on("question", lambda value: task.router.emit("answer", value))
            task.use(answer_with(task, "ping", "pong", lambda value: value)).run()
            return None
        [actor], answers = warm_actors(1), queue.SimpleQueue()
        task.router.on("answer", answers.put)
        contenders = {
            "task": lambda i: task_round_trip(task, i),
            "router": lambda i: router_round_trip(task, answers, i),
            "bare": lambda i: ray.get(actor.echo.remote(i), timeout=TIMEOUT_S),
        }
        times: dict[str, list[float]] = {kind: [] for kind in contenders}

        def measure(ctx: Context) -> None:
            for kind, contender in contenders.items():
                start = time.perf_counter()
                answer = contender(ctx.total_step)
                times[kind].append((time.perf_counter() - start) * 1e3)
                assert answer == ctx.total_step

        task.use(measure).run(max_step=WARM_UP + rounds)
        return {kind: values[WARM_UP:] for kind, values in times.items()}


def answer_with(task: Task, event: str, answer: str, make: Callable) -> Callable[[Context], None]:
    """Return a stage that answers an event with another one, until the other process has finished."""

    def answering(ctx: Context) -> None:
        received = task.wait_for(event, timeout=TIMEOUT_S)
        if received is not None:
            task.emit(answer, make(*received[0]), only_remote=True)

    return answering


def task_round_trip(task: Task, value: int) -> int:
    task.emit("ping", value, only_remote=True)
    (answer,), _ = task.wait_for("pong", timeout=TIMEOUT_S, ignore_timeout_exception=False)
    return answer


def router_round_trip(task: Task, answers: queue.SimpleQueue, value: int) -> int:
    task.router.emit("question", value)
    return answers.get(timeout=TIMEOUT_S)


def show_round_trips(rounds: int) -> None:
    times, _ = Parallel.runner(2)(round_trips, rounds)
    bare = np.median(times["bare"])
    print(f"{f'round trip, {rounds} rounds, ms':<44}{'median':>10}{'95 %':>10}{'ratio':>8}")
    names = {"task": "task.emit, task.wait_for", "router": "router.emit, router.on", "bare": "call of a bare Ray actor"}
    for kind, name in names.items():
        print(
            "  "
            f"{name:<42}{np.median(times[kind]):>10.2f}{np.percentile(times[kind], 95):>10.2f}"
            f"{np.median(times[kind]) / bare:>8.2f}"
        )


# -- 2. weights


def make_weights(num_bytes: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.randn(num_bytes // 4 // TENSORS // 1024, 1024) for i in range(TENSORS)}


def send_weights(num_bytes: int, repeats: int) -> list[float] | None:
    """`main` of four processes: the first sends, the others confirm.

    Returns:
        Medians in ms: as an event, by hand.
    """
    with Task(auto_sync_ctx=False) as task:
        if task.router.node_id:
            task.use(
                answer_with(task, "weights", "have", lambda weights: sum(tensor.nbytes for tensor in weights.values()))
            ).run()
            return None
        weights, actors, medians = make_weights(num_bytes), warm_actors(3), []
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}

        def as_event() -> None:
            task.emit("weights", weights, only_remote=True)
            have = [task.wait_for("have", timeout=TIMEOUT_S, ignore_timeout_exception=False) for _ in range(3)]
            assert [args for args, _ in have] == [(num_bytes,)] * 3

        def by_hand() -> None:
            stored = ray.put(arrays)
            assert ray.get([actor.take.remote(stored) for actor in actors], timeout=TIMEOUT_S) == [num_bytes] * 3

        task.use(lambda ctx: medians.extend(median_ms([clock(as_event), clock(by_hand)], repeats=repeats))).run(
            max_step=1
        )
        return medians


def show_weights(num_bytes: int, repeats: int) -> None:
    times = Parallel.runner(4, topology="star")(send_weights, num_bytes, repeats)[0]
    print(f"{f'{num_bytes / 1024**2:.0f} MiB of weights, 1 to 3 processes':<44}{'seconds':>10}{'':>10}{'ratio':>8}")
    for name, milliseconds in zip(
        ("task.emit of a state dict", "ray.put, three calls of bare actors"), times, strict=True
    ):
        print(f"  {name:<42}{milliseconds / 1e3:>10.3f}{'':>10}{milliseconds / times[1]:>8.2f}")


# -- 3. stages


def nap(name: str, seconds: float) -> Callable:
    return stage(name, writes=[name])(lambda ctx: time.sleep(seconds))


def submitted_nap(name: str, seconds: float, pool: ThreadPoolExecutor) -> Callable:
    def work(ctx):
        future = pool.submit(time.sleep, seconds)
        yield
        future.result()

    return stage(name, writes=[name], submits=True)(work)


def step(seconds: float, *, async_mode: bool = False, overlap: dict | None = None) -> Callable[[], float]:
    """Return a function that runs one step of three stages and returns its milliseconds."""

    def run() -> float:
        with Task(async_mode=async_mode, ctx=OnlineRLContext()) as task, ThreadPoolExecutor(3) as pool:
            for name in ("first", "second", "third"):
                task.use(nap(name, seconds) if overlap is None else submitted_nap(name, seconds, pool))
            return clock(lambda: task.run(max_step=1, overlap=overlap))()

    return run


def show_stages(seconds: float, repeats: int) -> None:
    contenders = {
        "one after the other": step(seconds),
        "task.run(overlap={})": step(seconds, overlap={}),
        "Task(async_mode=True)": step(seconds, async_mode=True),
        "one sleep": clock(lambda: time.sleep(seconds)),
    }
    times = median_ms(list(contenders.values()), repeats=repeats)
    print(f"{f'three stages of {seconds * 1e3:.0f} ms':<44}{'ms':>10}{'':>10}{'ratio':>8}")
    for name, milliseconds in zip(contenders, times, strict=True):
        print(f"  {name:<42}{milliseconds:>10.1f}{'':>10}{milliseconds / times[-1]:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--mebibytes", type=int, default=256, help="of weights")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--nap-s", type=float, default=0.1, help="seconds that a stage sleeps")
    options = parser.parse_args()
    num_bytes = options.mebibytes * 1024**2
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=6 * num_bytes + 500_000_000,
    )
    show_round_trips(options.rounds)
    show_weights(num_bytes, options.repeats)
    show_stages(options.nap_s, options.repeats)


if __name__ == "__main__":
    main()
