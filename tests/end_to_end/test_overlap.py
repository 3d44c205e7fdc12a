"""Concurrent stages: stages on separate devices overlap, colocated ones do not.

The run is the same as a sequential one.
"""

import itertools
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.framework.graph.timeline import read_spans
from hybridrl.trainer.roles import ResourcePoolManager, Role
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = pytest.mark.timeout(300)
INDEPENDENT_STAGES = ("reward", "old_log_prob", "ref", "values")  # between generation and the advantages
PPO = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": "true",
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
    "trainer__save_freq": 2,
    "trainer__trace": "true",
    "trainer__colocate": "device",
}
SLOW_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05)
    return len(set(solution_str)) / 10
"""


def train_on(pools: dict[str, list[Role]], folder: Path, model: Path, **changes: object) -> Path:
    """Run two PPO steps with these roles on these pools of one process; return the run's directory."""
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW_REWARD)
    mapping = {role: pool for pool, roles in pools.items() for role in roles}
    changes = PPO | {"trainer__backend": "ray", "custom_reward_function__path": folder / "slow.py"} | changes
    code = main_ppo.main(
        settings(folder, model, **changes),
        pools=lambda config, workers: ResourcePoolManager({pool: [1] for pool in pools}, mapping, use_gpu=False),
    )
    assert code == 0
    return folder / "run"


def overlapping_stages(run: Path) -> set[frozenset[str]]:
    """Return the pairs of stages of which one began before the other had ended."""
    [trace] = (run / "trace").iterdir()
    spans = [span for span in read_spans(trace) if span.kind == "stage"]
    pairs = itertools.combinations(spans, 2)
    together = [(a, b) for a, b in pairs if a.step == b.step and a.begin < b.end and b.begin < a.end]
    return {frozenset({a.name, b.name}) for a, b in together if a.name != b.name}


@pytest.mark.slow
def test_stages_on_separate_pools_overlap_and_the_run_is_the_same(tmp_path, tiny_qwen2, ray_cluster):
    pools = {"policy": [Role.ActorRollout], "reference": [Role.RefPolicy], "critic": [Role.Critic]}
    together = train_on(pools, tmp_path / "together", tiny_qwen2)
    apart = train_on(pools, tmp_path / "apart", tiny_qwen2, trainer__overlap="false")
    pairs = overlapping_stages(together)
    assert {frozenset({"reward", name}) for name in INDEPENDENT_STAGES[1:]} <= pairs and frozenset(
        {"update_critic", "update_actor"}
    ) in pairs
    assert overlapping_stages(apart) == set()
    timed = ("perf/", "timing", "reward/time_s", "parity/time_s")
    numbers = [
        [{k: v for k, v in row.items() if not k.startswith(timed)} for row in metrics(run)] for run in (together, apart)
    ]
    assert numbers[0] == numbers[1]
    policies = [weights(run / "global_step_2", run / "hf") for run in (together, apart)]
    assert largest_difference(*policies) == 0


@pytest.mark.slow
def test_roles_on_one_device_take_turns(tmp_path, tiny_qwen2, ray_cluster):
    pools = {"all": [Role.ActorRollout, Role.RefPolicy, Role.Critic]}
    pairs = overlapping_stages(train_on(pools, tmp_path / "run", tiny_qwen2))
    assert pairs and all("reward" in pair for pair in pairs), (
        "the rule works on the driver's machine, and only it runs concurrently"
    )
