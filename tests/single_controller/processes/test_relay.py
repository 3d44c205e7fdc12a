"""Calls through one relay per node: two nodes of two ranks each, on one machine."""

import pytest
import ray
import torch

from hybridrl.data_plane.batches import JoinedBatches
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.relay import NodeCall, NodeRelays
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Adder

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


class RelayedGroup(RayWorkerGroup):
    relay_from = 4


@pytest.fixture
def group(ray_cluster):
    with (
        RayResourcePool([2, 2], name_prefix="relayed") as pool,
        RelayedGroup(pool, RayClassWithInitArgs(Adder, 10), role="adder") as started,
    ):
        yield started


def rows(n: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(n)})


def test_calls_through_relays_return_raise_and_follow_earlier_calls_as_direct_ones(group):
    places = group.rank_and_pid()
    assert [place[:2] for place in places] == [(rank, 4) for rank in range(4)]
    assert [place[2] for place in places] == group.process_ids
    assert group.processes.relayed.relays.ranks == [[0, 1], [2, 3]]

    assert group.own([1, 2, 3, 4]) == [10, 21, 32, 43]  # an argument for each rank
    added = group.add(rows(7)).batch  # rows split 2, 2, 2, 1
    assert added["x"].tolist() == list(range(10, 17))
    assert added["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3]
    group.announce(2)  # ranks 0 and 1 get the same rows, and rank 0's are collected
    assert group.add_on_mesh(rows(4)).batch["rank"].tolist() == [0, 0, 2, 2]
    assert group.first_only(5) == (0, 5)

    with pytest.raises(KeyError, match="planted on 2") as caught:
        group.fail_on(2)
    assert any("adder-2, fail_on()" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_losses_and_timeouts_behind_relays_have_the_rank_and_a_lost_relay_is_a_lost_node(group):
    with pytest.raises(CallTimeout, match="still waiting for rank 3") as late:
        group.sleep_on(3)
    assert (late.value.role, late.value.ranks, late.value.method) == ("adder", (3,), "sleep_on")

    with pytest.raises(WorkerLost, match=r"worker adder-2 was lost while running die_on\(\)"):
        group.die_on(2)
    group.rebuild()
    assert [place[0] for place in group.rank_and_pid()] == [0, 1, 2, 3]

    ray.kill(group.processes.relayed.relays.actors[1])
    with pytest.raises(WorkerLost, match="adder-2 .*the relay of ranks 2 to 3, which is on their node, was lost"):
        group.rank_and_pid()
    group.respawn(2)
    assert [place[0] for place in group.rank_and_pid()] == [0, 1, 2, 3]


def test_a_call_waits_for_calls_that_were_not_awaited_instead_of_overtaking_them(group):
    group.rank_and_pid()
    assert group.processes.relayed.relays is not None
    slow = group.doze.submit(1.0)
    assert group.processes.find_relays() is None  # the next call is sent directly
    assert group.add(rows(4)).batch["x"].tolist() == [10, 11, 12, 13]
    assert group.processes.find_relays() is group.processes.relayed.relays
    assert slow.fetch(list(slow)) == [None] * 4


def test_a_node_that_could_not_join_its_results_has_those_of_other_nodes_separated():
    outputs = [rows(n) for n in (1, 2, 3)]
    relays = NodeRelays([None, None], [[0, 1], [2, 3]])
    parts = [JoinedBatches.of(outputs[:2]), [outputs[2], None]]  # rank 3 returned no batch
    found = relays.merged(parts, wanted={0, 1, 2, 3})
    assert [len(batch) for batch in found[:3]] == [1, 2, 3] and found[3] is None
    found = relays.merged([JoinedBatches.of(outputs[:1]), JoinedBatches.of(outputs[2:])], wanted={0, 2})
    assert found.batch["x"].tolist() == [0, 0, 1, 2]
    assert relays.merged([[1, 2], [3, 4]], wanted=set()) == [1, 2, 3, 4]


def test_plain_arguments_of_a_call_are_the_same_after_its_encoding():
    values = [[None, True], [1, 2**70], [0.1, float("inf")], ["\ud800", ""]]
    call = NodeCall([1, [], None], "actor", "update", [0, 3], values, {"step": [7, 8]}, None, 1.5, [])
    assert isinstance(call.encode(), bytes) and NodeCall.decode(call.encode()) == call
    other = call._replace(args=[[b"bytes", (1, 2)]])
    assert not isinstance(other.encode(), bytes) and NodeCall.decode(other.encode()) == other
