"""Importing is cheap, and arrows hold: what must not be loaded is not."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "datasets", "matplotlib")


def loaded_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(out.stdout))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import hybridrl", set()),
        ("import hybridrl.framework", set()),
        ("import reward_score", set()),
        ("import hybridrl.config", set()),
        ("from hybridrl import DataProto", {"torch"}),
        ("import hybridrl.main_ppo", {"torch", "ray"}),
        ("import hybridrl.main_sft", {"torch", "ray"}),
    ],
)
def test_importing_loads_no_more_than_it_must(statement, allowed):
    assert loaded_after(statement) <= allowed
