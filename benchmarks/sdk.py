"""Cost of the workload SDK: `python benchmarks/sdk.py`.

1. An empty method of the two processes of a role, called by the trainer of a submitted job in five ways: two actors of
   plain Ray, `@register` through a worker group, `@trainer_invocation` through `RG_<ROLE>`, `@rpc` through
   `RoleGroup.call`, and `RoleGroup.call_batch` with one element per process. The contenders run in turn; the table has
   median milliseconds per call and the ratio to plain Ray.
2. Lines of the examples: all code, and the glue, which is what the job and its calls need beside the algorithm. Code is
   what is left without blank lines, comments, docstrings and imports. Glue is all of main.py and remote_call.py, and
   every line with a mark.
"""

import argparse
import ast
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import ray

from hybridrl.sdk import BaseTrainer, BaseWorkload, DLJobBuilder, RoleGroup, rpc, trainer_invocation
from hybridrl.single_controller.dispatch import Dispatch, register

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKERS, WARM_UP = 2, 20
EXAMPLES = ("openrlhf_ppo", "workload_sdk", "control_task")
GLUE_FILES = ("main.py", "remote_call.py")
MARKS = ("rpc", "register", "trainer_invocation")


class Workload(BaseWorkload):
    @register(Dispatch.ONE_TO_ALL)
    def registered(self) -> None: ...

    @trainer_invocation()
    def invoked(self) -> None: ...

    @rpc()
    def called(self) -> None: ...

    @rpc()
    def batched(self, rows: list[int]) -> list[int]:
        return rows


class RawActor:
    def empty(self) -> None: ...


class CallTrainer(BaseTrainer):
    """Writes the milliseconds of every call into `config.out`."""

    def init(self) -> None:
        raw = ray.remote(num_cpus=0)(RawActor)
        self.raw = [raw.remote() for _ in range(NUM_WORKERS)]

    def fit(self) -> None:
        group, peers = self.job.groups["worker"], RoleGroup("worker")
        contenders: dict[str, Callable[[], object]] = {
            "plain Ray": lambda: ray.get([actor.empty.remote() for actor in self.raw]),
            "@register": group.registered,
            "RG_WORKER": self.RG_WORKER.invoked,
            "@rpc, call": lambda: peers.call("called").result(),
            "@rpc, call_batch": lambda: list(peers.call_batch("batched", NUM_WORKERS, [0] * NUM_WORKERS)),
        }
        rounds = [
            {name: milliseconds(call) for name, call in contenders.items()}
            for _ in range(WARM_UP + self.config.repeats)
        ]
        Path(self.config.out).write_text(json.dumps(rounds[WARM_UP:]))


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def measure_calls(repeats: int) -> Mapping[str, float]:
    """Return the median milliseconds per call of each contender."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "calls.json")
        builder = DLJobBuilder().device_type("CPU").config({"out": str(out), "repeats": repeats})
        builder.trainer(f"{Path(__file__).resolve()}:CallTrainer").resource(cpu=0.5)
        worker = builder.role("worker").run(f"{Path(__file__).resolve()}:Workload")
        worker.resource(cpu=0.5).nnodes(1).nproc_per_node(NUM_WORKERS)
        builder.build().submit("sdk-benchmark", journal=folder)
        rounds = json.loads(out.read_text())
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines with code, without docstrings and imports."""
    tree, skipped = ast.parse(source), set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - skipped


def mark_lines(source: str) -> set[int]:
    """Return the numbers of the lines of decorators that mark a method for calls."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for mark in getattr(node, "decorator_list", []):
            name: Any = mark.func if isinstance(mark, ast.Call) else mark
            if isinstance(name, ast.Name) and name.id in MARKS:
                found |= set(range(mark.lineno, mark.end_lineno + 1))
    return found


def count_glue(example: str) -> tuple[int, int]:
    """Return the lines of code of an example, and how many of them are glue."""
    total = glue = 0
    for file in sorted((ROOT / "examples" / example).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        code = code_lines(source)
        total += len(code)
        glue += len(code if file.name in GLUE_FILES else code & mark_lines(source))
    return total, glue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    calls = measure_calls(options.repeats)
    print(f"{f'call of an empty method, {NUM_WORKERS} workers':<34}{'ms':>8}{'ratio':>8}")
    for name, duration in calls.items():
        print(f"  {name:<32}{duration:>8.2f}{duration / calls['plain Ray']:>8.2f}")
    print(f"{'lines of an example':<34}{'code':>8}{'glue':>8}")
    for example in EXAMPLES:
        total, glue = count_glue(example)
        print(f"  {example:<32}{total:>8}{glue:>8}")


if __name__ == "__main__":
    main()
