"""On Ray, restarted workers are forks of their node's standby process; without one they start all the same."""

import os
import signal
import time

import pytest

from hybridrl.single_controller.cluster import actor_names
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.standby.standbys import Standbys
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.single_controller.processes.standby.test_process import is_running
from tests.support.single_controller.sample_workers import Adder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]
TIMEOUT_S = 120.0


@pytest.fixture
def group():
    with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1)) as group:
        yield group


@pytest.fixture
def standbys(group):
    run = group.worker_names[0].partition("/")[0]
    group.processes.standbys = found = Standbys(run, detached=False)
    yield found
    found.stop()


def wait_until(condition):
    until = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {TIMEOUT_S:g} s"
        time.sleep(0.05)
    return value


def start_one(standbys, group):
    """Return the id of the ready standby process, which is started if there is none."""
    standbys.start_missing([group.processes])
    return wait_until(standbys.process_ids)[0]


def parents(group):
    """Return the parent of every worker; 1 or that of an orphan if it has ended."""
    return [int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]) for pid in group.process_ids]


def test_all_ranks_are_forks_of_one_standby_process_again_and_again(group, standbys):
    standby = start_one(standbys, group)
    assert standby not in parents(group)  # they have started before it
    for _ in range(2):
        group.rebuild()
        assert parents(group) == [standby] * 2
        assert [rank for rank, _, _ in group.rank_and_pid()] == [0, 1]
    group.respawn(1)
    assert parents(group) == [standby] * 2 and start_one(standbys, group) == standby
    standbys.stop()
    wait_until(lambda: not is_running(standby))
    assert [pid for _, _, pid in group.rank_and_pid()] == group.process_ids  # the workers stay


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_process_that_is_lost_or_stopped_is_no_loss(group, standbys, sent):
    standby = start_one(standbys, group)
    os.kill(standby, sent)
    if sent == signal.SIGKILL:
        wait_until(lambda: not is_running(standby))
    group.rebuild()
    assert standby not in parents(group)
    if sent == signal.SIGKILL:
        assert wait_until(lambda: standbys.start_missing([group.processes]) or standbys.process_ids()) != [standby]
    standbys.stop()
    wait_until(lambda: not is_running(standby))
    run = group.worker_names[0].partition("/")[0]
    wait_until(lambda: not actor_names(f"{run}/standby-"))


def test_roles_with_a_python_of_their_own_or_other_variables_start_without_it(group, standbys):
    start_one(standbys, group)
    node, options = group.processes.nodes[0], dict(group.processes.actor_options)
    assert "py_executable" in standbys.options(node, options)["runtime_env"]
    for changed in (
        options | {"num_cpus": 2},
        options | {"runtime_env": {"env_vars": {"OTHER": "1"}}},
        options | {"runtime_env": {"py_executable": "python"}},
    ):
        assert standbys.options(node, changed) == changed
    assert standbys.options("another node", options) == options
