"""Dynamic sampling: every trained group teaches something, every drawn prompt is accounted for, and a run resumes."""

import json
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
SAMPLES = 3
CHANGES = {
    "algorithm__filter_groups__enable": "true",
    "actor_rollout_ref__rollout__n": SAMPLES,
    "trainer__total_training_steps": 5,
    "trainer__save_freq": 5,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "train/num_gen_batches", "async/age_mean")
MODES = {
    "synchronous": {},
    "small generation batches": {"data__gen_batch_size": 3},
    "lag": {"trainer__lag": 2},
    "partial": {
        "trainer__lag": 2,
        "trainer__partial_rollout": "true",
        "actor_rollout_ref__rollout__mode": "async",
    },
    "kept": {"trainer__staleness": 1, "data__gen_batch_size": 7},
    "curriculum": {
        "data__sampler__class_path": "hybridrl.trainer.data.curriculum",
        "data__sampler__class_name": "SuccessRateSampler",
    },
    "greedy baseline": {"algorithm__adv_estimator": "remax", "trainer__lag": 1},
    "several rewards": {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": "[score,acc]"},
    "agent loops": {"actor_rollout_ref__rollout__mode": "async", "trainer__lag": 1},
}


def coin(folder: Path) -> str:
    """Write a reward that is 1 for a quarter of the responses: of groups of 3, about 44 % are equal."""
    folder.mkdir(exist_ok=True)
    path = folder / "coin.py"
    path.write_text(
        "import zlib\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    hit = zlib.crc32(solution_str.encode()) % 4 == 0\n"
        "    return {'score': float(hit), 'acc': hit, 'word': solution_str[:3]}\n"
    )
    return str(path)


def run(folder: Path, model: Path, **changes) -> list[dict]:
    return train(folder, model, **CHANGES | {"custom_reward_function__path": coin(folder)} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_qwen2):
    """Returns the folder of the uninterrupted run of a mode, which runs once for all tests."""
    folders: dict[str, Path] = {}

    def of(mode: str) -> Path:
        if mode not in folders:
            folder = tmp_path_factory.mktemp("whole")
            run(folder, tiny_qwen2, **MODES[mode])
            folders[mode] = folder
        return folders[mode]

    return of


def samples(folder: Path, step: int) -> list[dict]:
    """Return the rollouts of all generation batches of a step."""
    paths = sorted((folder / "rollouts").glob(f"{step}.*jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def numbers(rows: list[dict]) -> list[list]:
    return [[row.get(name) for name in SAME] for row in rows]


def assert_accounted_for(folder: Path, *, size: int) -> list[dict]:
    """Check the ledger: batches are full, and no prompt is used twice or forgotten.

    Return the lines of the steps.
    """
    entries = read_ledger(str(folder / "run" / FILE))
    result = audit(entries)
    assert result.problems() == []
    assert all(len(entry["prompts"]) == size for entry in result.steps.values())
    return list(result.steps.values())


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_full_of_groups_that_differ_and_every_prompt_is_accounted_for(whole, mode):
    rows = metrics(whole(mode) / "run")
    steps = assert_accounted_for(whole(mode), size=4)
    assert len(rows) == len(steps) == 5
    assert max(row["train/num_gen_batches"] for row in rows) > 1
    for row, entry in zip(rows, steps, strict=True):
        # Every trained group has a 1 and a 0: of 3 samples one or two are hits.
        assert 1 / 3 - 1e-6 <= row["critic/score/mean"] <= 2 / 3 + 1e-6 and row["actor/grad_norm"] > 0
        drawn = [group for outcomes in entry["drawn"].values() for group in outcomes.items()]
        filtered = sum(len(found) for outcome, found in drawn if outcome == "filtered")
        assert row["training/filter_groups/evicted_samples"] == SAMPLES * filtered
        assert sum(len(found) for outcome, found in drawn if outcome == "trained") == 4


def test_the_rollouts_of_all_generation_batches_are_written(tmp_path, tiny_qwen2):
    rows = run(tmp_path, tiny_qwen2, trainer__rollout_data_dir=tmp_path / "rollouts", trainer__total_training_steps=3)
    for step, row in enumerate(rows, start=1):
        records = samples(tmp_path, step)
        assert len(records) - row["training/filter_groups/evicted_samples"] >= 4 * SAMPLES
        assert row["training/filter_groups/seq_reward_mean"] == pytest.approx(
            sum(record["score"] for record in records) / len(records)
        )


@pytest.mark.parametrize("changes", [{}, {"trainer__lag": 2}])
def test_without_equal_groups_the_run_is_the_one_without_a_filter(tmp_path, tiny_qwen2, changes):
    # The share of digits in a response: no two responses of these groups have the same.
    steps = {"trainer__total_training_steps": 4, "trainer__save_freq": 4, "data__max_response_length": 40}
    steps |= {"data__train_batch_size": 5, **changes}  # 10 rows: every generation batch is full
    runs = {}
    for enable in ("true", "false"):
        changes = CHANGES | steps | {"algorithm__filter_groups__enable": enable}
        runs[enable] = train(tmp_path / enable, tiny_qwen2, **changes)
    assert [row["training/filter_groups/evicted_ratio"] for row in runs["true"]] == [0.0] * 4
    same = ("critic/score/mean", "actor/grad_norm", "async/age_mean", "response_length/mean")
    assert [[row.get(name) for name in same] for row in runs["true"]] == [
        [row.get(name) for name in same] for row in runs["false"]
    ]
    policies = [weights(tmp_path / name / "run/global_step_4", tmp_path / f"{name}_hf") for name in runs]
    assert largest_difference(*policies) == 0


@pytest.mark.parametrize(
    "mode", [pytest.param("small generation batches", marks=pytest.mark.slow), "lag", "kept", "curriculum"]
)
def test_a_run_resumed_from_a_checkpoint_ends_as_the_uninterrupted_one(tmp_path, tiny_qwen2, whole, mode):
    run(tmp_path / "parts", tiny_qwen2, trainer__save_freq=2, **MODES[mode])
    folder = tmp_path / "parts/run/global_step_2"
    kept = json.loads((folder / "trainer.json").read_text())["surplus"]["rows"]
    assert (kept > 0) == (mode == "kept") == (folder / "surplus/groups").exists()
    changes = CHANGES | {"custom_reward_function__path": coin(tmp_path / "again")} | MODES[mode]
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    assert main_ppo.main([*settings(tmp_path / "again", tiny_qwen2, **changes), *again]) == 0
    assert numbers(metrics(tmp_path / "again/run")) == numbers(metrics(whole(mode) / "run"))[2:]
    ends = {"whole": whole(mode), "again": tmp_path / "again"}
    policies = [weights(folder / "run/global_step_5", tmp_path / f"{name}_hf") for name, folder in ends.items()]
    assert largest_difference(*policies) == 0


def test_kept_groups_are_trained_before_they_are_too_old(tmp_path, tiny_qwen2, whole):
    rows = metrics(whole("kept") / "run")
    assert max(row["training/filter_groups/kept_groups"] for row in rows) > 0
    assert {row["async/age_max"] for row in rows} == {0.0, 1.0}
    dropped = run(tmp_path / "dropped", tiny_qwen2, data__gen_batch_size=7)  # synchronous: none is kept
    assert max(row["training/filter_groups/kept_groups"] for row in dropped) == 0
    assert max(row["training/filter_groups/surplus_groups"] for row in dropped) > 0


def test_a_step_that_finds_no_group_ends_the_run_and_says_what_to_do(tmp_path, tiny_qwen2, capsys):
    reward = tmp_path / "constant.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    changes = {"custom_reward_function__path": reward, "algorithm__filter_groups__max_num_gen_batches": 2}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **CHANGES | changes)) == 2
    error = capsys.readouterr().err
    assert "max_num_gen_batches=2: after 2" in error and "0 of 4 groups" in error
    assert "8 of 8 generated groups" in error and "seq_reward is 1" in error


def test_a_metric_that_the_reward_function_does_not_return_is_named(tmp_path, tiny_qwen2, capsys):
    changes = CHANGES | {"algorithm__filter_groups__metric": "acc"}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) != 0
    assert "no 'acc', only score; return it" in capsys.readouterr().err


@pytest.mark.slow
def test_separate_concurrent_processes_train_as_one_process_does(tmp_path, tiny_qwen2, ray_cluster):
    runs = {}
    for backend in ("local", "ray"):
        pool = {"actor_rollout_ref__rollout__n_gpus_per_node": 2} if backend == "ray" else {}
        runs[backend] = run(tmp_path / backend, tiny_qwen2, trainer__backend=backend, trainer__lag=2, **pool)
    assert numbers(runs["ray"]) == numbers(runs["local"])
    policies = [weights(tmp_path / name / "run/global_step_5", tmp_path / f"{name}_hf") for name in runs]
    assert largest_difference(*policies) == 0
