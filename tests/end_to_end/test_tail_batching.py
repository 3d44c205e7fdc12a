"""Tail batching: every drawn prompt is trained exactly once, and a run with waiting prompts resumes bit for bit."""

import json
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.failing_runs import fault, hits, run_with
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
STEPS, SIZE, SAMPLES = 5, 4, 3
ASYNC = {"actor_rollout_ref__rollout__mode": "async"}
CHANGES = {
    "algorithm__filter_groups__order": "tail_batching",
    "data__gen_batch_size": 6,
    "data__max_response_length": 40,
    "actor_rollout_ref__rollout__stop_token_ids": [*range(60, 100)],  # a token in ten or so ends a response
    "trainer__total_training_steps": STEPS,  # 20 prompts: two epochs of 10
    "trainer__save_freq": STEPS,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "response_length/mean", "rollout/deferred")
MODES = {
    "plain": ASYNC,
    "dynamic sampling": ASYNC | {"algorithm__filter_groups__enable": "true", "data__gen_batch_size": 5},
}


def numbers(rows: list[dict]) -> list[list]:
    return [[row.get(name) for name in SAME] for row in rows]


def samples(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rollouts/{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_qwen2):
    """Returns the folder of the uninterrupted run of a mode, which runs once for all tests."""
    folders: dict[str, Path] = {}

    def of(mode: str) -> Path:
        if mode not in folders:
            folder = tmp_path_factory.mktemp("whole")
            changes = CHANGES | {"trainer__rollout_data_dir": folder / "rollouts"}
            train(folder, tiny_qwen2, **changes | MODES[mode])
            folders[mode] = folder
        return folders[mode]

    return of


@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_is_trained_once_per_epoch_and_the_ledger_says_where(whole, mode):
    result = audit(read_ledger(str(whole(mode) / "run" / FILE)))
    assert result.problems() == []
    assert all(len(entry["prompts"]) == SIZE for entry in result.steps.values())
    deferred = result.deferred().values()
    rows = metrics(whole(mode) / "run")
    assert sum(row["rollout/deferred"] for row in rows) == len(deferred) > 0 == rows[-1]["rollout/deferred_waiting"]
    if mode != "dynamic sampling":  # which draws more than it trains
        assert {epoch: sorted(used) for epoch, used in result.prompts().items()} == dict.fromkeys((0, 1), [*range(10)])
        ages = [trained - step for step, trained in deferred]
        assert max(row["rollout/deferred_age_max"] for row in rows) == max(ages) >= 1
        assert sum(row["rollout/deferred_trained"] for row in rows) == len(deferred)
        assert f"prompts deferred: {len(deferred)}, trained {sum(ages) / len(ages):.1f} steps later" in str(result)


def test_a_short_round_trains_on_the_groups_that_whole_responses_would_choose(tmp_path, tiny_qwen2, whole):
    changes = CHANGES | {"algorithm__filter_groups__order": "shortest", "trainer__total_training_steps": 1}
    train(tmp_path, tiny_qwen2, **changes, trainer__rollout_data_dir=tmp_path / "rollouts")
    (first,) = audit(read_ledger(str(tmp_path / "run" / FILE))).steps.values()
    short = audit(read_ledger(str(whole("plain") / "run" / FILE))).steps[1]
    assert first["prompts"] == short["prompts"]
    all_outputs = {(row["input"], row["output"]) for row in samples(tmp_path, 1)}
    outputs = [(row["input"], row["output"]) for row in samples(whole("plain"), 1)]
    assert len(outputs) == SIZE * SAMPLES and {*outputs} < all_outputs


def test_a_run_resumed_while_prompts_wait_ends_as_the_uninterrupted_one(tmp_path, tiny_qwen2, whole):
    changes = CHANGES | ASYNC
    train(tmp_path / "parts", tiny_qwen2, **changes | {"trainer__save_freq": 2})
    checkpoint = tmp_path / "parts/run/global_step_2"
    assert json.loads((checkpoint / "trainer.json").read_text())["prompts"]["deferred"]
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    (tmp_path / "again").mkdir()
    assert main_ppo.main([*settings(tmp_path / "again", tiny_qwen2, **changes), *again]) == 0
    assert numbers(metrics(tmp_path / "again/run")) == numbers(metrics(whole("plain") / "run"))[2:]
    ends = {"whole": whole("plain"), "again": tmp_path / "again"}
    policies = [weights(folder / "run/global_step_5", tmp_path / f"{name}_hf") for name, folder in ends.items()]
    assert largest_difference(*policies) == 0

    drawn = CHANGES | {"algorithm__filter_groups__order": "drawn", "data__gen_batch_size": "null"}
    (tmp_path / "drawn").mkdir()
    assert main_ppo.main([*settings(tmp_path / "drawn", tiny_qwen2, **drawn), *again]) != 0


@pytest.mark.slow
def test_a_step_that_lost_a_process_in_its_short_round_defers_the_same_prompts(tmp_path, tiny_qwen2, whole):
    lost = fault(2, "gen", "actor_rollout", 1, method="serve")
    done = run_with(tmp_path, tiny_qwen2, lost, **CHANGES | ASYNC)
    assert done.returncode == 0, done.stderr
    assert len(hits(tmp_path)) == 1 and "was lost" in done.stderr
    of_run, of_whole = (audit(read_ledger(str(folder / "run" / FILE))) for folder in (tmp_path, whole("plain")))
    assert of_run.problems() == [] and of_run.deferred() == of_whole.deferred()
