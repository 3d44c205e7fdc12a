"""Imports are cheap and layered: heavy packages are loaded only where they are needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.end_to_end.runs import settings

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "tensordict", "ray", "transformers", "vllm", "megatron", "datasets", "matplotlib")


def loaded_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(out.stdout))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import hybridrl", set()),
        ("import hybridrl.framework", set()),
        ("import hybridrl.master.jobs.builder", set()),
        ("import hybridrl.sdk", set()),
        ("from hybridrl.sdk import RLJobBuilder, FutureSequence", set()),
        (
            "from hybridrl.sdk import BaseTrainer, BaseWorkload, RoleGroup, current_worker, rpc, trainer_invocation",
            set(),
        ),
        ("import reward_score", set()),
        ("import hybridrl.config", set()),
        ("import hybridrl.single_controller.processes.worker_host", set()),
        ("from hybridrl.single_controller import Dispatch, RayWorkerGroup, Worker, register", set()),
        ("from hybridrl import DataProto", {"torch", "tensordict"}),
        ("import hybridrl.main_ppo", set()),
        ("import hybridrl.main_sft", set()),
        ("import hybridrl.main_distill", set()),
        ("import hybridrl.main_dpo", set()),
        ("import hybridrl.main_rm", set()),
        ("import hybridrl.main_job", set()),
        ("import hybridrl.cli", set()),
    ],
)
def test_an_import_loads_only_the_heavy_packages_it_needs(statement, allowed):
    assert loaded_after(statement) <= allowed


COMMANDS = {
    "hybridrl --version": "from hybridrl.cli import main; main(['--version'])",
    "hybridrl --help": "from hybridrl.cli import main; main(['--help'])",
    "hybridrl job graph --help": "from hybridrl.cli import main; main(['job', 'graph', '--help'])",
    "hybridrl export --help": "from hybridrl.cli import main; main(['export', '--help'])",
    "hybridrl serve --help": "from hybridrl.cli import main; main(['serve', '--help'])",
    "main_job --help": "from hybridrl.main_job import main; main(['--help'])",
    "main_ppo --help": "from hybridrl.main_ppo import main; main(['--help'])",
    "main_ppo --cfg job": "from hybridrl.main_ppo import main; main(['--cfg', 'job'])",
    "main_sft --help": "from hybridrl.main_sft import main; main(['--help'])",
    "main_dpo --help": "from hybridrl.main_dpo import main; main(['--help'])",
    "main_rm --help": "from hybridrl.main_rm import main; main(['--help'])",
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


@pytest.mark.parametrize(
    "module", ["hybridrl.main_ppo, torch", "hybridrl.single_controller.processes.worker_host, torch"]
)
@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_of_torch_sleep_unless_the_user_says_otherwise(module, chosen, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr  # libgomp prints what it has read when torch loads it
