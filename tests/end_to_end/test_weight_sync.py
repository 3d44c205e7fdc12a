"""Weight pushes between processes in whole runs.

Every transport has the same result, and a stale replica generates nothing.
"""

import pytest

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import CallTimeout, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.rollout.base import RolloutHealth
from hybridrl.workers.weight_transfer import PushReceipt
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
TRANSPORTS = ("object_store", "shared_memory", "broadcast", "disk")
QUICK = ("shared_memory",)
STEPS = {
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 3,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "response_length/mean", "async/age_mean")


def sync(transport: str, folder) -> dict:
    changes = {
        "actor_rollout_ref__rollout__weight_sync__transport": transport,
        "actor_rollout_ref__rollout__weight_sync__bucket_mb": 1,
    }
    return changes | (
        {"actor_rollout_ref__rollout__weight_sync__directory": folder / "weights"} if transport == "disk" else {}
    )


def numbers(rows: list[dict]) -> list[list]:
    return [[row.get(name) for name in SAME] for row in rows if "actor/grad_norm" in row]


PARTIAL = {"trainer__partial_rollout": "true", "actor_rollout_ref__rollout__mode": "async"}


@pytest.mark.parametrize(
    ("transport", "more"),
    [
        pytest.param("object_store", {"trainer__lag": 1}, marks=pytest.mark.slow),
        pytest.param("shared_memory", {"trainer__n_gpus_per_node": 2}, marks=pytest.mark.slow),
        pytest.param("broadcast", {"trainer__lag": 2} | PARTIAL, marks=pytest.mark.slow),
        pytest.param(
            "disk", {"trainer__lag": 1, "trainer__eval_n_gpus": 1, "trainer__test_freq": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            "shared_memory",
            {"trainer__lag": 1, "trainer__eval_n_gpus": 1, "trainer__test_freq": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_is_the_same_with_every_transport(tmp_path, tiny_qwen2, ray_cluster, transport, more):
    asynchrony = {key: value for key, value in more.items() if key in ("trainer__lag", *PARTIAL)}
    train(tmp_path / "local", tiny_qwen2, **STEPS | asynchrony)
    pools = {"trainer__backend": "ray", "actor_rollout_ref__rollout__n_gpus_per_node": 2}
    rows = train(tmp_path / "ray", tiny_qwen2, **STEPS | more | pools | sync(transport, tmp_path))
    if "trainer__n_gpus_per_node" not in more:  # two training ranks sum in another order
        assert numbers(rows) == numbers(metrics(tmp_path / "local/run"))
    policies = [weights(tmp_path / where / "run/global_step_3", tmp_path / f"{where}_hf") for where in ("local", "ray")]
    assert largest_difference(*policies) <= (1e-5 if "trainer__n_gpus_per_node" in more else 0)
    if "trainer__eval_n_gpus" in more:
        assert any("val/version" in row for row in rows)
    if transport == "disk":  # verified pushes are deleted; the last pushes of a run are not verified
        versions = {path.name for path in (tmp_path / "weights").iterdir()}
        assert "version_3" in versions and "version_0" not in versions


class DropsOnePush(ActorRolloutRefWorker):
    """A rollout whose rank 1 drops the push of version 2 and keeps its weights: a fault that must be detected."""

    def receive_weights(self, version: int, sent: PushReceipt | None, adapters: bool = False) -> RolloutHealth:
        if self.rank == 1 and version == 2:
            if sent is None:  # receives everything and loads nothing
                for _ in self._receivers.receive(version, sent):
                    pass
            return RolloutHealth(version, None)
        return super().receive_weights(version, sent, adapters)


@pytest.fixture
def policy(tmp_path, tiny_qwen2, ray_cluster):
    """Return a function that starts a policy of one actor and two rollout processes, stopped with the test."""
    pools = [
        RayResourcePool([1], use_gpu=False, name_prefix="actor"),
        RayResourcePool([2], use_gpu=False, name_prefix="rollout"),
    ]
    groups = []

    def start(transport, rollout_cls=ActorRolloutRefWorker, *, timeout_s=60, **more):
        changes = {"trainer__call_timeout_s": timeout_s, **sync(transport, tmp_path), **more}
        words = settings(tmp_path, tiny_qwen2, **changes)
        config = load_config(PPOConfig, words, program="p", config_name="ppo_trainer")
        for pool, cls, role in zip(pools, (ActorRolloutRefWorker, rollout_cls), ("actor", "rollout"), strict=True):
            groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(cls, config, role), role=role))
            groups[-1].init_model(10)
        actor, rollout = groups
        return RolloutPipeline(PolicyWorkers({"actor": actor, "rollout": rollout}), config)

    yield start
    for group in groups:
        group.shutdown()
    for pool in pools:
        pool.release()


def prompts() -> DataProto:
    import torch

    ids = torch.arange(3, 3 + 4 * 6).reshape(4, 6)
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(6).expand(4, 6).contiguous(),
    }
    return DataProto.from_dict(tensors=columns)


@pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TRANSPORTS]
)
def test_a_replica_that_missed_a_push_generates_no_token(policy, transport):
    pipeline = policy(transport, DropsOnePush)
    pipeline.push_weights(1)
    assert pipeline.generate(prompts()).batch["weights_version"].eq(1).all()
    with pytest.raises(StaleWeightsError, match="different weights after a push of version 2"):
        pipeline.push_weights(2)
    # The driver did not verify the push, as with a lag: the replica itself refuses.
    with pytest.raises(StaleWeightsError, match="rank 1 .*version 1.*version 2 was pushed"):
        pipeline.generate(prompts())
    pipeline.push_weights(3)  # over a new channel
    assert pipeline.generate(prompts()).batch["weights_version"].eq(3).all()


ADAPTERS = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__rollout__weight_sync__lora": "adapter"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
def test_a_replica_that_missed_adapters_generates_no_token(policy, transport):
    pipeline = policy(transport, DropsOnePush, **ADAPTERS)
    workers = pipeline.workers
    pipeline.push_weights(1)
    whole = workers.rollout.rollout_health()
    with pytest.raises(StaleWeightsError, match="different weights after a push of version 2"):
        pipeline.push_weights(2)
    with pytest.raises(StaleWeightsError, match="rank 1 .*version 1.*version 2 was pushed"):
        pipeline.generate(prompts())
    pipeline.push_weights(3)  # a full push, over a new channel
    assert [health.received for health in workers.rollout.rollout_health()] == [health.received for health in whole]
    pushes = [pipeline.push_weights(version, wait=False) for version in (4, 5)]
    for push in pushes:
        push.wait()
    sent, health = workers.actor.fetch(pushes[1].sent)[0], workers.rollout.rollout_health()
    assert {h.received for h in health} == {sent.fingerprint} != {h.received for h in whole}
    assert {h.fingerprint for h in health} == {h.fingerprint for h in whole}, "nothing was trained in between"
    assert 10 * sent.num_bytes < workers.actor.fetch(workers.actor.store_weights.submit())[0].num_bytes
    assert pipeline.generate(prompts()).batch["weights_version"].eq(5).all()


@pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=pytest.mark.slow) for name in ("shared_memory", "broadcast")]
)
def test_a_dead_rollout_does_not_block_the_actor_forever(policy, transport):
    import ray

    pipeline = policy(transport, timeout_s=5)
    workers = pipeline.workers
    pipeline.push_weights(1)
    ray.kill(workers.rollout.workers[1])
    sent = workers.actor.send_weights.submit(2)
    with pytest.raises(
        CallTimeout,
        match=r"rank 0, 1 .*version 2.* 5 s \(trainer.call_timeout_s\)",
    ):
        workers.actor.fetch(sent)
    assert workers.actor.machine_id() == workers.rollout.execute_rank(0, "machine_id").split("\n")


@pytest.mark.slow
def test_auto_chooses_shared_memory_on_one_machine(policy):
    pipeline = policy("auto")
    pipeline.push_weights(1)
    assert pipeline._sync._transport == "shared_memory"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": "broadcast"}, "weight_sync.transport=broadcast: actor and rollout share their processes"),
        (
            {"transport": "in_process", "pool": 1},
            "weight_sync.transport=in_process: the rollout has processes of its own",
        ),
        ({"transport": "disk", "pool": 1}, "weight_sync.transport=disk: has no directory"),
        (
            {"transport": "broadcst", "pool": 1},
            "transport='broadcst' is not a known transport; did you mean 'broadcast'?",
        ),
        ({"transport": "nowhere.py:Mine", "pool": 1}, "weight_sync.transport=nowhere.py:Mine: no file nowhere.py"),
        ({"directory": "/somewhere", "pool": 1}, "weight_sync.directory=/somewhere: has no effect without"),
    ],
    ids=str,
)
def test_a_transport_that_does_not_fit_is_refused(tmp_path, tiny_qwen2, capsys, changes, message):
    pool = changes.pop("pool", 0)
    words = [f"actor_rollout_ref.rollout.weight_sync.{key}={value}" for key, value in changes.items()]
    placed = [f"actor_rollout_ref.rollout.n_gpus_per_node={pool}", f"trainer.backend={'ray' if pool else 'local'}"]
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *words, *placed]) == 2
    assert message in capsys.readouterr().err
