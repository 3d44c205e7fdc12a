"""Who is started again with whom, and how often: tables and sums, no processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.builder import RLJob, RLJobBuilder
from hybridrl.master.jobs.restart_policy import Budgets, started_with
from hybridrl.master.jobs.spec import RoleSpec
from hybridrl.master.state.events import Begun, Failed, Joined, Kind, Level, Recover
from hybridrl.master.state.reducer import JobState, reduce
from hybridrl.master.state.tables import JOB_ENDS

A = "tests.support.master.sample_job:Adder"
NODES = ["n0", "n0", "n1", "n1", "n2"]
PLACES = [0, 0, 1, 1, 2]
RACKS = {"n0": {"rack": "a"}, "n1": {"rack": "b"}, "n2": {"rack": "a"}}


def role(restart, label=""):
    return RoleSpec("r", "p", (2, 2, 1), restart=restart, restart_label=label)


def started(restart, lost, *, label="", labels=RACKS):
    return started_with(role(restart, label), lost, nodes=NODES, labels=labels, places=PLACES)


def test_who_is_started_again_is_the_process_its_node_or_its_role():
    assert started("process", [3, 0]) == [0, 3]
    assert started("node", [3]) == [2, 3] and started("node", [4, 0]) == [0, 1, 4]
    assert started("role", [4]) == [0, 1, 2, 3, 4]


def test_machines_with_the_same_label_are_one_node_and_those_without_it_are_as_described():
    assert started("node", [4], label="rack") == [0, 1, 4]  # both are in rack a
    assert started("node", [2], label="rack") == [2, 3]
    assert started("node", [2], label="row") == [2, 3]
    assert started("node", [4], label="rack", labels={"n0": {"rack": "a"}}) == [4]


@given(
    st.sampled_from(["process", "node", "role"]),
    st.sets(st.integers(0, 4), min_size=1),
    st.sampled_from(["", "rack", "row"]),
)
def test_who_is_lost_is_started_again_and_a_wider_circle_holds_the_narrower(restart, lost, label):
    ranks = started(restart, lost, label=label)
    assert lost <= set(ranks) and ranks == sorted(set(ranks))
    assert set(started("process", lost)) <= set(started("node", lost, label=label)) <= set(started("role", lost))


def test_a_role_survives_as_many_losses_as_it_says_and_steps_that_go_well_make_up_for_them():
    budgets = Budgets({"a": 2, "b": 0})
    assert [budgets.take("a", f"loss {number}") for number in range(4)] == [True, True, False, False]
    assert not budgets.take("b", "gone")
    assert budgets.report("a").endswith("the last loss: loss 2 (step 0); before it: loss 0 (step 0); loss 1 (step 0)")
    for step in range(1, 10):
        budgets.stepped(step)
        budgets.stepped(step)  # told twice
    assert not budgets.take("a", "too early")
    for step in range(10, 20):
        budgets.stepped(step)
    assert budgets.take("a", "afterwards") and budgets.losses["a"] == ["afterwards (step 19)"]


def test_what_a_role_says_about_losses_is_kept_in_its_description():
    builder = RLJobBuilder().trainer(A).max_restart(3).actor(A).max_restart(0).rollout(A).total(4).per_node(2)
    builder.enable_node_group_failover("rack", timeout=60)
    job = builder.reward(A).reference(A).restart("process").build()
    assert [(one.name, one.restart, one.max_restart) for one in job.spec.roles] == [
        ("actor", "role", 0),
        ("rollout", "node", 10),
        ("reward", "process", 10),  # who judges or generates does not talk to its peers
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
        (lambda b: b.restart("all"), "role 'actor': restart.'all'. is not known; there are role, node, process"),
        (lambda b: b.enable_node_group_failover(timeout=0), "timeout=0. must be more than 0 seconds"),
    ],
)
def test_what_cannot_be_right_is_refused(describe, message):
    with pytest.raises(ConfigError, match=message):
        describe(RLJobBuilder().actor(A))


def test_a_master_ends_no_job_that_limits_itself():
    state, _ = reduce(JobState(), Begun("j", "j-1", levels=(Level.ROLE,), limits_itself=True))
    for pid in range(1, 50):
        state, _ = reduce(state, Joined("a-0", "j-1/a-0", pid, "node"))
        state, effects = reduce(state, Failed(Kind.DIED, "a-0", pid, "killed"))
        assert state.state not in JOB_ENDS and [effect.level for effect in effects if isinstance(effect, Recover)] == [
            Level.ROLE
        ]
