"""What follows a failure: the table, the budgets, and the sentences. No processes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.failure_policy import (
    REFILL_STEPS,
    RULES,
    Budgets,
    Executor,
    Failure,
    FailureKind,
    Refill,
    Scope,
    Source,
    decide,
    to_text,
)

PAGE = Path(__file__).parents[1] / "docs" / "failover.md"
MAX_RESTART = 2
kinds = st.sampled_from(FailureKind)
refilled_kinds = st.sampled_from([kind for kind in FailureKind if RULES[kind].refill != Refill.NEVER])


def budgets():
    """The budgets of an executor that has completed a step."""
    made = Budgets({"role": MAX_RESTART})
    made.refill(Refill.COMPLETED_STEP)
    return made


def failed(kind, what="it failed"):
    return Failure(kind, what, subject="role")


def limit_of(kind):
    limit = RULES[kind].limit
    return MAX_RESTART if limit is None else limit


def test_the_table_has_one_rule_with_an_executor_per_failure():
    assert set(RULES) == set(FailureKind)
    assert all(rule.kind == kind and isinstance(rule.executor, Executor) for kind, rule in RULES.items())


@given(kinds)
def test_what_a_spent_budget_becomes_ends_after_a_few_rules(kind):
    seen = []
    while kind is not None:
        assert kind not in seen
        seen.append(kind)
        kind = RULES[kind].then


@given(kinds, st.integers(0, 20))
def test_a_budget_covers_its_limit_and_a_spent_one_restarts_nothing(kind, more):
    asked = budgets()
    for number in range(limit_of(kind)):
        decision = asked.spend(failed(kind))
        assert (decision.is_granted, decision.used, decision.scope) == (True, number + 1, RULES[kind].scope)
    for _ in range(1 + more):
        decision = asked.spend(failed(kind))
        assert (decision.is_granted, decision.scope, decision.source) == (False, Scope.NOTHING, Source.NOTHING)
        assert RULES[kind].consequence in str(decision)


@given(refilled_kinds, st.integers(1, 20))
def test_a_refilled_budget_covers_failures_again(kind, failures):
    asked = budgets()
    for _ in range(failures + limit_of(kind)):
        asked.spend(failed(kind))
    assert not decide(failed(kind), asked).is_granted
    asked.refill(RULES[kind].refill)
    assert asked.spend(failed(kind)).is_granted == (limit_of(kind) > 0)


@given(kinds, kinds)
def test_a_refill_by_another_event_changes_nothing(kind, other):
    asked = budgets()
    for _ in range(limit_of(kind) + 1):
        asked.spend(failed(kind))
    if RULES[other].refill != RULES[kind].refill:
        asked.refill(RULES[other].refill)
        assert not decide(failed(kind), asked).is_granted


@given(kinds)
def test_deciding_counts_nothing_and_subjects_have_budgets_of_their_own(kind):
    asked = Budgets({"role": MAX_RESTART, "other": MAX_RESTART})
    asked.refill(Refill.COMPLETED_STEP)
    first = decide(failed(kind), asked)
    assert decide(failed(kind), asked) == first == asked.spend(failed(kind))
    assert decide(Failure(kind, "it failed", subject="other"), asked).used == 1


def test_limits_are_those_that_the_documents_promise():
    assert {kind.name: RULES[kind].limit for kind in FailureKind} == {
        "REQUEST_LOST": 2,
        "AGENT_LOOP_FAILED": 2,
        "REPLICA_LOST": 3,
        "WORKER_LOST": 3,
        "RANKS_MISSING": 3,
        "CALL_TIMEOUT": 1,
        "UPDATE_SKIPPED": 9,
        "UPDATE_REJECTED": 3,
        "DRIVER_LOST": 3,
        "JOB_UNREPAIRABLE": 1,
        "PROCESS_LOST": None,
        "TRAINER_FAILED": None,
        "EXCEPTION_REPEATED": 0,
        "JOB_SUPERVISOR_LOST": 3,
    }


def test_a_new_job_needs_a_completed_step():
    asked = Budgets(step=-1)
    assert not asked.spend(failed(FailureKind.JOB_UNREPAIRABLE)).is_granted
    asked.on_step(0)
    assert asked.spend(failed(FailureKind.JOB_UNREPAIRABLE)).is_granted
    assert not asked.spend(failed(FailureKind.JOB_UNREPAIRABLE)).is_granted


def test_the_same_exception_at_the_same_step_is_a_bug_and_any_other_spends_the_budget():
    asked = Budgets({"trainer": 9}, step=3)

    def raised(exception):
        what = f"the trainer raised {exception}"
        return asked.spend(Failure(FailureKind.TRAINER_FAILED, what, subject="trainer", exception=exception))

    assert raised("ValueError: x").is_granted
    assert raised("ValueError: y").is_granted
    assert raised("ValueError: x").is_granted  # another one was between them
    asked.on_step(4)
    assert raised("ValueError: x").is_granted
    repeated = raised("ValueError: x")
    assert (repeated.rule.kind, repeated.is_granted) == (FailureKind.EXCEPTION_REPEATED, False)
    assert str(repeated).startswith("the trainer raised ValueError: x at step 4, as it did before; ")
    assert asked.of(FailureKind.TRAINER_FAILED, "trainer").covers_another  # the repetition spent nothing of it


def test_any_failure_restarts_the_count_of_healthy_steps():
    asked = Budgets({"a": 0, "b": 1})
    lost = Failure(FailureKind.PROCESS_LOST, "lost", subject="a")
    asked.spend(lost)
    for step in range(1, REFILL_STEPS):
        asked.on_step(step)
    asked.spend(Failure(FailureKind.PROCESS_LOST, "lost", subject="b"))
    asked.on_step(REFILL_STEPS)
    assert asked.of(FailureKind.PROCESS_LOST, "a").failures == ["lost (step 0)"]
    for step in range(REFILL_STEPS + 1, 2 * REFILL_STEPS):
        asked.on_step(step)
    assert asked.of(FailureKind.PROCESS_LOST, "a").failures == []


def test_a_decision_is_a_sentence_about_what_happened_what_follows_and_what_to_do():
    asked = Budgets()
    lost = Failure(
        FailureKind.WORKER_LOST,
        "critic-0 was lost in update_critic of step 212 (killed by SIGKILL)",
        target="role critic (2 processes)",
        origin="the snapshot of step 211",
    )
    assert str(asked.spend(lost)) == (
        "critic-0 was lost in update_critic of step 212 (killed by SIGKILL); the trainer rebuilds role critic (2 "
        "processes) from the snapshot of step 211 (1 of 3 losses); `hybridrl job status` shows how each process ended"
    )
    for _ in range(3):
        decision = asked.spend(lost)
    assert str(decision) == (
        "critic-0 was lost in update_critic of step 212 (killed by SIGKILL); the limit is 3 losses without a "
        "completed step, so the driver ends, and its supervisor starts a new job"
    )


def test_a_job_has_to_set_the_limits_of_its_roles():
    with pytest.raises(KeyError, match="unknown"):
        Budgets({"a": 1}).spend(Failure(FailureKind.PROCESS_LOST, "lost", subject="unknown"))


def test_the_page_shows_the_table_as_the_command_prints_it():
    shown = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert to_text() in shown


def test_a_failure_that_took_the_snapshot_with_it_continues_from_the_checkpoint():
    lost = Failure(FailureKind.DRIVER_LOST, "lost", origin="the newest checkpoint", source=Source.CHECKPOINT)
    decision = Budgets().spend(lost)
    assert decision.to_json()["source"] == "newest checkpoint" and "from the newest checkpoint" in str(decision)
    assert Budgets().spend(replace(lost, source=None)).source == Source.SNAPSHOT
