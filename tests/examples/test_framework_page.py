"""docs/framework.md: its blocks and commands run as they are, and the listed names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import framework
from hybridrl.framework import Context, OnlineRLContext, Parallel, StepTimer, Task, TaskEvents, ding_init

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "framework.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
PROGRAMS = ROOT / "examples" / "two_programs"
BENCHMARKS = {"overhead": "--steps 20 --repeats 1", "parallel": "--rounds 3 --repeats 1 --mebibytes 1 --nap-s 0.01"}


def run(line):
    """Run a line in a shell, with this interpreter as `python`, and return its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_blocks_and_commands():
    assert len(BLOCKS) == 4 and len(COMMANDS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_as_it_stands(ray_cluster, number):
    exec(compile(BLOCKS[number], f"block {number} of docs/framework.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_a_block_with_processes_runs_as_a_script_that_starts_ray_itself(tmp_path):
    [block] = [block for block in BLOCKS if "topology" in block]
    (tmp_path / "program.py").write_text(block)
    run(f"python {tmp_path / 'program.py'}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_recipe_of_two_programs_runs_in_any_order(ray_cluster, tmp_path):
    import ray

    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    running = {}
    for name in ("collector", "learner"):  # the collector waits
        with open(tmp_path / f"{name}.log", "w") as log:
            running[name] = subprocess.Popen(
                [sys.executable, PROGRAMS / f"{name}.py"], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )
    codes = {name: process.wait(timeout=200) for name, process in running.items()}
    output = {name: (tmp_path / f"{name}.log").read_text() for name in running}
    assert codes == {"collector": 0, "learner": 0}, output
    assert re.search(r"the learner trained on \d+ batches", output["learner"])
    assert "the collector received {'weight': " in output["collector"]


def test_labels_come_from_the_environment():
    [line] = [line for line in COMMANDS if "HYBRIDRL_TASK_LABELS" in line]
    assert run(line) == "['gpu', 'spot', 'standalone']\n"


@pytest.mark.parametrize("name", [pytest.param("parallel", marks=pytest.mark.slow), "overhead"])
def test_the_commands_of_the_figures_run(name):
    [line] = [line for line in COMMANDS if f"framework_{name}.py" in line]
    assert "ratio" in run(f"{line} {BENCHMARKS[name]}") or name == "overhead"


def test_all_names_in_the_table_exist():
    table = TEXT.partition("| in DI-engine | here |")[2].partition("\n\n")[0]
    here = " ".join(row for row in table.splitlines() if "not here" not in row)
    names = {name for code in re.findall(r"`([^`]*)`", here) for name in re.findall(r"[A-Za-z_]\w*", code)}
    owners = (framework, Task(), Context(), OnlineRLContext(), Parallel(), Parallel, framework.Role)
    arguments = {
        name
        for call in (Task.__init__, TaskEvents.emit, Task.use, Parallel.runner, StepTimer.__init__, ding_init)
        for name in call.__annotations__
    }
    not_identifiers = {
        "a",
        "dict",
        "exp_name",
        "False",
        "len",
        "main",
        "n",
        "sync_parallel_ctx",
        "True",
    }
    assert len(names) > 60
    assert {name for name in names if not any(hasattr(owner, name) for owner in owners)} - arguments == not_identifiers
