from hybridrl.master.health.hang_diagnosis import Activity, all_in_one_method, compare_stacks, find_culprit


def activity(slot, method=None, elapsed_s=100.0, last_method=None, call_number=7):
    return Activity(slot, method, elapsed_s, last_method, call_number)


def test_the_idle_rank_blocks_those_that_wait_in_a_method():
    found = find_culprit(
        [activity("actor-0", "actor.update"), activity("actor-1"), activity("actor-2", "actor.update")], threshold_s=60
    )
    assert (found.culprit, found.waiting) == ("actor-1", ("actor-0", "actor-2"))
    assert found.evidence == "it is idle for 100 s, while actor-0, actor-2 wait in actor.update"


def test_a_rank_in_another_method_blocks_the_others_too():
    ranks = [
        activity("actor-0", "actor.update"),
        activity("actor-1", "actor.update"),
        activity("actor-2", "actor.save"),
    ]
    assert find_culprit(ranks, threshold_s=60).culprit == "actor-2"


def test_a_rank_that_finished_a_method_does_not_block_the_one_still_in_it():
    still, done = (
        activity("rollout-0", "rollout.generate", 100),
        activity("rollout-1", None, 70, last_method="rollout.generate"),
    )
    found = find_culprit([still, done], threshold_s=60)
    assert (found.culprit, found.waiting, found.method) == ("rollout-0", ("rollout-1",), "rollout.generate")
    assert found.evidence == "it is in rollout.generate for 100 s, which rollout-1 finished 70 s ago or earlier"
    ended_before = activity(
        "rollout-1", None, 99, last_method="rollout.generate", call_number=6
    )  # the call before this one
    assert find_culprit([still, ended_before], threshold_s=60).culprit == "rollout-1"
    assert find_culprit([still, done, activity("rollout-2")], threshold_s=60).culprit == "rollout-2"
    assert (
        find_culprit([still, activity("rollout-2", "rollout.generate", 90), done], threshold_s=60) is None
    )  # only stacks could show it


def test_there_is_no_culprit_below_the_threshold_or_when_all_are_in_one_method():
    assert find_culprit([activity("actor-0", "actor.update", 59), activity("actor-1")], threshold_s=60) is None
    alike = [activity("actor-0", "actor.update"), activity("actor-1", "actor.update")]
    assert find_culprit(alike, threshold_s=60) is None
    assert all_in_one_method(alike, threshold_s=60) == tuple(alike)
    assert all_in_one_method(alike, threshold_s=101) == ()


def test_roles_do_not_wait_for_each_other():
    assert find_culprit([activity("actor-0", "actor.update"), activity("critic-0")], threshold_s=60) is None


def test_the_trainer_is_the_culprit_when_all_workers_are_idle():
    ranks = [activity("trainer", "reward"), activity("actor-0"), activity("actor-1")]
    assert find_culprit(ranks, threshold_s=60).culprit == "trainer"
    assert find_culprit([*ranks, activity("critic-0", "critic.update", 1)], threshold_s=60) is None


def dump(*lines):
    idle = 'Thread 0x01 (most recent call first):\n  File "threading.py", line 5 in wait\n'
    mine = "Current thread 0x02 (most recent call first):\n" + "\n".join(
        f'  File "{path}", line {n} in {name}' for path, n, name in lines
    )
    return f"{idle}\n{mine}\n"


def test_the_one_outside_of_the_collective_is_the_culprit():
    waits = dump(("torch/distributed/distributed_c10d.py", 10, "all_reduce"), ("actor.py", 3, "update"))
    sleeps = dump(("data.py", 7, "read"), ("actor.py", 2, "update"))
    found = compare_stacks({"actor-0": waits, "actor-1": sleeps}, method="actor.update")
    assert found.culprit == "actor-1"
    assert "data.py:7 in read" in found.evidence and "distributed_c10d.py:10 in all_reduce" in found.evidence


def test_a_collective_that_calls_deeper_into_torch_is_one_and_a_call_of_torch_from_elsewhere_is_none():
    waits = dump(
        ("site-packages/torch/_ops.py", 882, "redispatch"),
        ("site-packages/torch/distributed/_functional_collectives.py", 142, "wait_tensor"),
        ("engine.py", 3, "full_tensor"),
        ("actor.py", 2, "update"),
    )
    computes = dump(
        ("site-packages/torch/nn/modules/linear.py", 125, "forward"),
        ("model.py", 7, "forward"),
        ("site-packages/torch/distributed/fsdp/_state.py", 9, "hook"),
        ("actor.py", 2, "update"),
    )
    assert compare_stacks({"actor-0": waits, "actor-1": computes}, method="actor.update").culprit == "actor-1"


def test_with_all_in_the_same_place_stacks_name_nobody():
    same = dump(("actor.py", 2, "update"))
    assert compare_stacks({"actor-0": same, "actor-1": same, "actor-2": same}, method="actor.update") is None
