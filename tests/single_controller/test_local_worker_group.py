"""`LocalWorkerGroup` behaves as `RayWorkerGroup` with one worker, and starts no Ray process."""

import os

import pytest
import torch

from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import (
    Dispatch,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.resource_pool import ResourcePool
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from tests.support.single_controller.sample_workers import Adder


@pytest.fixture
def adder():
    return LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Adder, 100), role="adder")


def test_calls_run_in_this_process(adder):
    assert adder.rank_and_pid() == [(0, 1, os.getpid())]
    out = adder.add(DataProto.from_dict(tensors={"x": torch.arange(3)}))
    assert out.batch["x"].tolist() == [100, 101, 102]
    assert adder.own([3]) == [30] and adder.first_only(7) == (0, 7)


def test_a_non_blocking_call_has_completed_when_it_returns(adder):
    future = adder.add_async(DataProto.from_dict(tensors={"x": torch.arange(2)}))
    assert future.get().batch["x"].tolist() == [100, 101]
    assert adder.fetch(adder.first_only.submit(7)) == [(0, 7)]
    assert adder.add(future).batch["x"].tolist() == [200, 201]


def test_an_exception_keeps_its_type(adder):
    with pytest.raises(KeyError, match="planted on 0"):
        adder.fail_on(0)


def test_more_than_one_process_is_refused():
    with pytest.raises(ConfigError, match="trainer.backend=local .*one worker.*pool has 2"):
        LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Adder, 1))


def test_users_add_dispatch_modes():
    def reverse(group, rows):
        return ([list(reversed(rows))] * group.world_size,), {}

    register_dispatch_mode("REVERSED", dispatch_fn=reverse, collect_fn=lambda group, outputs: outputs[0])
    with pytest.raises(ValueError, match="registered already"):
        register_dispatch_mode("REVERSED", reverse, reverse)

    class Echo(Worker):
        @register(Dispatch.REVERSED)
        def echo(self, rows):
            return rows

    group = LocalWorkerGroup(None, ClassWithInitArgs(Echo))
    assert group.echo([1, 2, 3]) == [3, 2, 1]
    update_dispatch_mode(
        "REVERSED", get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"], lambda group, outputs: outputs
    )
    assert LocalWorkerGroup(None, ClassWithInitArgs(Echo)).echo([1, 2]) == [[1, 2]]
    Dispatch.remove("REVERSED")
    assert not hasattr(Dispatch, "REVERSED")
    with pytest.raises(ValueError, match="'REVERSED' is not registered"):
        LocalWorkerGroup(None, ClassWithInitArgs(Echo))
    for name in ("REVERSED", "ONE_TO_ALL"):
        with pytest.raises(ValueError, match=f"{name!r} was not added by register_dispatch_mode"):
            Dispatch.remove(name)


def test_an_unknown_mode_is_refused_when_the_group_is_made():
    class Unknown(Worker):
        @register("NO_SUCH_MODE")
        def call(self):
            return None

    with pytest.raises(ValueError, match="'NO_SUCH_MODE' is not registered; .* RANK_ZERO"):
        LocalWorkerGroup(None, ClassWithInitArgs(Unknown))


def test_a_worker_takes_over_the_mesh_position_of_another_one():
    one, two = Worker(), Worker()
    one._register_dispatch_collect_info("actor", 1, False)
    two.set_dispatch_collect("actor", **one.get_dispatch_collect())
    two.set_dispatch_collect("critic", 3, True)
    assert two.query_mesh_place("actor") == (1, False)
    assert two.query_mesh_place("critic") == (3, True)
    reference = Worker()
    reference.set_dispatch_collect("ref", **one.get_dispatch_collect())  # its only one, under another name, as in verl
    assert reference.query_mesh_place("ref") == (1, False)
    with pytest.raises(KeyError, match="no position on mesh 'ref', only on \\['actor', 'critic'\\]"):
        Worker().set_dispatch_collect("ref", **two.get_dispatch_collect())


def test_a_second_position_on_a_mesh_is_refused_and_the_same_one_is_not():
    worker = Worker()
    for _ in range(2):
        worker._register_dispatch_collect_info("actor", 1, False)
    with pytest.raises(ValueError, match=r"mesh 'actor' with \(1, False\).*now with \(2, False\)"):
        worker._register_dispatch_collect_info("actor", 2, False)


def test_an_unknown_mesh_is_named_in_the_error(adder):
    adder.worker._register_dispatch_collect_info("train", 0, True)
    with pytest.raises(KeyError, match="announced no mesh 'mesh'; it announced \\['train'\\]"):
        adder.add_on_mesh(DataProto.from_dict(tensors={"x": torch.arange(2)}))
