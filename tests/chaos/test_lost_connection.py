"""A connection inside torch.distributed is lost while all processes live: the run continues, and ends bit-equal.

Gloo ends a process on it, or the call reports it; the driver rebuilds the role in both cases.
"""

import pytest

from tests.support.blind.runs import make_model
from tests.support.end_to_end.failing_runs import fault, hits, losses, run_with
from tests.support.end_to_end.runs import largest_difference, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
STEPS = 6
ENGINES = {
    "fsdp": {},
    "megatron": {
        "actor_rollout_ref__actor__strategy": "megatron",
        "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
    },
}
CUT = [  # stage, role, rank, the call it is in ("": none), and for how many seconds; the first one is in step 2
    ("update_actor", "actor_rollout", 0, "update_actor", 0.02),
    ("old_log_prob", "actor_rollout", 1, "compute_log_prob", 0.0),
    ("gen", "actor_rollout", 1, "", 0.0),  # noticed by the next collective call
    ("save_checkpoint", "actor_rollout", 0, "save_checkpoint", 0.0),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_connection_of_a_process_group_costs_time_and_nothing_else(tmp_path, engine):
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    model = make_model(tmp_path / "model")
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    faults = [
        fault(step, *where, kind="cut", method=method, after_s=s) for step, (*where, method, s) in enumerate(CUT, 2)
    ]
    changes = {"trainer__total_training_steps": STEPS, "trainer__save_freq": 1} | ENGINES[engine]
    for folder, planted in ((calm, []), (cut, faults)):
        done = run_with(folder, model, *planted, timeout_s=600, **changes)
        assert done.returncode == 0, done.stderr
    assert len(hits(cut)) == len(CUT)
    assert [failure["lost"][0].rpartition("-")[0] for failure in losses(cut)] == ["actor_rollout"] * len(CUT)
    # In the last one the step's snapshot has been taken.
    assert [failure["step"] - failure["back_at_step"] for failure in losses(cut)] == [1, 1, 1, 0]
    print(*(f"{failure['method']}: recovered after {failure['seconds']:.1f} s" for failure in losses(cut)), sep="\n")
    ends = [weights(folder / f"run/global_step_{STEPS}", folder / "hf") for folder in (calm, cut)]
    assert largest_difference(*ends) == 0
