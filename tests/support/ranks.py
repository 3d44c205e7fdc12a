"""Processes of one program with several ranks, forked from a process that has imported the libraries once.

A new interpreter with torch and transformers takes seconds of CPU for each rank; a fork takes milliseconds. The process
that is forked starts with the first use, one for each process of the tests.
"""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

PRELOADED = (
    "transformers.models.qwen2.modeling_qwen2",
    "hybridrl.workers.actor_rollout_ref",
    "hybridrl.workers.engine.fsdp.engine",
    "hybridrl.workers.engine.megatron.engine",
    "tests.support.workers.engine_cases",
)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*PRELOADED])


def fork_ranks(target: Callable[..., None], num_ranks: int, *arguments: Any, timeout_s: float) -> list[int | None]:
    """Call `target(rank, *arguments)` in a process per rank; return their exit codes, None for one that was killed."""
    running = [FORKS.Process(target=target, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)]
    for process in running:
        process.start()
    end = monotonic() + timeout_s
    for process in running:
        process.join(max(0.0, end - monotonic()))
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    return codes


def run_ranks(module: str, num_ranks: int, *words: object, log: Path, timeout_s: float) -> None:
    """Run `python -m module RANK NUM_RANKS words...` once per rank.

    Raises AssertionError with the processes' output if one fails.
    """
    log.write_text("")
    codes = fork_ranks(_run_module, num_ranks, module, [num_ranks, *words], log, timeout_s=timeout_s)
    assert codes == [0] * num_ranks, log.read_text()[-4000:]


def _run_module(rank: int, module: str, words: list[object], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    warnings.simplefilter("ignore")
    sys.argv = [module, str(rank), *map(str, words)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
