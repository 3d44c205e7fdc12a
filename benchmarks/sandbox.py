"""Throughput of the sandbox: programs per second, and CPU seconds per program, with it and without it.

    python benchmarks/sandbox.py [--programs 60] [--rounds 5] [--bwrap PATH]

The program reads two numbers and prints their sum. Without a sandbox it is a child process of the same interpreter
with the same options, and with pipes. The ways alternate; the figures are medians over the rounds, with the smallest
and the largest. Programs run one after the other, and then on as many threads as there are cores.
"""

import argparse
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hybridrl.rewards.sandbox import LocalSandbox, Program, SandboxUnavailable
from hybridrl.rewards.sandbox.local import python_file

CODE = "print(sum(map(int, input().split())))"
STDIN, STDOUT = "20 22\n", "42\n"


def without() -> str:
    command = [python_file(), "-S", "-s", "-c", CODE]
    return subprocess.run(command, input=STDIN, capture_output=True, text=True, timeout=60, env={}).stdout


def behind(sandbox: LocalSandbox) -> str:
    return sandbox.run(Program(CODE, stdin=STDIN)).stdout


def measure(run: Callable[[], str], *, programs: int, threads: int) -> tuple[float, float]:
    """Return programs per second, and CPU milliseconds per program of this process and its children."""
    before, start = cpu_s(), time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        outputs = list(pool.map(lambda _: run(), range(programs)))
    assert outputs == [STDOUT] * programs, "a program printed something else"
    return programs / (time.monotonic() - start), (cpu_s() - before) / programs * 1e3


def cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def describe(values: list[float]) -> str:
    return f"{statistics.median(values):6.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=60, help="per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bwrap", help="path of bubblewrap; default: the one on the search path")
    args = parser.parse_args()
    ways: dict[str, Callable[[], str]] = {"no sandbox": without}
    for isolation in ("namespaces", "bwrap"):
        sandbox = LocalSandbox(isolation, bwrap=args.bwrap)
        try:
            sandbox.check()
            ways[isolation] = partial(behind, sandbox)
        except (SandboxUnavailable, OSError) as error:
            print(f"{isolation}: left out: {str(error)[:100]}")
    for threads in (1, os.cpu_count() or 1):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, run in ways.items():
                found[name].append(measure(run, programs=args.programs, threads=threads))
        print(f"\n{threads} at a time; load {os.getloadavg()[0]:.1f}\n")
        print("| way | programs per second | CPU ms per program |\n|---|---|---|")
        for name, results in found.items():
            rates, costs = zip(*results, strict=True)
            print(f"| {name} | {describe(list(rates))} | {describe(list(costs))} |")


if __name__ == "__main__":
    main()
