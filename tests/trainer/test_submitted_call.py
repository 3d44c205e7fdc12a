"""A submitted call: its results, and the seconds in which its workers had it."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from hybridrl.data_plane.futures import DataProtoFuture, concat_shards
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch
from hybridrl.single_controller.invocation import register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.trainer.submitted_call import SubmittedCall


class Doubler(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"a": 2 * data.batch["a"]})


def test_the_results_come_in_the_order_of_the_calls_and_once():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(Doubler))
    rows = [DataProto.from_dict({"a": torch.full((2,), value)}) for value in (1, 5)]
    call = SubmittedCall(group, lambda: [group.double.submit(data) for data in rows])
    assert [result.batch["a"].tolist() for result in call.get()] == [[2, 2], [10, 10]]
    assert call.get() == [] and call.end - call.begin < 0.05, "this process had answered before it went on"


def _late(ready_s):
    """Return a group that answers then, and the submission of a call to it."""
    answer = Future()
    group = SimpleNamespace(as_futures=lambda sizes: [answer])

    def fetch(references):
        time.sleep(ready_s)
        answer.set_result(1)
        return references

    rows = DataProto.from_dict({"a": torch.ones(1)})
    return group, lambda: [DataProtoFuture(concat_shards, [rows], fetch=fetch, sizes=[1])]


def test_a_call_begins_when_its_processes_have_answered_the_one_before():
    first = SubmittedCall(*_late(0.1))
    second = SubmittedCall(*_late(0.05), after=first)
    assert second.begin < first.begin + 0.05, "both are submitted at once"
    first.get()
    second.get()
    assert second.begin == first.end >= first.begin + 0.1
    assert 0.05 <= second.end - second.begin < 0.15
