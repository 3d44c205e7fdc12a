"""A run that loses a process continues and ends with the same result: nothing is missing, nothing is done twice."""

import pytest

from tests.support.end_to_end.failing_runs import SAME, fault, hits, run_with
from tests.support.end_to_end.runs import largest_difference, metrics, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CRITIC = {"algorithm__adv_estimator": "gae", "trainer__colocate": "device"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_with(folder, tiny_qwen2, **CRITIC)
    assert done.returncode == 0, done.stderr
    return weights(folder / "run/global_step_3", folder / "hf"), metrics(folder / "run")


def test_losing_an_actor_and_a_critic_in_their_updates_does_not_change_the_result(tmp_path, tiny_qwen2, undisturbed):
    faults = [
        fault(2, "update_actor", "actor_rollout", 1, method="update_actor", after_s=0.02),
        fault(3, "update_critic", "critic", 0, method="update_critic"),
    ]
    done = run_with(tmp_path, tiny_qwen2, *faults, **CRITIC)
    assert done.returncode == 0, done.stderr
    assert len(hits(tmp_path)) == 2
    assert "actor_rollout-1 was lost" in done.stderr
    assert "role actor_rollout (2 processes) from the snapshot of step 1 (1 of 3 losses)" in done.stderr
    parameters, rows = undisturbed
    assert largest_difference(weights(tmp_path / "run/global_step_3", tmp_path / "hf"), parameters) == 0
    assert [[row.get(name) for name in SAME] for row in metrics(tmp_path / "run")] == [
        [row.get(n) for n in SAME] for row in rows
    ]
