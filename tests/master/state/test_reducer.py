import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.master.state.events import (
    Begun,
    Committed,
    Ended,
    EndJob,
    EndProcess,
    Failed,
    Joined,
    Kind,
    Left,
    Level,
    Noticed,
    Recover,
    Silenced,
    Spoke,
    Stepped,
    StopAsked,
    StopTrainer,
    TellTrainer,
)
from hybridrl.master.state.reducer import BUDGETS, REFILL_STEPS, JobState, from_json, pending, reduce, to_json
from hybridrl.master.state.tables import JOB_ENDS, Job, Role, Worker

ALL_LEVELS = tuple(range(6))
SLOTS = ("trainer", "actor-0", "actor-1", "rollout-0")
PIDS = {slot: 100 + i for i, slot in enumerate(SLOTS)}


def fold(events, state=None):
    """The state behind the events, and the effects of the last one."""
    state, effects = state or JobState(), ()
    for event in events:
        state, effects = reduce(state, event)
    return state, effects


def join(slot, pid=None):
    return Joined(slot, f"run/{slot}", pid or PIDS[slot], "node", group_size=2 if slot.startswith("actor") else 1)


def running(levels=ALL_LEVELS):
    begun = Begun("job", "run", {"actor": 2, "rollout": 1}, replicas=("rollout",), levels=tuple(levels))
    return fold([begun, *map(join, SLOTS), Stepped(0)])[0]


def died(slot, pid=None, evidence="killed by SIGKILL"):
    return Failed(Kind.DIED, slot, pid or PIDS[slot], evidence)


def test_a_role_is_ready_when_all_its_processes_have_joined():
    begun = Begun("job", "run", {"actor": 2})
    assert fold([begun, join("actor-0")])[0].roles == {"actor": Role.STARTING}
    assert fold([begun, join("actor-0"), join("actor-1")])[0].roles == {"actor": Role.READY}
    assert running().state == Job.RUNNING


def test_a_lost_replica_is_started_again_and_the_job_has_recovered_when_it_is_back():
    state, effects = reduce(running(), died("rollout-0"))
    assert effects == (Recover(Level.REPLICA, ("rollout-0",), "rollout-0: killed by SIGKILL"),)
    assert (state.state, state.roles["rollout"]) == (Job.RECOVERING, Role.DEGRADED)
    state, _ = reduce(state, join("rollout-0", 200))
    assert (state.state, state.roles["rollout"], state.workers["rollout-0"].life) == (Job.RUNNING, Role.READY, 2)


def test_a_lost_rank_of_a_group_that_talks_takes_the_whole_role():
    state, (effect,) = reduce(running(), died("actor-1"))
    assert (effect.level, set(effect.slots)) == (Level.ROLE, {"actor-0", "actor-1"})
    assert state.roles["actor"] == Role.REBUILDING
    state, effects = reduce(
        state, died("actor-0")
    )  # its well peer is ended by whoever rebuilds the role, which is no failure
    assert (effects, state.spent, len(state.failures)) == ((), {Level.ROLE: 1}, 1)
    state, _ = fold([join("actor-0", 201)], state)
    assert state.state == Job.RECOVERING
    state, _ = fold([join("actor-1", 202)], state)
    assert (state.state, state.roles["actor"]) == (Job.RUNNING, Role.READY)


def test_a_rank_that_alone_is_replaced_makes_its_role_whole_again():
    state, _ = fold([died("actor-1"), join("actor-1", 202)], running())
    assert (state.state, state.roles["actor"]) == (Job.RUNNING, Role.READY)


def test_a_lost_trainer_is_level_4():
    _, (effect,) = reduce(running(), died("trainer"))
    assert (effect.level, effect.slots) == (Level.TRAINER, ("trainer",))


def test_a_level_that_nobody_carries_out_is_climbed_over():
    assert reduce(running([5]), died("rollout-0"))[1][0].level == Level.JOB
    state, effects = reduce(running([]), died("actor-0"))
    assert (state.state, state.reason) == (Job.FAILED, "actor-0: killed by SIGKILL")
    assert effects == (EndJob("actor-0: killed by SIGKILL"),)


def test_a_spent_budget_climbs_and_healthy_steps_refill_it():
    state = running([Level.REPLICA])
    for life in range(BUDGETS[Level.REPLICA]):
        state, effects = fold([died("rollout-0", state.workers["rollout-0"].pid)], state)
        assert isinstance(effects[0], Recover)
        state, _ = fold([join("rollout-0", 300 + life)], state)
    again = died("rollout-0", state.workers["rollout-0"].pid)
    assert reduce(state, again)[0].state == Job.FAILED
    healthy, _ = fold(map(Stepped, range(1, REFILL_STEPS + 1)), state)
    assert reduce(healthy, again)[0].state == Job.RECOVERING


def test_the_same_exception_at_the_same_step_ends_the_job_and_another_does_not():
    def raised(message):
        return Failed(Kind.EXCEPTION, "actor-0", PIDS["actor-0"], message, signature=message)

    state, (effect,) = reduce(running(), raised("ValueError: x"))
    assert isinstance(effect, Recover)
    assert reduce(state, raised("ValueError: y"))[0].state == Job.RECOVERING
    assert fold([Stepped(1), raised("ValueError: x")], state)[0].state == Job.RECOVERING
    ended, effects = reduce(state, raised("ValueError: x"))
    assert (ended.state, effects) == (Job.FAILED, (EndJob("actor-0: ValueError: x"),))


def test_a_frozen_process_is_ended_and_its_death_keeps_the_reason():
    state, effects = reduce(running([]), Failed(Kind.FROZEN, "actor-0", PIDS["actor-0"], "stopped for 6 s"))
    assert effects == (EndProcess("actor-0", "run/actor-0", PIDS["actor-0"], "node", "", "stopped for 6 s"),)
    state, _ = reduce(state, died("actor-0"))
    assert state.workers["actor-0"].account == "stopped for 6 s; it was ended for that"


def test_a_death_told_twice_counts_once_and_one_of_a_former_life_not_at_all():
    state, _ = reduce(running(), died("rollout-0"))
    assert reduce(state, died("rollout-0", 999)) == (state, ())
    back, _ = reduce(state, join("rollout-0", 200))
    assert reduce(back, died("rollout-0")) == (back, ())


def test_a_stop_is_told_to_the_trainer_again_by_a_master_that_comes_back():
    state, effects = reduce(running(), StopAsked("asked by a user"))
    assert effects == pending(state) == (StopTrainer("asked by a user"),)
    state, effects = reduce(state, died("trainer"))
    assert (state.state, effects) == (Job.STOPPED, (EndJob("asked by a user"),))
    assert pending(state) == effects


def test_a_call_past_its_deadline_is_a_failure_that_costs_no_process_and_a_step_that_ends_shows_that_all_is_well():
    late = Failed(
        Kind.CALL, "actor-0", PIDS["actor-0"], "actor.update() did not answer within 60 s; still waiting for rank 0"
    )
    state, (effect,) = reduce(running(), late)
    assert (effect.level, effect.slots, state.spent) == (Level.CALL, (), {Level.CALL: 1})
    assert (state.state, state.workers["actor-0"].state) == (Job.RUNNING, Worker.ALIVE)
    assert state.failures == (f"actor-0 at step 0: {late.evidence}",)
    spent, (effect,) = fold([late] * BUDGETS[Level.CALL], state)
    assert (effect.level, spent.state) == (Level.ROLE, Job.RECOVERING)
    assert fold([Stepped(1)], spent)[0].state == Job.RUNNING
    assert fold([died("rollout-0"), Stepped(1)], spent)[0].state == Job.RECOVERING  # that one is still missing


def test_what_is_noticed_is_told_to_the_trainer_and_moves_nothing():
    state, effects = reduce(running(), Noticed("machine a", "memory is nearly full"))
    assert effects == (TellTrainer("machine a: memory is nearly full"),)
    assert replace(state, notices=()) == running() and state.notices == ("machine a: memory is nearly full",)


slots = st.sampled_from((*SLOTS, "critic-0"))
pids = st.sampled_from((*PIDS.values(), 200, 201))
events = st.one_of(
    st.builds(join, slots.filter(PIDS.get), pids),
    st.builds(Silenced, slots, pids, st.just("no word")),
    st.builds(Spoke, slots, pids),
    st.builds(
        Failed, st.sampled_from(list(Kind)), slots, pids, st.just("evidence"), st.sampled_from(["", "ValueError: x"])
    ),
    st.builds(Stepped, st.integers(0, 5)),
    st.builds(lambda step: Committed(step, f"global_step_{step}"), st.integers(1, 5)),
    st.builds(Left, slots, pids),
    st.builds(Noticed, slots, st.just("slow")),
    st.builds(StopAsked, st.just("asked")),
    st.builds(Ended, st.booleans(), st.just("done")),
)
begins = st.builds(
    lambda levels: Begun("job", "run", {"actor": 2, "rollout": 1}, ("rollout",), tuple(sorted(levels))),
    st.sets(st.integers(0, 5)),
)


@settings(max_examples=300, deadline=None)
@given(begins, st.lists(events, max_size=40))
def test_no_story_leads_to_an_illegal_state_and_every_one_can_end(begun, story):
    state, _ = fold([begun, *map(join, SLOTS)])
    for event in story:
        before, (state, effects) = state, reduce(state, event)
        assert state.state in set(Job) and set(state.roles.values()) <= set(Role)
        assert {worker.state for worker in state.workers.values()} <= set(Worker)
        assert all(count <= BUDGETS[level] for level, count in state.spent.items())
        assert before.state not in JOB_ENDS or (state, effects) == (before, ())
        assert sum(isinstance(effect, EndJob) for effect in effects) == (
            state.state in JOB_ENDS and before.state not in JOB_ENDS
        )
        assert from_json(json.loads(json.dumps(to_json(state)))) == state
    ended, _ = reduce(state, Ended(False, "the end"))
    assert ended.state in JOB_ENDS


@settings(max_examples=100, deadline=None)
@given(begins, st.lists(events, max_size=30))
def test_reducing_changes_nothing_of_the_state_before(begun, story):
    state, _ = fold([begun])
    for event in story:
        kept = replace(from_json(json.loads(json.dumps(to_json(state)))))
        following, _ = reduce(state, event)
        assert state == kept
        state = following


def test_a_lost_trainer_is_waited_for_if_somebody_starts_the_next_one_and_ends_the_job_if_not():
    state, effects = reduce(running(), died("trainer"))
    assert state.state == Job.RECOVERING
    assert effects[0].level == Level.TRAINER and effects[0].slots == ("trainer",)
    assert [(effect.level, effect.slots) for effect in pending(state)] == [(Level.TRAINER, ("trainer",))]
    back, _ = reduce(state, join("trainer", 300))
    assert back.state == Job.RUNNING and pending(back) == ()
    alone, effects = reduce(running([Level.ROLE]), died("trainer"))
    assert alone.state == Job.FAILED and effects == (EndJob("trainer: killed by SIGKILL"),)
