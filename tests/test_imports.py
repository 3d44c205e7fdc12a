"""Imports are cheap and layered: heavy packages are loaded only where they are needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.end_to_end.runs import settings

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "torch._dynamo", "tensordict", "ray", "transformers", "vllm", "megatron", "datasets", "matplotlib")


LIGHT = (
    "import hybridrl",
    "import hybridrl.framework",
    "import hybridrl.master.jobs.builder",
    "import hybridrl.sdk",
    "from hybridrl.sdk import RLJobBuilder, FutureSequence",
    "from hybridrl.sdk import BaseTrainer, BaseWorkload, RoleGroup, current_worker, rpc, trainer_invocation",
    "import reward_score",
    "import hybridrl.config",
    "import hybridrl.single_controller.processes.worker_host",
    "import hybridrl.master.service.job_master",
    "from hybridrl.single_controller import Dispatch, RayWorkerGroup, Worker, register",
    "import hybridrl.main_ppo",
    "import hybridrl.main_sft",
    "import hybridrl.main_distill",
    "import hybridrl.main_dpo",
    "import hybridrl.main_rm",
    "import hybridrl.main_job",
    "import hybridrl.main_generation",
    "import hybridrl.main_eval",
    "import hybridrl.cli",
    "import hybridrl.workers.engine.memory_plan.choice",
    "import hybridrl.cli.runs",
    "import hybridrl.doctor.run",
    "from hybridrl.serving.environments import TextEnvironment, register_environment",
)
TORCH = ("from hybridrl import DataProto",)


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The heavy packages that are loaded after each statement and those before it, in one process."""
    code = (
        "import json, sys\nfound = {}\nfor statement in sys.argv[1:]:\n    exec(statement)\n"
        f"    found[statement] = [m for m in {HEAVY!r} if m in sys.modules]\nprint(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, *LIGHT, *TORCH]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    return {statement: set(packages) for statement, packages in json.loads(out.stdout).items()}


@pytest.mark.parametrize("statement", LIGHT + TORCH)
def test_an_import_loads_only_the_heavy_packages_it_needs(loaded, statement):
    assert loaded[statement] <= ({"torch", "tensordict"} if statement in TORCH else set())


COMMANDS = {
    "hybridrl --version": "from hybridrl.cli import main; main(['--version'])",
    "hybridrl --help": "from hybridrl.cli import main; main(['--help'])",
    "hybridrl job graph --help": "from hybridrl.cli import main; main(['job', 'graph', '--help'])",
    "hybridrl export --help": "from hybridrl.cli import main; main(['export', '--help'])",
    "hybridrl serve --help": "from hybridrl.cli import main; main(['serve', '--help'])",
    "hybridrl serve-training --help": "from hybridrl.cli import main; main(['serve-training', '--help'])",
    "hybridrl view --help": "from hybridrl.cli import main; main(['view', '--help'])",
    "hybridrl train --help": "from hybridrl.cli import main; main(['train', '--help'])",
    "hybridrl init --help": "from hybridrl.cli import main; main(['init', '--help'])",
    "hybridrl chat --help": "from hybridrl.cli import main; main(['chat', '--help'])",
    "hybridrl data inspect --help": "from hybridrl.cli import main; main(['data', 'inspect', '--help'])",
    "hybridrl eval --help": "from hybridrl.cli import main; main(['eval', '--help'])",
    "main_job --help": "from hybridrl.main_job import main; main(['--help'])",
    "main_ppo --help": "from hybridrl.main_ppo import main; main(['--help'])",
    "main_ppo --cfg job": "from hybridrl.main_ppo import main; main(['--cfg', 'job'])",
    "main_sft --help": "from hybridrl.main_sft import main; main(['--help'])",
    "main_dpo --help": "from hybridrl.main_dpo import main; main(['--help'])",
    "main_rm --help": "from hybridrl.main_rm import main; main(['--help'])",
    "main_generation --help": "from hybridrl.main_generation import main; main(['--help'])",
    "main_eval --help": "from hybridrl.main_eval import main; main(['--help'])",
    "main_distill --help": "from hybridrl.main_distill import main; main(['--help'])",
    "hybridrl job states": "from hybridrl.cli import main; main(['job', 'states'])",
}
FIRST_OTHERS = ("numpy", "pandas", "pyarrow", "cloudpickle", "pydantic", "asyncio")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_only_prints_loads_no_heavy_package(command):
    code = (
        f"import sys\ntry:\n    {COMMANDS[command]}\nexcept SystemExit:\n    pass\n"
        f"found = [name for name in {(*HEAVY, *FIRST_OTHERS)!r} if name in sys.modules]\n"
        "num_own = sum(name.startswith('hybridrl') for name in sys.modules)\n"
        "print(); print(*found, num_own)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    *found, num_own = out.stdout.splitlines()[-1].split()
    assert not {*found} & {*HEAVY} and len(out.stdout) > 10
    if command.endswith(("--version", "--help")):
        assert found == []
    if command.endswith(("--version", "--help")) and not command.startswith("main_"):
        assert int(num_own) < 20, "the modules of the command itself are loaded when it runs"


def test_a_run_in_one_process_needs_neither_ray_nor_the_master(tmp_path, tiny_qwen2):
    unused = ("ray", "hybridrl.master.service", "hybridrl.master.health", "hybridrl.master.state")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({unused}))  # an import of one of them fails\n"
        "from hybridrl.main_ppo import main; sys.exit(main(sys.argv[1:]))"
    )
    words = settings(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    subprocess.run([sys.executable, "-c", code, *words], timeout=100, check=True, cwd=ROOT)


WORKER = "hybridrl.single_controller.processes.worker_host, torch"


@pytest.mark.parametrize(
    ("module", "chosen", "policy", "spins"),
    [
        ("hybridrl.main_ppo, torch", {}, "PASSIVE", 10_000),
        (WORKER, {}, "PASSIVE", 10_000),
        (WORKER, {"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE", 0),
        pytest.param(WORKER, {"GOMP_SPINCOUNT": "7"}, "PASSIVE", 7, marks=pytest.mark.slow),
        pytest.param(
            "hybridrl.main_ppo, torch", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", 30_000_000_000, marks=pytest.mark.slow
        ),
    ],
)
def test_idle_threads_of_torch_spin_briefly_and_sleep_unless_the_user_says_otherwise(module, chosen, policy, spins):
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | chosen
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    # libgomp prints what it has read when torch loads it
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
