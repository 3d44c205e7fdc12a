"""Which devices the processes of a job see: their own, or those of the role's processes on their node.

The devices do not exist; Ray accounts for them, and the test reads the variables that CUDA would read.
"""

import subprocess
import sys

import pytest

from hybridrl.errors import PlacementError
from hybridrl.single_controller.processes.host_start import node_devices
from hybridrl.single_controller.processes.worker_host import device_variables

pytestmark = pytest.mark.timeout(600)


def seen(*names):
    """Job -> the words of each of its processes."""
    driver = [sys.executable, "-m", "tests.support.master.device_jobs", *names]
    run = subprocess.run(driver, capture_output=True, text=True, timeout=560)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.split(" | ") for line in run.stdout.splitlines() if " | " in line]  # Ray also prints
    assert [name for name, *_ in lines] == list(names)
    return {name: [answer.split() for answer in answers] for name, *answers in lines}


@pytest.mark.slow
def test_a_torchrun_style_program_finds_its_device_at_its_local_rank():
    jobs = seen("own", "disabled", "enabled", "rank_based")
    for name in ("own", "enabled"):
        assert [own == visible for _, own, visible in jobs[name]] == [True] * 4  # one device, cuda:0
    for name in ("disabled", "rank_based"):
        lists = []
        for local_rank, own, visible in jobs[name]:
            assert visible.split(",")[int(local_rank)] == own  # torch.cuda.set_device(LOCAL_RANK)
            lists.append(visible)
        assert [local_rank for local_rank, _, _ in jobs[name]] == ["0", "1", "0", "1"]
        assert lists[0] == lists[1] != lists[2] == lists[3]  # two nodes of the role, here on one machine
        assert sorted(",".join(lists[::2]).split(",")) == sorted({own for _, own, _ in jobs[name]})


@pytest.mark.slow
def test_shared_devices_are_refused_and_a_restarted_process_sees_its_node_again():
    jobs = seen("shared", "restarted")
    [refusal] = jobs["shared"]
    text = " ".join(refusal)
    assert "r-1 shares GPU" in text and "give each process a whole one with resource(accelerator=1)" in text
    [[*words]] = jobs["restarted"]
    before, after = " ".join(words[:2]), " ".join(words[2:])
    assert before == after and "," in words[0].strip("[',")


def test_the_devices_of_a_node_are_in_the_order_of_its_local_ranks():
    reserved = [{"GPU": ["5"], "TPU": []}, {"GPU": ["0"]}, {"GPU": ["3"]}, {"GPU": ["2"]}]
    first, second, third, fourth = node_devices(reserved, ["a", "a", "b", "b"], label="r")
    assert first["GPU"] == second["GPU"] == ["5", "0"] and third["GPU"] == fourth["GPU"] == ["3", "2"]
    assert device_variables(first) == {"CUDA_VISIBLE_DEVICES": "5,0", "HIP_VISIBLE_DEVICES": "5,0"}
    assert device_variables({"NPU": ["1", "0"]}) == {"ASCEND_RT_VISIBLE_DEVICES": "1,0"} and device_variables({}) == {}


def test_processes_that_share_a_device_have_none_of_their_local_rank():
    with pytest.raises(PlacementError, match="r-1 shares GPU 5 .*role.*accelerator=1"):
        node_devices([{"GPU": ["5"]}, {"GPU": ["5"]}], ["a", "a"], label="r")
    node_devices([{"GPU": ["5"]}, {"GPU": ["5"]}], ["a", "b"], label="r")
