import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.master.state.events import (
    CheckpointCommitted,
    JobEnded,
    JobStarted,
    KillProcess,
    Kind,
    NotifyTrainer,
    RanksChanged,
    RecoveryDecided,
    RecoveryNeeded,
    ReleaseJob,
    StepCompleted,
    StopRequested,
    StopTrainer,
    WarningRaised,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerRecovered,
    WorkerReplaced,
    WorkerSilent,
    decode,
    encode,
)
from hybridrl.master.state.reducer import JobState, from_json, reduce, to_json, unfinished_effects
from hybridrl.master.state.tables import JOB_ENDS, JobPhase, RolePhase, WorkerPhase

SLOTS = ("trainer", "actor-0", "actor-1", "rollout-0")
PIDS = {slot: 100 + i for i, slot in enumerate(SLOTS)}


def fold(events, state=None):
    """Return the state after the events, and the effects of the last one."""
    state, effects = state or JobState(), ()
    for event in events:
        state, effects = reduce(state, event)
    return state, effects


def join(slot, pid=None):
    return WorkerJoined(slot, f"run/{slot}", pid or PIDS[slot], "node", group_size=2 if slot.startswith("actor") else 1)


def running(*, restarts_workers=True, restarts_driver=True):
    start = JobStarted(
        "job",
        "run",
        {"actor": 2, "rollout": 1},
        replicas=("rollout",),
        restarts_workers=restarts_workers,
        restarts_driver=restarts_driver,
    )
    return fold([start, *map(join, SLOTS), StepCompleted(0)])[0]


def died(slot, pid=None, evidence="killed by SIGKILL"):
    return WorkerFailed(Kind.DIED, slot, pid or PIDS[slot], evidence)


def test_a_role_is_ready_when_all_its_processes_have_joined():
    start = JobStarted("job", "run", {"actor": 2})
    assert fold([start, join("actor-0")])[0].roles == {"actor": RolePhase.STARTING}
    assert fold([start, join("actor-0"), join("actor-1")])[0].roles == {"actor": RolePhase.READY}
    assert running().state == JobPhase.RUNNING


def test_the_newest_metrics_are_kept_until_others_are_reported():
    state, _ = fold([StepCompleted(1, {"score": 0.5}), StepCompleted(2)], running())
    assert (state.step, state.metrics) == (2, {"score": 0.5}) and from_json(to_json(state)) == state
    assert fold([StepCompleted(2, {"score": 0.75, "kl": 1.0})], state)[0].metrics == {"score": 0.75, "kl": 1.0}


def test_a_process_that_its_supervisor_replaces_is_no_failure():
    state, _ = fold([WorkerReplaced("actor-0", PIDS["actor-0"]), died("actor-0")], running())
    assert (state.failures, state.state, state.workers["actor-0"].state) == ((), JobPhase.RUNNING, WorkerPhase.STARTING)
    state, _ = reduce(state, join("actor-0", 200))
    assert (state.workers["actor-0"].state, state.workers["actor-0"].incarnation) == (WorkerPhase.ALIVE, 2)
    assert reduce(state, WorkerReplaced("actor-0", PIDS["actor-0"]))[0] == state  # of the process before
    assert reduce(state, died("actor-0", 200))[0].failures != ()


def test_the_driver_of_a_submitted_job_is_its_supervisor_and_the_trainer_a_worker():
    started = JobStarted("job", "run", restarts_workers=True, restarts_driver=True, driver="supervisor")
    slots = {"supervisor": 1, "trainer-0": 2}
    state, _ = fold([started, *(WorkerJoined(slot, f"run/{slot}", pid, "node") for slot, pid in slots.items())])
    lost, effects = reduce(state, died("supervisor", 1))
    assert effects == (RecoveryNeeded("supervisor", "supervisor: killed by SIGKILL"),)
    assert unfinished_effects(lost) == (RecoveryNeeded("supervisor", "killed by SIGKILL"),)
    stopping, effects = reduce(state, StopRequested("asked"))
    assert effects == (StopTrainer("asked"),)
    assert fold([died("trainer-0", 2)], stopping)[0].state == JobPhase.STOPPING
    assert fold([died("supervisor", 1)], stopping)[0].state == JobPhase.STOPPED


def test_a_lost_replica_is_restarted_and_the_job_has_recovered_when_it_rejoins():
    state, effects = reduce(running(), died("rollout-0"))
    assert effects == (RecoveryNeeded("rollout-0", "rollout-0: killed by SIGKILL"),)
    assert (state.state, state.roles["rollout"]) == (JobPhase.RECOVERING, RolePhase.DEGRADED)
    state, _ = reduce(state, join("rollout-0", 200))
    assert (state.state, state.roles["rollout"], state.workers["rollout-0"].incarnation) == (
        JobPhase.RUNNING,
        RolePhase.READY,
        2,
    )


def test_a_lost_rank_of_a_communicating_group_takes_the_whole_role():
    state, (effect,) = reduce(running(), died("actor-1"))
    assert effect == RecoveryNeeded("actor-1", "actor-1: killed by SIGKILL")
    assert state.roles["actor"] == RolePhase.REBUILDING
    state, effects = reduce(state, died("actor-0"))  # a rebuild kills the healthy peer, which is no failure
    assert (effects, len(state.failures)) == ((), 1)
    state, _ = fold([join("actor-0", 201)], state)
    assert state.state == JobPhase.RECOVERING
    state, _ = fold([join("actor-1", 202)], state)
    assert (state.state, state.roles["actor"]) == (JobPhase.RUNNING, RolePhase.READY)


def test_a_single_replaced_rank_makes_its_role_ready():
    state, _ = fold([died("actor-1"), join("actor-1", 202)], running())
    assert (state.state, state.roles["actor"]) == (JobPhase.RUNNING, RolePhase.READY)


def join_as(slot, pid, *, group_size):
    return WorkerJoined(slot, f"run/{slot}", pid, "node", group_size=group_size)


def test_a_job_goes_on_with_fewer_ranks_and_takes_them_back():
    fewer = RanksChanged({"actor": 1, "rollout": 1}, "a machine is missing; all roles start again with 1 of 2 ranks")
    state, effects = fold([died("actor-1"), fewer], running())
    assert (effects, state.decisions) == ((), (f"step 0: {fewer.text}",)) and decode(encode(fewer)) == fewer
    state, _ = fold([died("actor-0"), died("rollout-0")], state)  # the trainer ended them: no failures
    assert (len(state.failures), state.state, set(state.roles.values())) == (1, "recovering", {"rebuilding"})
    state, _ = fold([join_as("actor-0", 200, group_size=1), join("rollout-0", 201)], state)
    assert (state.state, set(state.roles.values())) == (JobPhase.RUNNING, {RolePhase.READY})
    assert state.workers["actor-1"].state == WorkerPhase.ENDED
    all_again = RanksChanged({"actor": 2, "rollout": 1}, "machines for missing ranks are there again")
    state, _ = fold([all_again, join_as("actor-0", 300, group_size=2)], state)
    assert state.roles["actor"] == RolePhase.REBUILDING
    state, _ = fold([join_as("actor-1", 301, group_size=2), join("rollout-0", 302)], state)
    assert (state.state, set(state.roles.values())) == (JobPhase.RUNNING, {RolePhase.READY})
    assert state.workers["actor-0"].incarnation == 3
    assert fold([died("actor-1", 301)], state)[0].state == JobPhase.RECOVERING  # from now on a loss is one again


def test_the_first_loss_ends_a_job_that_restarts_nothing():
    for lost, options in (("actor-0", {"restarts_workers": False}), ("trainer", {"restarts_driver": False})):
        state, effects = reduce(running(**options), died(lost))
        assert (state.state, state.reason) == (JobPhase.FAILED, f"{lost}: killed by SIGKILL")
        assert effects == (ReleaseJob(f"{lost}: killed by SIGKILL"),)


def test_the_master_counts_no_losses():
    state = running()
    for number in range(50):
        state, effects = fold([died("rollout-0", state.workers["rollout-0"].pid)], state)
        assert isinstance(effects[0], RecoveryNeeded) and state.state == JobPhase.RECOVERING
        state, _ = fold([join("rollout-0", 300 + number)], state)


def test_a_reported_decision_is_kept_and_changes_nothing_else():
    decided = RecoveryDecided(
        "worker lost", "", "role", "snapshot", "trainer", 1, 3, "actor-0 was lost; the trainer ..."
    )
    state, effects = fold([StepCompleted(7), decided], running())
    assert effects == () and state.decisions == ("step 7: actor-0 was lost; the trainer ...",)
    assert replace(state, decisions=()) == fold([StepCompleted(7)], running())[0]
    assert len(fold([decided] * 50, state)[0].decisions) == 20  # the newest ones
    assert decode(encode(decided)) == decided


def test_an_exception_in_the_journal_of_an_older_version_is_kept_and_decides_nothing():
    old = {"event": "WorkerFailed", "kind": "exception", "slot": "actor-0", "pid": PIDS["actor-0"]}
    raised = decode(old | {"evidence": "ValueError: x", "signature": "ValueError: x"})
    state, effects = fold([raised, raised], running())
    assert (state.state, effects) == (JobPhase.RUNNING, ())
    assert state.failures == ("actor-0 at step 0: ValueError: x",) * 2
    snapshot = to_json(state) | {"last_exception": ["ValueError: x", 0]}  # such a version wrote it
    assert from_json(snapshot) == state


def test_a_frozen_process_is_killed_and_its_death_keeps_the_reason():
    state, effects = reduce(running(), WorkerFailed(Kind.FROZEN, "actor-0", PIDS["actor-0"], "stopped for 6 s"))
    assert effects == (KillProcess("actor-0", "run/actor-0", PIDS["actor-0"], "node", "", "stopped for 6 s"),)
    state, _ = reduce(state, died("actor-0"))
    assert state.workers["actor-0"].exit_reason == "stopped for 6 s; the master killed it for that"


def test_a_death_reported_twice_counts_once_and_one_of_a_replaced_process_not_at_all():
    state, _ = reduce(running(), died("rollout-0"))
    assert reduce(state, died("rollout-0", 999)) == (state, ())
    rejoined, _ = reduce(state, join("rollout-0", 200))
    assert reduce(rejoined, died("rollout-0")) == (rejoined, ())


def test_a_restarted_master_sends_the_stop_to_the_trainer_again():
    state, effects = reduce(running(), StopRequested("requested by a user"))
    assert effects == unfinished_effects(state) == (StopTrainer("requested by a user"),)
    state, effects = reduce(state, died("trainer"))
    assert (state.state, effects) == (JobPhase.STOPPED, (ReleaseJob("requested by a user"),))
    assert unfinished_effects(state) == effects


def test_a_call_past_its_deadline_is_a_failure_without_a_lost_process_and_the_job_keeps_running():
    overdue = WorkerFailed(
        Kind.CALL, "actor-0", PIDS["actor-0"], "actor.update() did not answer within 60 s; still waiting for rank 0"
    )
    state, (effect,) = reduce(running(), overdue)
    assert effect == RecoveryNeeded("actor-0", f"actor-0: {overdue.evidence}")
    assert (state.state, state.workers["actor-0"].state) == (JobPhase.RUNNING, WorkerPhase.ALIVE)
    assert state.failures == (f"actor-0 at step 0: {overdue.evidence}",)
    assert fold([died("rollout-0"), StepCompleted(1)], state)[0].state == JobPhase.RECOVERING  # still lost
    replaced = [died("rollout-0"), join("rollout-0", 200), StepCompleted(1)]
    assert fold(replaced, state)[0].state == JobPhase.RUNNING


def test_a_warning_is_sent_to_the_trainer_and_changes_no_state():
    state, effects = reduce(running(), WarningRaised("machine a", "memory is nearly full"))
    assert effects == (NotifyTrainer("machine a: memory is nearly full"),)
    assert replace(state, warnings=()) == running() and state.warnings == ("machine a: memory is nearly full",)


slots = st.sampled_from((*SLOTS, "critic-0"))
pids = st.sampled_from((*PIDS.values(), 200, 201))
events = st.one_of(
    st.builds(join, slots.filter(PIDS.get), pids),
    st.builds(WorkerSilent, slots, pids, st.just("no message")),
    st.builds(WorkerRecovered, slots, pids),
    st.builds(
        WorkerFailed,
        st.sampled_from(list(Kind)),
        slots,
        pids,
        st.just("evidence"),
        st.sampled_from(["", "ValueError: x"]),
    ),
    st.builds(StepCompleted, st.integers(0, 5)),
    st.builds(lambda step: CheckpointCommitted(step, f"global_step_{step}"), st.integers(1, 5)),
    st.builds(WorkerLeft, slots, pids),
    st.builds(WorkerReplaced, slots, pids),
    st.builds(RanksChanged, st.builds(lambda n: {"actor": n, "rollout": 1}, st.integers(1, 2)), st.just("fewer")),
    st.builds(WarningRaised, slots, st.just("slow")),
    st.builds(RecoveryDecided, *map(st.just, ("worker lost", "", "role", "snapshot", "trainer", 1, 3, "a sentence"))),
    st.builds(StopRequested, st.just("requested")),
    st.builds(JobEnded, st.booleans(), st.just("done")),
)
starts = st.builds(
    lambda workers, driver: JobStarted(
        "job", "run", {"actor": 2, "rollout": 1}, ("rollout",), restarts_workers=workers, restarts_driver=driver
    ),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(starts, st.lists(events, max_size=40))
def test_no_sequence_of_events_leads_to_an_illegal_state_and_every_one_can_end(start, sequence):
    state, _ = fold([start, *map(join, SLOTS)])
    for event in sequence:
        before, (state, effects) = state, reduce(state, event)
        assert state.state in set(JobPhase) and set(state.roles.values()) <= set(RolePhase)
        assert {worker.state for worker in state.workers.values()} <= set(WorkerPhase)
        assert max(map(len, (state.failures, state.decisions, state.warnings))) <= 20
        if before.state in JOB_ENDS:
            assert (replace(state, decisions=before.decisions), effects) == (before, ())
            assert state.decisions == before.decisions or isinstance(event, RecoveryDecided)
        assert sum(isinstance(effect, ReleaseJob) for effect in effects) == (
            state.state in JOB_ENDS and before.state not in JOB_ENDS
        )
        assert from_json(json.loads(json.dumps(to_json(state)))) == state
    ended, _ = reduce(state, JobEnded(False, "the end"))
    assert ended.state in JOB_ENDS


@settings(max_examples=100, deadline=None)
@given(starts, st.lists(events, max_size=30))
def test_reduce_does_not_modify_its_input_state(start, sequence):
    state, _ = fold([start])
    for event in sequence:
        copied = replace(from_json(json.loads(json.dumps(to_json(state)))))
        following, _ = reduce(state, event)
        assert state == copied
        state = following


def test_a_lost_trainer_is_awaited_if_a_supervisor_restarts_it_and_ends_the_job_otherwise():
    state, effects = reduce(running(), died("trainer"))
    assert state.state == JobPhase.RECOVERING
    assert effects == (RecoveryNeeded("trainer", "trainer: killed by SIGKILL"),)
    assert unfinished_effects(state) == (RecoveryNeeded("trainer", "killed by SIGKILL"),)
    rejoined, _ = reduce(state, join("trainer", 300))
    assert rejoined.state == JobPhase.RUNNING and unfinished_effects(rejoined) == ()
    unsupervised, effects = reduce(running(restarts_driver=False), died("trainer"))
    assert unsupervised.state == JobPhase.FAILED and effects == (ReleaseJob("trainer: killed by SIGKILL"),)
