"""A run that loses a process continues and ends with the same result: nothing is missing, nothing is done twice."""

import pytest

from tests.support.end_to_end.failing_runs import SAME, fault, hits, losses, run_with
from tests.support.end_to_end.runs import largest_difference, metrics, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CRITIC = {"algorithm__adv_estimator": "gae", "trainer__colocate": "device"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_with(folder, tiny_qwen2, **CRITIC)
    assert done.returncode == 0, done.stderr
    return weights(folder / "run/global_step_3", folder / "hf"), metrics(folder / "run")


def check_ended_the_same(folder, undisturbed):
    parameters, rows = undisturbed
    assert largest_difference(weights(folder / "run/global_step_3", folder / "hf"), parameters) == 0
    found, expected = ([[row.get(name) for name in SAME] for row in some] for some in (metrics(folder / "run"), rows))
    assert found == expected


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
    check_ended_the_same(tmp_path, undisturbed)


def test_losing_an_actor_that_stores_its_snapshot_goes_back_to_the_one_before(tmp_path, tiny_qwen2, undisturbed):
    planted = fault(2, "save_checkpoint", "actor_rollout", 1, method="take_snapshot")
    done = run_with(tmp_path, tiny_qwen2, planted, **CRITIC)
    assert done.returncode == 0, done.stderr
    assert "the snapshot of step 2 is not complete; the one before it counts" in done.stderr
    assert [lost["back_at_step"] for lost in losses(tmp_path)] == [1]
    check_ended_the_same(tmp_path, undisturbed)


def test_losing_an_actor_in_the_next_generation_keeps_the_snapshot(tmp_path, tiny_qwen2, undisturbed):
    planted = fault(3, "gen", "actor_rollout", 1, method="generate_sequences")
    done = run_with(tmp_path, tiny_qwen2, planted, **CRITIC)
    assert done.returncode == 0, done.stderr
    assert [lost["back_at_step"] for lost in losses(tmp_path)] == [2]
    check_ended_the_same(tmp_path, undisturbed)
