"""Placement is a mapping: actor and rollout in separate processes train as the hybrid does."""

import pytest

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, from_dict
from hybridrl.errors import ConfigError, PlacementError, StaleWeightsError
from hybridrl.single_controller.placement.feasibility import NodeCapacity, check_feasible
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.weight_sync import verify_push
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.rollout.base import RolloutHealth
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

SEPARATED = {Role.Actor: "train_pool", Role.Rollout: "rollout_pool"}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_separated_actor_and_rollout_train_as_the_hybrid_does(tmp_path, tiny_qwen2, ray_cluster):
    train(tmp_path / "hybrid", tiny_qwen2)
    folder = tmp_path / "separated"
    folder.mkdir()
    code = main_ppo.main(
        settings(folder, tiny_qwen2, trainer__backend="ray"),
        workers=lambda config: dict.fromkeys(SEPARATED, ActorRolloutRefWorker),
        pools=lambda config, workers: ResourcePoolManager(
            {"train_pool": [1], "rollout_pool": [2]}, SEPARATED, use_gpu=False
        ),
    )
    assert code == 0
    same = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss")
    assert [[row.get(n) for n in same] for row in metrics(folder / "run")] == [
        [row.get(n) for n in same] for row in metrics(tmp_path / "hybrid/run")
    ]
    step = "run/global_step_2"
    assert (
        largest_difference(weights(tmp_path / "hybrid" / step, tmp_path / "a"), weights(folder / step, tmp_path / "b"))
        == 0
    )


def test_a_stale_or_different_rollout_is_reported_with_its_rank():
    verify_push([RolloutHealth(3, 7), RolloutHealth(3, 7)], 3)
    with pytest.raises(StaleWeightsError, match=r"ranks \[1\].* version \[2\].* push of version 3"):
        verify_push([RolloutHealth(3, 7), RolloutHealth(2, 7)], 3)
    with pytest.raises(StaleWeightsError, match="different weights"):
        verify_push([RolloutHealth(3, 7), RolloutHealth(3, 8)], 3)


def test_a_rollout_that_cannot_read_its_weights_is_verified_by_version_and_by_what_it_received():
    remote = [RolloutHealth(3, None, received=7, reads_own_weights=False) for _ in range(2)]
    verify_push(remote, 3, sent=7)
    with pytest.raises(StaleWeightsError, match=r"ranks \[0, 1\].*\[3, 3\].* version 4"):
        verify_push(remote, 4, sent=7)
    with pytest.raises(StaleWeightsError, match="received 0x7; 0x8 was sent"):
        verify_push(remote, 3, sent=8)
    with pytest.raises(StaleWeightsError, match="rank 1: none, received 0x7"):  # declared, and not reported
        verify_push([RolloutHealth(3, 7, received=7), RolloutHealth(3, None, received=7)], 3, sent=7)


def test_a_policy_without_a_rollout_is_refused():
    with pytest.raises(ConfigError, match="needs Role.ActorRollout, or both"):
        PolicyWorkers({"actor": object()})


def test_a_mapping_to_an_unknown_pool_is_refused():
    with pytest.raises(ConfigError, match="pools \\['b'\\], but resource_pool_spec has \\['a'\\]"):
        ResourcePoolManager({"a": [1]}, {Role.Actor: "b"})


def test_the_error_for_a_pool_that_does_not_fit_names_its_own_keys():
    config = from_dict(
        PPOConfig, {"actor_rollout_ref": {"rollout": {"n_gpus_per_node": 3}}, "trainer": {"n_gpus_per_node": 2}}
    )
    workers = main_ppo.worker_classes(config)
    manager = main_ppo.resource_pools(config, workers)
    plan = manager.plan("job", {str(role): manager.mapping[role] for role in workers}, colocate="process", use_gpu=True)
    check_feasible(plan.reservations(), [NodeCapacity("node", {"CPU": 8, "GPU": 5})])
    with pytest.raises(PlacementError, match="'global_pool'.*1 GPU left, 1 GPU missing. Lower trainer.n_gpus_per_node"):
        check_feasible(plan.reservations(), [NodeCapacity("node", {"CPU": 8, "GPU": 4})])
    with pytest.raises(
        PlacementError, match="'rollout_pool'.*1 GPU missing. Lower actor_rollout_ref.rollout.n_gpus_per_node"
    ):
        check_feasible(plan.reservations(), [NodeCapacity("node", {"CPU": 8, "GPU": 2})])
