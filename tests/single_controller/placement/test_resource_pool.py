"""Pools: slots, views, shares of a slot, and visible devices."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.pool_views import (
    attach_resource_pool,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.worker_host import visible_devices
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Adder

GPU_DRIVER = Path(__file__).parents[2] / "support/single_controller/fractional_gpu_driver.py"


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with RayResourcePool([3], name_prefix="views") as pool:
        yield pool


def test_a_pool_that_does_not_fit_is_refused_and_the_error_says_what_is_missing(ray_cluster):
    with pytest.raises(PlacementError, match="no node can hold 1000 worker processes"):
        RayResourcePool([1000]).get_placement_groups()


def test_nodes_of_different_sizes_give_the_right_local_ranks():
    pool = RayResourcePool([3])
    pool.add_node(1)
    assert pool.world_size == 4
    assert pool.local_rank_list == [0, 1, 2, 0] and pool.local_world_size_list == [3, 3, 3, 1]
    assert [pool.rank_environment(rank)["NODE_RANK"] for rank in range(4)] == ["0", "0", "0", "1"]


def test_an_accelerator_is_requested_by_rays_name():
    pool = RayResourcePool([1], use_gpu=True, accelerator_type="H100")
    assert pool.bundle == {"CPU": 1, "GPU": 1, "accelerator_type:H100": 1e-4}


def test_a_pool_splits_into_consecutive_ranks_and_merges_again(pool):
    first, second = split_resource_pool(pool, [1, 2])
    assert (first.world_size, second.world_size) == (1, 2)
    assert first.slots() + second.slots() == pool.slots()
    assert [p.world_size for p in split_resource_pool(pool, 1)] == [1, 1, 1]
    merged = merge_resource_pool(second, first)
    assert merged.slots() == second.slots() + first.slots() and merged.local_rank_list == [0, 1, 2]


def test_groups_on_parts_of_a_pool_have_separate_worlds(pool):
    first, second = split_resource_pool(pool, [1, 2])
    with (
        RayWorkerGroup(first, RayClassWithInitArgs(Adder, 1), role="left") as left,
        RayWorkerGroup(second, RayClassWithInitArgs(Adder, 1), role="right") as right,
    ):
        assert [(rank, size) for rank, size, _ in left.rank_and_pid()] == [(0, 1)]
        assert [(rank, size) for rank, size, _ in right.rank_and_pid()] == [(0, 2), (1, 2)]
        assert right.sum_ranks() == [1.0, 1.0]


@pytest.mark.parametrize("size", [2, [1, 1], [0, 3], 0, [3, -3, 3]])
def test_split_sizes_that_do_not_add_up_are_refused(pool, size):
    with pytest.raises(ValueError, match="does not divide a pool of 3 processes"):
        split_resource_pool(pool, size)


def test_pools_of_different_kinds_do_not_merge(pool):
    with pytest.raises(ValueError, match="max_colocate_count=10 and 2 cannot be merged"):
        merge_resource_pool(pool, RayResourcePool([1], use_gpu=False, max_colocate_count=2))


def test_reserved_groups_are_found_for_another_pool(pool):
    pools = {"actor": pool}
    assert extract_pg_from_exist(pools, ["actor"], RayResourcePool([2])) == pool.get_placement_groups()
    with pytest.raises(PlacementError, match=r"\[3\] slots per node.* \[2, 2\]"):
        extract_pg_from_exist(pools, ["actor"], RayResourcePool([2, 2]))


def test_groups_share_a_slot_until_it_is_full(pool):
    recipe = RayClassWithInitArgs(Adder, 1)
    [one, *_] = split_resource_pool(pool, 1)
    with (
        RayWorkerGroup(one, recipe, role="large", name_prefix="shares", share=0.75),
        pytest.raises(PlacementError, match="'shares/second' needs 0.5 .*0.25 left .shares/large: 0.75."),
    ):
        RayWorkerGroup(one, recipe, role="second", name_prefix="shares", share=0.5)
    with RayWorkerGroup(one, recipe, role="second", name_prefix="shares", share=0.5) as group:
        assert len(group.rank_and_pid()) == 1


def test_a_detached_pool_is_found_by_name_and_released(ray_cluster):
    reserved = RayResourcePool([1], name_prefix="detached", detached=True)
    reserved.get_placement_groups()
    found = attach_resource_pool("detached")
    assert found.store == [1] and found.slots() == reserved.slots() and found.use_gpu is False
    found.release()
    with pytest.raises(PlacementError, match="no reserved pool .*'detached'"):
        attach_resource_pool("detached")


def test_devices_are_made_visible_where_ray_does_not_do_it():
    assert visible_devices({"GPU": ["3"]}, {}) == {}
    assert visible_devices({"GPU": ["3", "5"]}, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}) == {
        "CUDA_VISIBLE_DEVICES": "3,5"
    }
    assert visible_devices({"NPU": ["1"]}, {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "true"}) == {
        "ASCEND_RT_VISIBLE_DEVICES": "1"
    }
    assert visible_devices({"GPU": []}, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}) == {}


@pytest.mark.slow
def test_groups_with_fractions_of_a_gpu_see_the_same_one():
    """A separate cluster with four GPUs that do not exist; only the visibility variables are tested."""
    run = subprocess.run([sys.executable, str(GPU_DRIVER)], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-2000:]
    actor, critic, separate = run.stdout.split()
    assert actor == critic and sorted(actor.split("|") + separate.split("|")) == ["0", "1", "2", "3"]
