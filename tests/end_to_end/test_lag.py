"""Asynchronous training: the same stages and losses, samples of a known age, the same run after a resume."""

import json

import pytest

from hybridrl import main_ppo
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
STEPS = {
    "trainer__total_training_steps": 5,
    "trainer__save_freq": 5,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
}
PARTIAL = {"trainer__partial_rollout": "true", "actor_rollout_ref__rollout__mode": "async"}
AGES = ("async/age_mean", "async/age_max", "async/off_policy_fraction")
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", "response_length/mean", *AGES)


def numbers(rows: list[dict]) -> list[list]:
    return [[row.get(name) for name in SAME] for row in rows]


def ages(rows: list[dict], name: str = "async/age_max") -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def level(tmp_path_factory, tiny_qwen2):
    """The metrics of the synchronous run."""
    return train(tmp_path_factory.mktemp("level"), tiny_qwen2, **STEPS)


@pytest.fixture(scope="module")
def behind(tmp_path_factory, tiny_qwen2):
    """The metrics of a run with a lag of 1."""
    return train(tmp_path_factory.mktemp("behind"), tiny_qwen2, trainer__lag=1, **STEPS)


def test_a_batch_is_exactly_as_many_versions_old_as_the_lag(tmp_path, tiny_qwen2, level):
    assert ages(level) == []
    rows = train(tmp_path / "2", tiny_qwen2, trainer__lag=2, **STEPS)
    assert ages(rows) == [0, 1, 2, 2, 2] == ages(rows, "async/age_mean")
    assert ages(rows, "async/off_policy_fraction") == [0, 1, 1, 1, 1]
    assert [row["training/global_step"] for row in rows if "training/global_step" in row] == [1, 2, 3, 4, 5]


def test_with_a_lag_only_the_first_step_equals_the_synchronous_one(behind, level):
    assert behind[0]["actor/grad_norm"] == level[0]["actor/grad_norm"]
    assert behind[2]["actor/grad_norm"] != level[2]["actor/grad_norm"]


@pytest.mark.slow
def test_separate_concurrent_processes_train_as_one_process_does(tmp_path, tiny_qwen2, ray_cluster):
    train(tmp_path / "local", tiny_qwen2, trainer__lag=2, **PARTIAL, **STEPS)
    changes = PARTIAL | {"trainer__backend": "ray", "actor_rollout_ref__rollout__n_gpus_per_node": 2}
    train(tmp_path / "ray", tiny_qwen2, trainer__lag=2, **changes, **STEPS)
    assert numbers(metrics(tmp_path / "ray/run")) == numbers(metrics(tmp_path / "local/run"))
    policies = [weights(tmp_path / where / "run/global_step_5", tmp_path / f"{where}_hf") for where in ("local", "ray")]
    assert largest_difference(*policies) == 0


def test_partial_rollouts_mix_versions_within_a_response(tmp_path, tiny_qwen2):
    rows = train(tmp_path / "3", tiny_qwen2, trainer__lag=3, **PARTIAL, **STEPS)
    assert ages(rows) == [0, 1, 2, 3, 3]
    mean = ages(rows, "async/age_mean")
    assert 1 <= mean[-1] < 3 and 0 < mean[1] <= 1


def test_without_training_the_parts_of_responses_are_whole_responses(tmp_path, tiny_qwen2):
    still = STEPS | {
        "trainer__lag": 3,
        "data__max_response_length": 20,
        "actor_rollout_ref__actor__optim__lr": 1e-20,  # too small to change a weight
        "actor_rollout_ref__rollout__stop_token_ids": [*range(60, 100)],  # a token in ten or so ends a response
    }
    for name, partial in (("whole", {}), ("parts", PARTIAL)):
        train(tmp_path / name, tiny_qwen2, trainer__rollout_data_dir=tmp_path / name / "rollouts", **still | partial)
    for step in range(1, 6):
        whole, parts = (
            [json.loads(line)["output"] for line in (tmp_path / name / f"rollouts/{step}.jsonl").open()]
            for name in ("whole", "parts")
        )
        assert whole == parts and len({*map(len, whole)}) > 1


@pytest.mark.parametrize(
    ("partial", "estimator"), [({}, "rloo"), pytest.param(PARTIAL, "grpo", marks=pytest.mark.slow), (PARTIAL, "remax")]
)
def test_a_resumed_run_continues_with_the_pending_batches(tmp_path, tiny_qwen2, partial, estimator):
    changes = STEPS | partial | {"trainer__lag": 2, "algorithm__adv_estimator": estimator}
    changes["algorithm__normalize_reward"] = str(estimator == "rloo").lower()  # which is not invariant to the scale
    train(tmp_path / "whole", tiny_qwen2, **changes)
    train(tmp_path / "parts", tiny_qwen2, **changes | {"trainer__total_training_steps": 5, "trainer__save_freq": 3})
    folder = tmp_path / "parts/run"
    kinds = ["greedy"] * (estimator == "remax") + ["responses", "rest"]
    expected = [f"{number}.{kind}" for number in range(2) for kind in kinds]
    assert sorted(p.name for p in (folder / "global_step_3/ahead").iterdir()) == expected
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / 'global_step_3'}"]
    other = tmp_path / "again"
    other.mkdir()
    assert main_ppo.main([*settings(other, tiny_qwen2, **changes), *again]) == 0
    assert numbers(metrics(other / "run")) == numbers(metrics(tmp_path / "whole/run"))[3:]
    policies = [
        weights(where / "run/global_step_5", tmp_path / f"{where.name}_hf") for where in (tmp_path / "whole", other)
    ]
    assert largest_difference(*policies) == 0


def test_a_bound_on_staleness_is_kept_by_waiting_or_by_dropping_tokens(tmp_path, tiny_qwen2, behind):
    waiting = train(tmp_path / "wait", tiny_qwen2, trainer__lag=3, trainer__staleness=1, **STEPS)
    assert numbers(waiting) == numbers(behind)
    changes = STEPS | PARTIAL | {"trainer__lag": 3}
    dropping = train(tmp_path / "drop", tiny_qwen2, trainer__staleness=2, trainer__stale_tokens="drop", **changes)
    keeping = train(tmp_path / "keep", tiny_qwen2, **changes)
    assert ages(dropping)[:3] == ages(keeping)[:3] == [0, 1, 2]
    norms = [[row["actor/grad_norm"] for row in rows[:4]] for rows in (dropping, keeping)]
    assert norms[0][:3] == norms[1][:3] and norms[0][3] != norms[1][3]


def test_importance_weights_are_one_where_trainer_and_rollout_agree(tmp_path, tiny_qwen2):
    changes = STEPS | {"algorithm__rollout_correction__rollout_is": "token"}
    level = train(tmp_path / "0", tiny_qwen2, **changes)
    assert all(
        abs(row["rollout_corr/rollout_is_mean"] - 1) < 1e-4 and row["rollout_corr/rollout_is_eff_sample_size"] > 0.9999
        for row in level
    )
    behind = train(tmp_path / "2", tiny_qwen2, trainer__lag=2, **changes)
    assert behind[-1]["rollout_corr/rollout_is_raw_max"] > 1.001


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer.backend": "ray", "trainer.lag": 1},
            "trainer.lag=1: generation and training cannot run concurrently in the same processes",
        ),
        ({"trainer.partial_rollout": "true", "trainer.lag": 1}, "set trainer.lag=2 or more, not 1"),
        ({"trainer.partial_rollout": "true", "trainer.lag": 2}, "set actor_rollout_ref.rollout.mode=async"),
        (
            {
                "trainer.partial_rollout": "true",
                "trainer.lag": 2,
                "trainer.staleness": 1,
                "trainer.stale_tokens": "wait",
            },
            "set trainer.staleness=2 or more, not 1",
        ),
        ({"trainer.staleness": 3, "trainer.lag": 1}, "trainer.staleness=3: no token gets older than trainer.lag=1"),
        ({"trainer.staleness": 0, "trainer.lag": 1, "trainer.stale_tokens": "drop"}, "all of them would be dropped"),
        ({"actor_rollout_ref.rollout.n_gpus_per_node": 1}, "trainer.backend=local has one process only"),
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "actor_rollout_ref.rollout.calculate_log_probs": "false",
            },
            "set actor_rollout_ref.rollout.calculate_log_probs=true",
        ),
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(tmp_path, tiny_qwen2, capsys, changes, message):
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *(f"{key}={value}" for key, value in changes.items())]) == 2
    assert message in capsys.readouterr().err


REPLAY = STEPS | {
    "trainer__replay__groups": 2,
    "trainer__staleness": 3,
    "algorithm__rollout_correction__rollout_is": "token",
}


def test_replayed_groups_are_added_to_a_batch_up_to_an_age(tmp_path, tiny_qwen2, level):
    rows = train(tmp_path / "replay", tiny_qwen2, actor_rollout_ref__rollout__calculate_log_probs="true", **REPLAY)
    assert ages(rows, "replay/rows") == [0, 6, 6, 6, 6], "two groups of three"
    assert ages(rows)[0] == 0 and 1 <= max(ages(rows)) <= 3
    assert all(0 < share < 1 for share in ages(rows, "async/off_policy_fraction")[1:])
    assert rows[0]["actor/grad_norm"] == pytest.approx(level[0]["actor/grad_norm"], rel=1e-5)
    assert abs(rows[1]["actor/grad_norm"] / level[1]["actor/grad_norm"] - 1) > 0.01
    assert rows[1]["critic/score/mean"] == level[1]["critic/score/mean"], "the curve is that of new samples"


def test_a_resumed_run_replays_what_the_whole_one_replays(tmp_path, tiny_qwen2):
    changes = REPLAY | {"actor_rollout_ref__rollout__calculate_log_probs": "true"}
    whole = train(tmp_path / "whole", tiny_qwen2, **changes)
    train(tmp_path / "parts", tiny_qwen2, **changes | {"trainer__save_freq": 3})
    path = tmp_path / "parts/run/global_step_3"
    again = train(
        tmp_path / "again", tiny_qwen2, **changes, trainer__resume_mode="resume_path", trainer__resume_from_path=path
    )
    assert numbers(again) == numbers(whole[-len(again) :]) and len(again) == 2
    policies = [
        weights(tmp_path / where / "run/global_step_5", tmp_path / f"{where}_hf") for where in ("whole", "again")
    ]
    assert largest_difference(*policies) == 0
