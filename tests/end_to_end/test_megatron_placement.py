"""Weight pushes of the Megatron engine, from tensor-parallel processes or pipeline stages.

To rollouts in every placement, over every transport.
"""

import pytest

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.ppo.policy.cross_process_sync import CrossProcessWeightSync
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.end_to_end.test_megatron import MEGATRON, PP2, TP2
from tests.end_to_end.test_rollout_placement import (
    APART,
    PLACEMENTS,
    compare,
    generated,
    model_path,  # noqa: F401  a fixture
    needs_vllm,
    through_hf,  # noqa: F401  a fixture
)
from tests.support.end_to_end.runs import settings
from tests.support.workers.megatron_models import NEEDS_MEGATRON

TRANSPORTS = ("object_store", "shared_memory", "broadcast", "disk")
TWO_FOR_TWO = {"pools": {"train_pool": [2], "rollout_pool": [2]}, "mapping": APART}
PLACES = {name: place for name, place in PLACEMENTS.items() if not name.startswith("separated")} | {
    "separated": TWO_FOR_TWO,
    "separated, tensor-parallel": TWO_FOR_TWO | {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2},
}

pytestmark = [NEEDS_MEGATRON, pytest.mark.timeout(400)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(TP2, id="TP2"), pytest.param(PP2, id="PP2")])
def test_every_transport_has_version_and_fingerprint_of_fsdp(tmp_path, model_path, ray_cluster, layout):  # noqa: F811
    def config_of(**changes) -> PPOConfig:
        sync = {
            "transport": "disk",
            "directory": tmp_path / "weights",
        }  # rank 0 reads the directory from here; the transport is chosen below
        sync = {f"actor_rollout_ref__rollout__weight_sync__{key}": value for key, value in sync.items()}
        return load_config(
            PPOConfig, settings(tmp_path, model_path, **sync, **changes), program="p", config_name="ppo_trainer"
        )

    one = LocalWorkerGroup(
        None, RayClassWithInitArgs(ActorRolloutRefWorker, config_of(), "actor_rollout"), role="actor_rollout"
    )
    one.init_model()
    (by_fsdp,) = one.update_weights(1)
    config = config_of(**MEGATRON, **layout)
    pools = {
        role: RayResourcePool([num], use_gpu=False, name_prefix=role) for role, num in (("actor", 2), ("rollout", 1))
    }
    groups = []
    try:
        for role, pool in pools.items():
            groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, config, role), role=role))
            groups[-1].init_model(10)
        for version, transport in enumerate(TRANSPORTS, 1):
            sync = CrossProcessWeightSync(*groups, WeightSyncConfig(transport=transport), overlaps_training=False)
            sync.push(version).wait()
            (health,) = groups[1].rollout_health()
            assert (health.version, health.fingerprint) == (version, by_fsdp.fingerprint), transport
    finally:
        for group in groups:
            group.shutdown()
        for pool in pools.values():
            pool.release()


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("layout", [pytest.param(TP2, id="TP2"), pytest.param(PP2, id="PP2")])
@pytest.mark.parametrize("place", PLACES)
def test_vllm_generates_from_megatron_what_hf_generates(place, layout, model_path, through_hf, tmp_path, ray_cluster):  # noqa: F811
    changes = {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__actor__strategy": "megatron", **layout}
    compare(generated(tmp_path / place.split(",")[0], model_path, **PLACES[place], **changes), through_hf[1])
