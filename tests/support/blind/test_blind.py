"""Blind drills: whatever happens to any process at any time, a run ends as it should, or says why and goes on.

`make drill N=100 SEED=1` runs more of them; `tests/support/blind` says what a drill is.
"""

import pytest

from hybridrl.trainer.checkpoint.ledger_audit import PromptCount
from tests.support.blind.clarity import find_unclear
from tests.support.blind.drill import Drills, judge
from tests.support.blind.plan import HARMS, KINDS, OF_KIND, PRIVILEGED, PROCESSES, SURROUNDINGS, Drill, draw_drill
from tests.support.blind.processes import Process, classify
from tests.support.blind.runs import available_kinds
from tests.support.blind.stage import Outcome

FIRST_SEED = 1
CALM = "step 16, 0123456789abcdef"
HIT = ["1 s: kill worker"]
ENDED, RESUMED = Outcome(code=0, hits=HIT), Outcome(code=1, hits=HIT, last_line="error: worker actor-0 was lost")


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    return Drills(tmp_path_factory.mktemp("drills"))


@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_blind_faults_ends_as_the_calm_one_or_resumes_to_its_end(drills, kind):
    if kind not in available_kinds():
        pytest.skip(f"{kind} cannot run here")
    seed = FIRST_SEED + KINDS.index(kind)
    verdict = drills.run(draw_drill(seed, kinds=[kind], possible=drills.possible))
    print(f"\n{verdict.line}")
    assert verdict.is_clean, verdict.line


def test_a_drill_is_a_function_of_its_seed_and_every_process_and_harm_comes_up():
    drawn = [draw_drill(seed) for seed in range(2000)]
    assert drawn == [draw_drill(seed) for seed in range(2000)]
    assert drawn[3] == Drill.from_json(drawn[3].to_json())
    assert {drill.kind for drill in drawn} == set(KINDS)
    faults = [fault for drill in drawn for fault in drill.faults]
    assert {fault.process for fault in faults} == {*PROCESSES, "job supervisor", ""}
    assert {fault.how for fault in faults} == {*HARMS, *SURROUNDINGS, "link", "machine"}
    assert {len(drill.faults) for drill in drawn} == {1, 2, 3}
    for drill in drawn:
        chosen = OF_KIND.get(drill.kind, PROCESSES)
        assert all(not fault.process or chosen[fault.process] for fault in drill.faults)


def test_without_roots_rights_the_rest_of_a_drill_is_the_same():
    for seed in range(200):
        whole, rest = draw_drill(seed), draw_drill(seed, possible=())
        assert [fault.at for fault in whole.faults] == [fault.at for fault in rest.faults]
        for one, other in zip(whole.faults, rest.faults, strict=True):
            assert other.process and other.how not in PRIVILEGED and (one == other or one.how in PRIVILEGED)


def test_processes_are_known_by_their_place_and_their_command():
    rows = [
        (10, 1, "python -m hybridrl.main_ppo"),
        (11, 10, "python -m hybridrl.main_ppo"),
        (12, 10, "python -m hybridrl.main_ppo"),
        (13, 12, "/ray/core/src/ray/gcs/gcs_server --log_dir"),
        (14, 12, "/ray/core/src/ray/raylet/raylet --raylet_socket_name"),
        (15, 14, "ray::WorkerHost.call"),
        (16, 14, "ray::WorkerHost"),
        (17, 14, "ray::JobMaster"),
        (18, 11, "python -I -S hybridrl/system/child_guard.py 3 11"),
        (19, 18, "python -P hybridrl/system/child_program.py 4 hybridrl/rewards/reward_calls.py"),
    ]
    found = classify(10, {pid: Process(pid, parent, "S", command) for pid, parent, command in rows})
    assert found == {
        "program": [10],
        "driver": [11],
        "cluster holder": [12],
        "gcs": [13],
        "raylet": [14],
        "worker": [15, 16],
        "master": [17],
        "guard": [18],
        "reward process": [19],
        "node": [14, 15, 16, 17],
    }


@pytest.mark.parametrize(
    ("first", "again", "end", "verdict"),
    [
        (ENDED, None, CALM, "equal"),
        (RESUMED, ENDED, CALM, "resumed equal"),
        (ENDED, None, "step 16, fedcba9876543210", "DIFFERENT"),
        (Outcome(code=0, left=["7 T ray::IDLE"], hits=HIT), None, CALM, "LEFT"),
        (Outcome(code=0, shared_memory=["plasma"], hits=HIT), None, CALM, "LEFT in /dev/shm"),
        (Outcome(code=1, has_traceback=True, hits=HIT), ENDED, CALM, "TRACEBACK"),
        (Outcome(code=1, unclear="no error", hits=HIT), ENDED, CALM, "UNCLEAR"),
        (RESUMED, RESUMED, CALM, "NOT RESUMED"),
        (RESUMED, Outcome(code=None, last_line="step 3/16"), CALM, "NOT RESUMED"),
        (Outcome(code=None, hanging=["7 S driver"], hits=HIT), None, CALM, "HANGS"),
        (Outcome(code=None, hanging=["7 S driver"]), None, CALM, "NOT JUDGED"),
        (Outcome(code=0), None, CALM, "NOT JUDGED"),
    ],
)
def test_what_is_not_clean_is_called_so(first, again, end, verdict):
    found = judge(first, again, end=end, calm_end=CALM)
    assert found.startswith(verdict) and (found in ("equal", "resumed equal")) == (
        verdict in ("equal", "resumed equal")
    )


@pytest.mark.parametrize(
    ("prompts", "verdict"),
    [
        (PromptCount(drawn=8, trained=7, left_out={"filtered": 1}), "equal"),
        (PromptCount(drawn=8, trained=7, lost=1), "PROMPTS 8 drawn, 7 trained once, 1 lost"),
        (PromptCount(drawn=8, trained=8, repeated=1), "PROMPTS 8 drawn, 8 trained once, 0 lost, 1 repeated"),
    ],
)
def test_a_run_that_lost_or_repeated_a_prompt_is_not_clean(prompts, verdict):
    assert judge(ENDED, None, end=CALM, calm_end=CALM, prompts=prompts).startswith(verdict)


LOST = "error: worker actor-0 was lost in step 3; resume with the same command"
SAVED = "the full traceback is in /run/error.log"
NEW_JOB = "the driver (attempt 1) cannot repair the job; the supervisor starts a new job from the newest checkpoint"
SPENT = (
    "the driver (attempt 4) was lost; the limit is 3 losses, so the program ends; resume with trainer.resume_mode=auto"
)
CORE = "[2026-11-22 16:15:37,800 E 5 153] rpc_client.h:204: Failed to connect to GCS within 60 seconds."


@pytest.mark.parametrize(
    ("lines", "code", "found"),
    [
        (["step 2/16", LOST, SAVED], 1, ""),
        ([LOST, SAVED, NEW_JOB, "step 3/16", LOST, SAVED], 1, ""),  # the first one was answered
        ([LOST, SAVED, SPENT], 137, ""),
        ([SPENT], 137, ""),
        (["trainer.lag=-1: set it to 0 or more"], 2, ""),
        (["no node can hold 1 process. Lower trainer.nnodes, or add nodes"], 2, ""),
        ([LOST, LOST], 1, "2 errors"),
        ([LOST, "shutting down"], 1, "the error is not the end"),
        (["error: it failed"], 1, "no way out"),
        (["step 2/16"], 1, "no error"),
        ([], 1, "no error"),
        ([LOST, "Traceback (most recent call last):"], 1, "not our words"),
        ([LOST, CORE], 1, "not our words"),
    ],
)
def test_one_clear_error_is_told_from_everything_else(lines, code, found):
    unclear = find_unclear("\n".join(lines) + "\n\n", code)
    assert unclear.startswith(found) and bool(unclear) == bool(found)
