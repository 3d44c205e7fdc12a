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
        ("import hybridrl.main_ppo", {"torch", "tensordict"}),
        ("import hybridrl.main_sft", {"torch", "tensordict"}),
        ("import hybridrl.main_distill", {"torch", "tensordict"}),
        ("import hybridrl.main_dpo", {"torch", "tensordict"}),
        ("import hybridrl.main_rm", {"torch", "tensordict"}),
        ("import hybridrl.main_job", set()),
        ("import hybridrl.cli", set()),
    ],
)
def test_an_import_loads_only_the_heavy_packages_it_needs(statement, allowed):
    assert loaded_after(statement) <= allowed


def test_a_run_in_one_process_needs_neither_ray_nor_the_master(tmp_path, tiny_qwen2):
    unused = ("ray", "hybridrl.master.service", "hybridrl.master.health", "hybridrl.master.state")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({unused}))  # an import of one of them fails\n"
        "from hybridrl.main_ppo import main; sys.exit(main(sys.argv[1:]))"
    )
    words = settings(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    subprocess.run([sys.executable, "-c", code, *words], timeout=100, check=True, cwd=ROOT)


@pytest.mark.parametrize("module", ["hybridrl.main_ppo", "hybridrl.single_controller.processes.worker_host, torch"])
@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_of_torch_sleep_unless_the_user_says_otherwise(module, chosen, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr  # libgomp prints what it has read when torch loads it
