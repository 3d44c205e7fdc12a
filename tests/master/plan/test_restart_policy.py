"""Which processes are restarted together, and how often: tables and sums, no processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import ConfigError
from hybridrl.failure_policy import Budgets, Failure, FailureKind
from hybridrl.master.jobs.builder import RLJob, RLJobBuilder
from hybridrl.master.plan.restart_policy import downstream, restart_report, restart_set
from hybridrl.master.plan.spec import EdgeSpec, RoleSpec
from hybridrl.master.state.events import JobStarted, Kind, RecoveryNeeded, WorkerFailed, WorkerJoined
from hybridrl.master.state.reducer import JobState, reduce
from hybridrl.master.state.tables import JOB_ENDS

A = "tests.support.master.sample_job:Adder"
NODES = ["n0", "n0", "n1", "n1", "n2"]
POSITIONS = [0, 0, 1, 1, 2]
RACKS = {"n0": {"rack": "a"}, "n1": {"rack": "b"}, "n2": {"rack": "a"}}


def role(restart, label=""):
    return RoleSpec("r", "p", (2, 2, 1), restart=restart, restart_label=label)


def restarted(restart, lost, *, label="", labels=RACKS):
    return restart_set(role(restart, label), lost, nodes=NODES, labels=labels, positions=POSITIONS)


def test_the_restart_set_is_the_process_its_node_or_its_role():
    assert restarted("process", [3, 0]) == [0, 3]
    assert restarted("node", [3]) == [2, 3] and restarted("node", [4, 0]) == [0, 1, 4]
    assert restarted("role", [4]) == [0, 1, 2, 3, 4]


def test_machines_with_one_label_value_are_one_node_and_those_without_it_are_as_described():
    assert restarted("node", [4], label="rack") == [0, 1, 4]  # both are in rack a
    assert restarted("node", [2], label="rack") == [2, 3]
    assert restarted("node", [2], label="row") == [2, 3]
    assert restarted("node", [4], label="rack", labels={"n0": {"rack": "a"}}) == [4]


@given(
    st.sampled_from(["process", "node", "role"]),
    st.sets(st.integers(0, 4), min_size=1),
    st.sampled_from(["", "rack", "row"]),
)
def test_lost_ranks_are_restarted_and_a_wider_set_contains_the_narrower(restart, lost, label):
    ranks = restarted(restart, lost, label=label)
    assert lost <= set(ranks) and ranks == sorted(set(ranks))
    assert set(restarted("process", lost)) <= set(restarted("node", lost, label=label)) <= set(restarted("role", lost))


def test_downstream_of_a_role_is_all_that_its_data_and_weights_reach():
    edges = [EdgeSpec(*edge) for edge in (("weights", "a", "r"), ("feeds", "r", "a"), ("feeds", "a", "r"))]
    edges += [EdgeSpec("feeds", "r", "w"), EdgeSpec("feeds", "x", "a")]
    assert downstream(edges, "a") == ["r", "w"] and downstream(edges, "r") == ["a", "w"]
    assert downstream(edges, "x") == ["a", "r", "w"] and downstream(edges, "w") == []


def test_a_role_survives_max_restart_losses_and_healthy_steps_reset_the_count():
    budgets = Budgets({"a": 2, "b": 0})

    def survives(role, what):
        return budgets.spend(Failure(FailureKind.PROCESS_LOST, what, subject=role)).is_granted

    assert [survives("a", f"loss {number}") for number in range(4)] == [True, True, False, False]
    assert not survives("b", "gone")
    report = restart_report("a", budgets.of(FailureKind.PROCESS_LOST, "a"))
    assert report.startswith("role 'a' was restarted 2 times, which is the limit of max_restart(2), so the job ends")
    assert report.endswith("the last loss: loss 2 (step 0); before it: loss 0 (step 0); loss 1 (step 0)")
    for step in range(1, 10):
        budgets.on_step(step)
        budgets.on_step(step)  # reported twice
    assert not survives("a", "too early")
    for step in range(10, 20):
        budgets.on_step(step)
    assert survives("a", "afterwards")
    assert budgets.of(FailureKind.PROCESS_LOST, "a").failures == ["afterwards (step 19)"]


def test_restart_options_of_a_role_are_kept_in_the_spec():
    builder = RLJobBuilder().trainer(A).max_restart(3).actor(A).max_restart(0).rollout(A).total(4).per_node(2)
    builder.enable_node_group_failover("rack", timeout=60)
    job = builder.reward(A).reference(A).restart("process").build()
    assert [(one.name, one.restart, one.max_restart) for one in job.spec.roles] == [
        ("actor", "role", 0),
        ("rollout", "node", 10),
        ("reward", "process", 10),  # reward and rollout processes do not communicate
        ("reference", "process", 10),
    ]
    assert (
        job.spec.role("rollout").restart_label,
        job.spec.role("rollout").restart_timeout_s,
        job.spec.trainer.max_restart,
    ) == (
        "rack",
        60.0,
        3,
    )
    assert RLJob.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (
            lambda b: b.max_restart(-1),
            "role 'actor': max_restart=-1 must be a whole number; 0 ends the job at the first loss",
        ),
        (
            lambda b: b.restart("all"),
            "role 'actor': restart.'all'. is unknown; known are role, node, process, downstream",
        ),
        (lambda b: b.enable_node_group_failover(timeout=0), "timeout=0. must be more than 0 seconds"),
    ],
)
def test_wrong_restart_options_are_refused(describe, message):
    with pytest.raises(ConfigError, match=message):
        describe(RLJobBuilder().actor(A))


def test_a_master_ends_no_job_whose_processes_somebody_restarts():
    state, _ = reduce(JobState(), JobStarted("j", "j-1", restarts_workers=True))
    for pid in range(1, 50):
        state, _ = reduce(state, WorkerJoined("a-0", "j-1/a-0", pid, "node"))
        state, effects = reduce(state, WorkerFailed(Kind.DIED, "a-0", pid, "killed"))
        assert state.state not in JOB_ENDS and effects == (RecoveryNeeded("a-0", "a-0: killed"),)
