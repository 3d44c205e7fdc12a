"""The options with which worker processes start, and which of them are restarted together."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.errors import CallTimeout, PlacementError
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.invocation import CONCURRENT, CONTROL, USER_CODE
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.host_start import actor_options
from hybridrl.single_controller.processes.worker_processes import check_whole_groups, process_group_size
from hybridrl.single_controller.ray_worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs

ROOT = Path(__file__).parents[3]


class Plain(Worker): ...


class Threaded(Worker):
    @register(concurrency=8)
    def sleep(self) -> None: ...


def groups_of(recipe: RayClassWithInitArgs) -> dict[str, int] | None:
    pool = RayResourcePool([1], use_gpu=False)
    options = actor_options(pool, recipe.recipes("role"), share=1.0, options=recipe.actor_options, environment={})
    return options.get("concurrency_groups")


def recipe_of(cls: type, **groups: int) -> RayClassWithInitArgs:
    recipe = RayClassWithInitArgs(cls)
    if groups:
        recipe.update_options({"concurrency_groups": groups})
    return recipe


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (recipe_of(Plain), None),
        (recipe_of(Threaded), {CONCURRENT: 8}),
        (recipe_of(Plain, user_code=1, control=1), {USER_CODE: 1, CONTROL: 1}),
        (recipe_of(Threaded, control=1), {CONCURRENT: 8, CONTROL: 1}),
        (recipe_of(Threaded, concurrent=64), {CONCURRENT: 64}),
        (recipe_of(Threaded, concurrent=2), {CONCURRENT: 8}),
    ],
)
def test_a_process_has_the_threads_that_its_recipe_asks_for_and_its_methods_need(recipe, expected):
    assert groups_of(recipe) == expected


def test_roles_that_share_a_process_share_the_larger_groups():
    roles = {"a": recipe_of(Plain, user_code=1, concurrent=2), "b": recipe_of(Threaded, concurrent=16)}
    assert groups_of(create_colocated_worker_cls(roles)) == {USER_CODE: 1, CONCURRENT: 16}


class Pair(Worker):
    """One of `size` adjacent ranks that sum over each other."""

    def __init__(self, size: int):
        self.size = size

    @classmethod
    def num_peers(cls, size: int) -> int:
        return size

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> int:
        import torch
        import torch.distributed as dist

        from hybridrl.workers.process_setup import join_process_group

        if not dist.is_initialized():
            join_process_group("cpu")
        total = torch.tensor(self.rank)
        dist.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def variables(self) -> tuple[str, str, str]:
        import os

        return os.environ["WORLD_SIZE"], os.environ["PROCESS_GROUP_SIZE"], os.environ["MASTER_PORT"]


def test_the_size_is_that_of_the_roles_if_they_agree():
    pair, quad, all_ranks = (ClassWithInitArgs(Pair, size) for size in (2, 4, 0))
    assert process_group_size({"a": pair}, num_ranks=8, label="a") == 2
    assert process_group_size({"a": pair, "b": pair}, num_ranks=8, label="a+b") == 2
    assert process_group_size({"a": pair, "b": quad}, num_ranks=8, label="a+b") == 0
    assert process_group_size({"a": pair, "b": all_ranks}, num_ranks=8, label="a+b") == 0
    assert process_group_size({"a": ClassWithInitArgs(dict)}, num_ranks=8, label="a") == 0  # a class without a rank
    with pytest.raises(PlacementError, match="a has 3 processes.* 2 .*process group"):
        process_group_size({"a": pair}, num_ranks=3, label="a")


def test_only_whole_process_groups_are_named():
    check_whole_groups([3, 2], 2, label="a")
    check_whole_groups(range(4), 2, label="a")
    check_whole_groups([1], 0, label="a")
    with pytest.raises(ValueError, match=r"a: 2 ranks share .*not only \[1, 2\]"):
        check_whole_groups([1, 2], 2, label="a")


@pytest.mark.slow
@pytest.mark.timeout(400)  # six processes import torch
def test_a_process_group_is_restarted_with_a_new_rendezvous_and_the_other_one_goes_on(ray_cluster):
    with (
        RayResourcePool([4], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Pair, 2), role="pair") as group,
    ):
        assert group.sum_of_ranks() == [1, 1, 5, 5]
        before, processes = group.variables(), list(group.process_ids)
        assert [entry[:2] for entry in before] == [("4", "2")] * 4
        assert before[0] == before[1] != before[2] == before[3]
        with pytest.raises(ValueError, match="name all of them"):
            group.respawn(3)
        group.respawn(2, 3)
        after = group.variables()
        assert after[:2] == before[:2] and after[2] == after[3] != before[2]
        assert group.process_ids[:2] == processes[:2] and not set(group.process_ids[2:]) & set(processes)
        assert group.sum_of_ranks() == [1, 1, 5, 5]
        group.respawn(0, 1, 2, 3)
        assert group.sum_of_ranks() == [1, 1, 5, 5] and group.variables()[0] == group.variables()[1]
        assert (group.master_address, str(group.master_port)) == ("127.0.0.1", group.variables()[0][2])


@pytest.mark.timeout(200)
def test_a_node_that_starts_no_process_ends_a_restart_in_its_time():
    command = [sys.executable, "-m", "tests.support.single_controller.starved_raylet"]
    done = subprocess.run(command, cwd=ROOT, timeout=180, capture_output=True, text=True)
    [line] = [line for line in done.stdout.splitlines() if " s: " in line]
    seconds, _, text = line.partition(" s: ")
    assert 5 <= float(seconds) < 30 and "has not started new processes in 5 s: lost-0 on node" in text


def test_a_process_that_does_not_answer_in_time_says_what_to_do(ray_cluster):
    late = r"late\.rendezvous\(\) did not answer within 0\.001 s.* network .* start the same command again"
    with RayResourcePool([1], use_gpu=False) as pool, pytest.raises(CallTimeout, match=late):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), role="late", timeout_s=0.001)
