"""Parallel on a real Ray cluster: events between processes, failures and restarts."""

import os
import signal
import threading
import time

import pytest

from hybridrl.errors import PlacementError, WorkerLost
from hybridrl.framework import Parallel, Role, Task
from hybridrl.framework.parallel.group_member import GroupMember
from hybridrl.framework.parallel.runner import topology_links
from tests.support.framework import programs

pytestmark = pytest.mark.usefixtures("ray_cluster")


def slow(*values):
    """A case of which `make test` has others: its processes take seconds to start."""
    return pytest.param(*values, marks=pytest.mark.slow)


def actors_left():
    import ray

    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "/node-" in actor["name"]]


@pytest.fixture(autouse=True)
def nothing_leaks():
    yield
    assert actors_left() == []


# -- processes and labels


def test_each_process_has_its_node_id_and_its_labels(monkeypatch):
    monkeypatch.setenv("HYBRIDRL_TASK_LABELS", "spot")
    results = Parallel.runner(2, topology="alone", labels={"gpu"}, node_ids=[5, 7])(programs.facts)
    assert [result[:3] for result in results] == [(True, True, 5), (True, True, 7)]
    assert results[1][3] == ["distributed", "gpu", "node.7", "own", "spot"]
    assert len({os.getpid(), *(result[4] for result in results)}) == 3


def test_a_single_process_is_the_calling_one_and_runs_standalone():
    assert Parallel.runner(1, labels={"ignored"})(programs.facts) == [
        (True, False, 0, ["own", "standalone"], os.getpid())
    ]


def test_a_single_process_restarts_main_in_place():
    attempts = []

    def main(limit):
        attempts.append(Parallel().retries)
        if len(attempts) < limit:
            raise OSError("flaky")

    Parallel.runner(1, auto_recover=True)(main, 3)
    assert attempts == [0, 1, 2]
    with pytest.raises(OSError, match="flaky"):
        Parallel.runner(1, auto_recover=True, max_retries=1)(main, 100)


def test_a_function_of_the_script_itself_runs_with_its_arguments():
    base = 10

    def main(a, *, b):
        return a + b + base + Parallel().node_id

    assert Parallel.runner(2)(main, 1, b=2) == [13, 14]


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("mesh", {4: [5, 6], 5: [4, 6], 6: [4, 5]}),
        ("star", {4: [5, 6], 5: [4], 6: [4]}),
        ("alone", {4: [], 5: [], 6: []}),
    ],
)
def test_topologies(topology, expected):
    assert topology_links([4, 5, 6], topology) == expected


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        slow("mesh", [[1, 2], [0, 2], [0, 1]]),
        ("star", [[1, 2], [0], [0]]),
        slow("alone", [[]] * 3),
    ],
)
def test_the_topology_decides_which_peers_receive_events(topology, expected):
    assert Parallel.runner(3, topology=topology)(programs.received_from) == expected


# -- messages


@pytest.mark.parametrize("late", [slow(0.0), 0.5])
def test_no_message_is_lost_and_those_of_each_sender_arrive_in_order(late):
    for node, received in enumerate(Parallel.runner(3)(programs.greet, 60, late)):
        assert received == {sender: [] if sender == node else list(range(60)) for sender in range(3)}


def test_each_listener_receives_each_event_of_a_peer_once():
    first, second = Parallel.runner(2)(programs.count_events, 20)
    expected = [(1, step) for step in range(len(first["a"]))]
    assert len(expected) == 20 and first["a"] == first["b"] == expected and first["once"] == expected[:1]
    assert first["off"] == second["off"] == [] and second["a"] == second["b"]


def test_a_conversation_never_loses_an_answer():
    assert Parallel.runner(2)(programs.ping_pong, 200)[0] == 199


def test_the_context_of_a_step_reaches_the_peers_and_the_newest_wins():
    seen, newest, finished = Parallel.runner(2, topology="star")(programs.share_context, 30)[1]
    steps = [step for step, _, _ in seen]
    assert steps == sorted(set(steps)) and steps[-1] == newest == 29 and finished
    assert all(train_iter == step + 1 and weight == step for step, train_iter, weight in seen)


@pytest.mark.parametrize(
    ("kind", "topology"), [("ctx", "star"), ("task", "mesh"), slow("ctx", "mesh"), slow("task", "star")]
)
def test_a_process_that_finishes_ends_the_run_of_all(kind, topology):
    steps = Parallel.runner(3, topology=topology)(programs.finish_by, kind)
    assert steps[1] == 3 and max(steps) < 10_000


def test_roles_and_labels_give_each_process_its_stages():
    assert Parallel.runner(2, topology="alone")(programs.by_role) == ["learner", "collector"]
    assert Task().has_role(Role.LEARNER)


def test_a_process_without_stages_ends_at_once_and_ends_no_other():
    assert Parallel.runner(3)(programs.only_node_0_has_work) == [9, 0, 0]


# -- failures


@pytest.mark.parametrize(("kind", "error"), [("raise", LookupError), ("kill", WorkerLost), ("exit", RuntimeError)])
def test_a_failed_process_ends_the_group_at_once(kind, error):
    start = time.monotonic()
    with pytest.raises(error) as caught:
        Parallel.runner(2)(programs.fail, kind, 1)
    assert time.monotonic() - start < 100, "the other would have run for 1000 s"
    assert "node-1" in caught.value.__notes__[-1]
    if kind == "raise":
        assert "programs.py" in caught.value.__notes__[-1] and "no such thing" in str(caught.value)
    if kind == "kill":
        assert caught.value.rank == 1 and "node-1 was lost while running main()" in str(caught.value)
    if kind == "exit":
        assert "sys.exit(3)" in str(caught.value)


@pytest.mark.parametrize("kind", [slow("raise"), "kill"])
def test_a_failed_process_restarts_and_reconnects_to_its_peers(kind):
    (retries, received, _), (retries_1, _, process) = Parallel.runner(2, auto_recover=True)(programs.recover, kind)
    assert (retries, retries_1) == (0, 1) and received == [process], "the peer receives events of the restarted process"


@pytest.mark.slow
def test_retries_are_counted_over_exceptions_and_deaths():
    with pytest.raises(LookupError):
        Parallel.runner(2, auto_recover=True, max_retries=2)(programs.fail, "raise", 1, 5)
    with pytest.raises(WorkerLost):
        Parallel.runner(2, auto_recover=True, max_retries=1)(programs.fail, "kill", 1, 5)
    (_, first), (_, second) = Parallel.runner(2, auto_recover=True, max_retries=2)(programs.fail, "kill", 1, 2)
    assert (first, second) == (0, 2)


def test_a_listeners_exception_ends_the_process_that_listens():
    with pytest.raises(LookupError, match="cannot handle 7") as caught:
        Parallel.runner(2)(programs.fail_in_listener)
    assert any("node-1" in note for note in caught.value.__notes__)
    assert "in a listener of the event 'e' of a peer" in caught.value.__notes__


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        (programs.emit_unpicklable, "cannot send its event 'e'"),
        (programs.send_unpicklable_context, "its 'reader' cannot be pickled; remove it"),
    ],
)
def test_what_cannot_be_pickled_is_named(program, hint):
    with pytest.raises(TypeError, match="generator") as caught:
        Parallel.runner(2)(program)
    assert any(hint in note for note in caught.value.__notes__)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt here, also in a test run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["raise", "interrupt"])
def test_exit_hooks_and_finally_blocks_of_the_others_run_when_the_group_ends(kind, tmp_path, ctrl_c):
    def interrupt():
        programs.wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    if kind == "interrupt":
        threading.Thread(target=interrupt, daemon=True).start()
    expected = {"hook-0", "finally-0", "finally-2"} | ({"hook-1", "finally-1"} if kind == "interrupt" else set())
    started = time.monotonic()
    with pytest.raises(LookupError if kind == "raise" else KeyboardInterrupt):
        Parallel.runner(3, exit_timeout_s=120)(programs.end_with_the_group, tmp_path, kind)
    assert time.monotonic() - started < 50, "a process without a task is interrupted at once, not after half the limit"
    assert {path.name for path in tmp_path.glob("[hf]*-*")} == expected


def test_a_process_prints_under_its_name():
    assert repr(GroupMember("learners/node-0")) == "learners/node-0"


def test_a_process_that_does_not_end_in_time_is_killed_and_named():
    with pytest.raises(LookupError) as caught:
        Parallel.runner(2, exit_timeout_s=0.2)(programs.fail_beside_a_sleeper)
    assert any("node-0 did not end within 0.2 s" in note for note in caught.value.__notes__)


def test_a_stopped_peer_stops_no_other_and_then_receives_all_events_and_the_newest():
    state, (weights, counts, step) = Parallel.runner(2)(programs.emit_to_a_stopped_peer, 500)
    assert state == "T" and counts == list(range(500)) and step == weights[-1] == 499
    assert len(weights) < 10, "an event with newest_only replaces one that waits"


def test_a_loop_by_hand_sends_its_contexts_and_its_end():
    (steps, _), (_, received) = Parallel.runner(2)(programs.loop_by_hand, 5)
    assert steps == 5 and received[-1] == 4, "the second halves of the last step have run"


def test_peers_call_functions_by_the_names_of_the_older_version():
    assert Parallel.runner(2)(programs.call_by_name) == [([1], 0), ([0], 0)]


# -- attached groups


def test_a_group_waits_for_the_one_it_attaches_to_and_gets_its_newest_context(caplog):
    results = {}
    joining = Parallel.runner(1, name="collectors", attach_to=["learners"])
    second = threading.Thread(target=lambda: results.update(b=joining(programs.collector)))
    second.start()
    programs.wait_until(lambda: "waiting up to 60 s for attach_to='learners'" in caplog.text)
    results["a"] = Parallel.runner(1, name="learners")(programs.learner, 5)
    second.join(timeout=60)
    [(name, received)], [(train_iter, attached_to)] = results["a"], results["b"]
    assert name == "learners/node-0" and attached_to == ("learners/node-0",)
    assert received == [0, 1, 2, 3, 4] and train_iter >= 1


def test_attaching_to_a_missing_group_ends_with_the_running_ones_and_a_hint():
    with pytest.raises(PlacementError, match="attach_to='learners' is not running on this cluster") as caught:
        Parallel.runner(1, attach_to=["learners"], attach_timeout_s=0.1)(programs.facts)
    assert "there are no groups" in str(caught.value) and "RAY_ADDRESS" in str(caught.value)


def test_a_second_group_of_one_name_is_refused_and_the_first_continues():
    results = {}
    first = threading.Thread(target=lambda: results.update(a=Parallel.runner(1, name="same")(programs.start_slowly, 6)))
    first.start()
    programs.wait_until(actors_left)
    with pytest.raises(PlacementError, match="choose another name="):
        Parallel.runner(1, name="same")(programs.facts)
    first.join(timeout=60)
    assert len(results["a"]) == 1


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"topology": "ring"}, ValueError, "topology='ring' is unknown; use one of mesh, star, alone"),
        ({"n_parallel_workers": 0}, ValueError, "n_parallel_workers=0"),
        ({"node_ids": [1, 1]}, ValueError, "must be 2 different numbers"),
        ({"node_ids": [1]}, ValueError, "must be 2 different numbers"),
        ({"mq_type": "redis"}, ValueError, "not through a broker"),
        ({"redis_host": "localhost"}, ValueError, "not through a broker"),
        ({"attach_to": ["tcp://127.0.0.1:50515"]}, ValueError, "is an address"),
        ({"attach_to": "learners"}, TypeError, "write a list"),
        ({"prots": [1]}, TypeError, "no argument 'prots'"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        Parallel.runner(**{"n_parallel_workers": 2} | arguments)


def test_socket_arguments_are_ignored_with_a_log_line(caplog):
    Parallel.runner(2, mq_type="nng", protocol="tcp", address="127.0.0.1", ports=50515, startup_interval=1)
    assert "ignores protocol, address, ports, startup_interval" in caplog.text
