"""Calls on groups of real processes: coroutines, futures between groups of different sizes, meshes, environments."""

import pytest
import ray
import torch
from tensordict import TensorDict

from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Waiter

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def groups(ray_cluster):
    """A group of two and one of three processes, on three slots."""
    with RayResourcePool([2], name_prefix="calls-2") as two, RayResourcePool([1], name_prefix="calls-1") as one:
        recipe = RayClassWithInitArgs(Waiter)
        pair = RayWorkerGroup(two, recipe, role="pair", name_prefix="calls", worker_env={"PLANTED": "here"}, share=0.4)
        single = RayWorkerGroup(one, recipe, role="single", name_prefix="calls")
        yield pair, single
        pair.shutdown()
        single.shutdown()


@pytest.fixture
def pair(groups):
    return groups[0]


@pytest.fixture
def single(groups):
    return groups[1]


def xs(data: DataProto) -> list[int]:
    return data.batch["x"].tolist()


def test_a_coroutine_is_called_like_any_method(pair):
    assert pair.sleep_async(0.01) == [0, 1]
    with pytest.raises(KeyError, match="planted in a coroutine") as caught:
        pair.fail_async()
    assert caught.value.__notes__[0] in ("raised in pair-0, fail_async()", "raised in pair-1, fail_async()")


def test_coroutines_of_one_worker_run_concurrently(single):
    first, second = single.meet(1), single.meet(2)
    assert single.fetch(first) + single.fetch(second) == [1, 2]


def test_a_method_with_threads_runs_concurrently_with_itself_and_with_the_others(single):
    waiting = [single.meet_in_thread(4) for _ in range(3)]
    assert single.variable("RANK") == ["0"]  # none of the three can have ended
    waiting.append(single.meet_in_thread(4))
    assert [single.fetch(outputs) for outputs in waiting] == [[0]] * 4


def test_a_future_with_more_or_fewer_shards_than_workers_is_split_by_its_consumers(pair, single):
    future = pair.count_up(10)  # shards of 1 and 2 rows
    assert isinstance(future, DataProtoFuture) and len(future.futures) == 2
    assert xs(single.pass_on(future)) == [10, 11, 12]
    out = pair.pass_on(single.count_up(5))  # one shard of one row, for two workers
    assert xs(out) == [5] and out.batch["rank"].tolist() == [0]
    assert xs(future.get()) == [10, 11, 12]


def test_consumers_fetch_only_the_shards_that_hold_their_rows(pair):
    chunks = pair.count_up(0).chunk(3)  # rows 0 | 1 2
    assert all(isinstance(size, ray.ObjectRef) for size in chunks[0].sizes)
    assert [xs(chunk.get()) for chunk in chunks] == [[0], [1], [2]]
    with_sizes = DataProtoFuture(chunks[0].collect_fn, chunks[0].futures, fetch=chunks[0].fetch, sizes=[1, 2])
    assert [len(chunk.futures) for chunk in with_sizes.chunk(3)] == [1, 1, 1]


def test_a_broadcast_future_is_fetched_whole_and_stays_a_future_without_materialize(pair):
    future = pair.count_up(0)
    assert pair.count_rows(future) == [3, 3]
    assert pair.kind(future.chunk(2)[0]) == ["DataProtoFuture"] * 2


def test_any_method_can_be_called_without_waiting(pair):
    future = pair.pass_on.submit(DataProto.from_dict({"x": torch.arange(3)}))
    assert isinstance(future, DataProtoFuture) and xs(pair.pass_on(future)) == [0, 1, 2]
    assert pair.fetch(pair.variable.submit("RANK")) == ["0", "1"]


def test_a_tensordict_is_split_and_joined_like_a_batch(pair):
    out = pair.double_tensordict(TensorDict({"x": torch.arange(5)}, batch_size=[5]))
    assert isinstance(out, TensorDict) and out["x"].tolist() == [0, 2, 4, 6, 8]


def test_large_chunks_go_through_the_object_store_and_arrive_in_order(pair):
    x = torch.arange(4 * 1024 * 1024)  # 32 MiB, 16 for each
    assert torch.equal(pair.pass_on(DataProto.from_dict({"x": x})).batch["x"], x)


def test_mesh_outputs_are_in_the_order_of_the_rows_not_of_the_workers(pair):
    pair.announce_backwards()
    out = pair.rank_of_rows(DataProto.from_dict({"x": torch.arange(4)}))
    assert xs(out) == [0, 1, 2, 3] and out.batch["rank"].tolist() == [1, 1, 0, 0]


def test_a_mesh_on_which_some_rows_are_not_collected_is_refused(pair):
    pair.announce_rank_0_only()
    with pytest.raises(ValueError, match="mesh 'mute' of pair: exactly one .*collected"):
        pair.mute(DataProto.from_dict({"x": torch.arange(4)}))


def test_a_direct_method_is_called_on_one_worker(pair):
    assert pair.execute_rank(1, "direct", 5) == 6
    with pytest.raises(TypeError, match="group.execute_rank"):
        pair.direct(5)


def test_the_environment_is_set_before_any_import(pair, single):
    assert pair.variable("PLANTED") == ["here", "here"] and single.variable("PLANTED") == [None]
    assert pair.variable("WG_PREFIX") == ["calls", "calls"] and pair.variable("RAY_LOCAL_WORLD_SIZE") == ["2", "2"]
    assert pair.variable("MASTER_PORT") == [str(pair.master_port)] * 2
    assert pair.variable("MASTER_ADDR") == ["127.0.0.1"] * 2  # all ranks are on this machine


def test_a_worker_has_the_roles_in_its_process(single):
    assert single.roles_in_process() == [["single"]]


def test_processes_are_named_after_job_role_and_rank(pair):
    assert pair.worker_names == ["calls/pair-0", "calls/pair-1"]
    assert ray.get_actor("calls/pair-1", namespace="hybridrl") == pair.workers[1]


def test_a_running_group_is_found_by_its_names_in_any_order(pair):
    found = RayWorkerGroup.from_detached(worker_names=list(reversed(pair.worker_names)))
    assert found.role == "pair" and found.process_ids == pair.process_ids and found.worker_names == pair.worker_names
    assert found.sleep_async(0.0) == [0, 1]
    handles = RayWorkerGroup.from_detached(worker_handles=pair.workers, role="pair")
    assert handles.process_ids == pair.process_ids
