"""Metrics: names users know, numbers worked out by hand, and rows that must not count."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from hybridrl import DataProto
from hybridrl.errors import DataError
from hybridrl.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    expected_best,
    global_seqlen_metrics,
    majority_vote,
    pass_at_k,
    reward_extra_metrics,
    rollout_mismatch_metrics,
    validation_metrics,
)

LIMITS = {"max_response_length": 3, "max_prompt_length": 2}
NAN = float("nan")


def _batch(**replaced) -> DataProto:
    """Three rows, P = 2, R = 3: a full one, a short one, and an aborted one with nothing in the response."""
    columns = {
        "responses": torch.zeros(3, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        "token_level_rewards": torch.tensor([[0.0, 0.0, 0.8], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0], [-2.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        "returns": torch.tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        "values": torch.tensor([[0.5, 0.5, 0.5], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        "reward_valid": torch.tensor([True, True, True]),
    }
    return DataProto.from_dict(
        tensors={name: column for name, column in (columns | replaced).items() if column is not None}
    )


def _spread(mean, top, bottom):
    return {"mean": pytest.approx(mean), "max": pytest.approx(top), "min": pytest.approx(bottom)}


def _group(metrics, name):
    return {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if key.startswith(f"{name}/")}


# -- training


def test_reward_and_advantage_figures_leave_out_padding_and_aborted_rows():
    metrics = compute_data_metrics(_batch(), use_critic=True, **LIMITS)
    assert _group(metrics, "critic/score") == _spread(0.75, 1.0, 0.5)
    assert _group(metrics, "critic/rewards") == _spread(0.6, 0.8, 0.4)
    assert _group(metrics, "critic/advantages") == _spread(1.0, 3.0, -2.0)  # of 1, 2, 3, -2
    assert _group(metrics, "critic/returns") == _spread(0.75, 1.0, 0.0)
    assert _group(metrics, "critic/values") == _spread(0.5, 0.5, 0.5)


def test_length_figures_count_aborted_rows_once_and_leave_them_out_once():
    metrics = compute_data_metrics(_batch(), use_critic=False, **LIMITS)
    third = pytest.approx(1 / 3)
    assert _group(metrics, "response_length") == {**_spread(4 / 3, 3, 0), "clip_ratio": third}
    assert _group(metrics, "response_length_non_aborted") == {**_spread(2, 3, 1), "clip_ratio": 0.5}
    assert _group(metrics, "prompt_length") == {**_spread(5 / 3, 2, 1), "clip_ratio": pytest.approx(2 / 3)}
    assert metrics["response/aborted_ratio"] == third
    assert not any(name.startswith(("critic/values", "critic/vf")) for name in metrics), "no critic, no value figures"


def test_a_row_without_a_valid_reward_does_not_touch_the_means_but_its_length_counts():
    scores = torch.tensor([[0.0, 0.0, 1.0], [NAN, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = _batch(reward_valid=torch.tensor([True, False, True]), token_level_scores=scores)
    metrics = compute_data_metrics(batch, use_critic=True, **LIMITS)
    assert _group(metrics, "critic/score") == _spread(1.0, 1.0, 1.0)
    assert _group(metrics, "critic/advantages") == _spread(2.0, 3.0, 1.0)
    assert metrics["response_length/mean"] == pytest.approx(4 / 3)


def test_with_no_usable_row_the_figures_are_nan_and_the_names_stay():
    batch = _batch(reward_valid=torch.zeros(3, dtype=torch.bool))
    metrics = compute_data_metrics(batch, use_critic=True, **LIMITS)
    assert metrics.keys() == compute_data_metrics(_batch(), use_critic=True, **LIMITS).keys()
    assert math.isnan(metrics["critic/score/mean"]) and math.isnan(metrics["critic/vf_explained_var"])
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)


def test_a_batch_without_reward_valid_counts_every_row():
    assert compute_data_metrics(_batch(reward_valid=None), use_critic=False, **LIMITS)[
        "critic/score/mean"
    ] == pytest.approx(0.75)


def test_data_metrics_do_not_change_with_more_padding():
    columns = {name: column for name, column in _batch().batch.items() if name != "reward_valid"}
    more = {
        name: torch.cat([column, torch.full((3, 4), 7).to(column.dtype)], dim=1) for name, column in columns.items()
    }
    for padded_with_zero in ("attention_mask", "response_mask", "token_level_scores", "token_level_rewards"):
        more[padded_with_zero][:, -4:] = 0
    padded = compute_data_metrics(DataProto.from_dict(tensors=more), use_critic=True, **LIMITS)
    assert padded == pytest.approx(compute_data_metrics(_batch(), use_critic=True, **LIMITS))


def test_global_seqlen_compares_dealing_in_order_with_the_partitions():
    # in order: rows 0-2 and 3-4, 11 and 8 tokens; balanced: 9 and 10
    metrics = global_seqlen_metrics([1, 2, 8, 5, 3], [[0, 2], [1, 3, 4]])
    assert metrics == {
        "global_seqlen/min": 8,
        "global_seqlen/max": 11,
        "global_seqlen/minmax_diff": 3,
        "global_seqlen/balanced_min": 9,
        "global_seqlen/balanced_max": 10,
        "global_seqlen/mean": 9.5,
    }


def _mismatch(rollout, actor, mask):
    log_probs = {"rollout_log_probs": torch.tensor(rollout).log(), "old_log_probs": torch.tensor(actor).log()}
    return rollout_mismatch_metrics(DataProto.from_dict(tensors=log_probs | {"response_mask": torch.tensor(mask)}))


def test_rollout_mismatch_counts_response_tokens_only():
    metrics = _mismatch([[0.5, 0.2, 0.9]], [[0.5, 0.4, 0.1]], [[1, 1, 0]])  # differences 0 and 0.2
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.2 / math.sqrt(2))
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(math.log(2) / 2)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    # d = log(actor / rollout) = 0, log 2: weights 1 and 2, 3^2 / (2 * 5) of the sample; k3 = mean(0, 2 - log 2 - 1)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(2) / 2)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((1 - math.log(2)) / 2)
    assert metrics["rollout_corr/eff_sample_size"] == pytest.approx(0.9)


def test_rollout_mismatch_of_nothing_is_nan():
    metrics = _mismatch([[0.5]], [[0.5]], [[0]])
    assert len(metrics) == 20 and all(math.isnan(value) for value in metrics.values())


# -- time


def test_timing_is_per_response_token_for_generation_and_per_token_for_the_rest():
    metrics = compute_timing_metrics(_batch(), {"gen": 0.4, "update_actor": 1.8, "step": 3.0})  # 4 response, 9 tokens
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 0.4,
            "timing_s/update_actor": 1.8,
            "timing_s/step": 3.0,
            "timing_per_token_ms/gen": 100.0,
            "timing_per_token_ms/update_actor": 200.0,
        }
    )


def test_throughput_is_tokens_per_second_and_device():
    metrics = compute_throughput_metrics(_batch(), {"step": 1.5}, 3)
    assert metrics == {"perf/total_num_tokens": 9, "perf/time_per_step": 1.5, "perf/throughput": 2.0}


# -- validation


@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_best_is_the_mean_over_all_ordered_draws(k):
    values = np.array([0.3, -1.0, 2.0, 0.3])
    draws = [max(draw) for draw in itertools.product(values, repeat=k)]
    mean, std = expected_best(values, k)
    assert mean == pytest.approx(np.mean(draws)) and std == pytest.approx(np.std(draws))


def test_expected_best_is_what_resampling_estimates():
    values = np.array([0.0, 0.0, 1.0, 0.0])
    resampled = np.random.default_rng(0).choice(values, size=(100_000, 2)).max(1)
    assert expected_best(values, 2)[0] == pytest.approx(1 - 0.75**2)
    assert resampled.mean() == pytest.approx(expected_best(values, 2)[0], abs=0.01)


def test_pass_at_k_is_the_mean_over_all_subsets():
    samples = [1, 0, 0, 1, 0]
    for k in range(1, 6):
        subsets = [max(subset) for subset in itertools.combinations(samples, k)]
        assert pass_at_k(5, 2, k) == pytest.approx(np.mean(subsets))


@pytest.mark.parametrize("answers", [["7", "8", "8", "8", "8"], ["7", "7", "1", "2", "3"], ["7", "7", "8", "8", "9"]])
def test_majority_vote_is_close_to_the_mean_over_all_ordered_draws(answers):
    values = np.array([float(answer == "7") for answer in answers])
    draws = itertools.product(range(5), repeat=5)
    # most_common lists equally frequent answers in the order in which they came
    won = [Counter(answers[i] for i in draw).most_common(1)[0][0] == "7" for draw in draws]
    mean, std = majority_vote(values, answers, 5, seed=42)
    assert mean == pytest.approx(np.mean(won), abs=0.05) and std == pytest.approx(
        np.std(won), abs=0.05
    )  # 3 standard errors


def test_majority_of_equally_frequent_answers_is_the_first_drawn():
    mean, _ = majority_vote(np.array([1.0, 0.0]), ["a", "b"], 2, seed=42)
    assert mean == pytest.approx(0.5, abs=0.05)
    assert majority_vote(np.array([1.0, 0.0]), ["a", "b"], 2, seed=42)[0] == mean, "the seed fixes it"


def test_single_samples_give_the_mean_only():
    metrics = validation_metrics(["gsm8k"] * 4, list("abcd"), {"reward": [1.0, 0.0, 0.0, 0.0], "pred": list("abcd")})
    assert metrics == {"val-core/gsm8k/reward/mean@1": 0.25, "val-aux/gsm8k/reward/invalid_ratio": 0.0}


def test_names_and_numbers_of_two_sources_with_several_samples():
    sources = ["openai/gsm8k"] * 6 + ["math"]
    uids = ["a", "a", "a", "b", "b", "b", "c"]
    infos = {
        "reward": [1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 5.0],
        "acc": [True, False, False, False, False, False, None],
        "pred": ["1", "2", "2", "3", "3", "3", "4"],
        "comment": ["x"] * 7,
    }
    metrics = validation_metrics(sources, uids, infos)
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    assert core == {
        "val-core/openai/gsm8k/acc/mean@3": pytest.approx(1 / 6),
        "val-core/openai/gsm8k/acc/best@3/mean": pytest.approx((1 - (2 / 3) ** 3) / 2),
        "val-core/openai/gsm8k/acc/maj@3/mean": pytest.approx(
            7 / 27 / 2, abs=0.03
        ),  # at least 2 of 3 draws are the first
        "val-core/math/reward/mean@1": 5.0,
    }
    assert metrics["val-aux/openai/gsm8k/acc/pass@2"] == pytest.approx((2 / 3) / 2)
    assert metrics["val-aux/openai/gsm8k/acc/worst@3/mean"] == pytest.approx((1 / 27) / 2)
    assert metrics["val-aux/openai/gsm8k/reward/mean@3"] == pytest.approx((1.2 / 3 + 0.1) / 2)
    assert metrics["val-aux/openai/gsm8k/acc/std@3"] == pytest.approx(math.sqrt(2) / 3 / 2)
    assert "val-aux/openai/gsm8k/reward/pass@2" not in metrics, "pass@k is for 0/1 columns"
    assert not any("comment" in name for name in metrics)


def test_unscored_samples_are_left_out_of_every_column_and_counted():
    infos = {"reward": [1.0, NAN, 0.0, None], "acc": [1, 1, 0, 1]}
    metrics = validation_metrics(["s"] * 4, ["a", "a", "b", "b"], infos)
    assert metrics["val-core/s/acc/mean@2"] == 0.5 and metrics["val-aux/s/reward/mean@2"] == 0.5
    assert metrics["val-aux/s/reward/invalid_ratio"] == 0.5
    assert "val-aux/s/acc/pass@2" not in metrics, "no prompt has two samples left"
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_source_without_any_score_has_only_its_invalid_ratio():
    assert validation_metrics(["s"], ["a"], {"reward": [NAN]}) == {"val-aux/s/reward/invalid_ratio": 1.0}


def test_the_order_of_samples_does_not_matter():
    rng = np.random.default_rng(0)
    sources, uids, scores = ["s"] * 12, [str(i // 4) for i in range(12)], rng.random(12).tolist()
    order = rng.permutation(12)
    shuffled = validation_metrics(sources, [uids[i] for i in order], {"reward": [scores[i] for i in order]})
    assert shuffled == pytest.approx(validation_metrics(sources, uids, {"reward": scores}))


def test_sample_sizes_are_powers_of_two_and_the_number_of_samples():
    metrics = validation_metrics(["s"] * 6, ["a"] * 6, {"reward": [0.5] * 6})
    assert [name for name in metrics if "best@" in name and name.endswith("/mean")] == [
        "val-aux/s/reward/best@2/mean",
        "val-aux/s/reward/best@4/mean",
        "val-core/s/reward/best@6/mean",
    ]


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="'acc' has 1 entries for 2"):
        validation_metrics(["s", "s"], ["a", "b"], {"reward": [1, 2], "acc": [1]})
    with pytest.raises(DataError, match="'reward'; columns are acc"):
        validation_metrics(["s"], ["a"], {"acc": [1]})


def test_numbers_beside_the_score_are_averaged_over_the_rows_that_have_them():
    extra = {
        "acc": [1, 0, None, 1],
        "bonus": [0.5, 1.5, 1.0, 3.0],
        "text": ["a", "b", "c", "d"],
        "mixed": [1, "a", 2, 3],
    }
    assert reward_extra_metrics(extra) == {
        "reward_extra/acc/mean": pytest.approx(2 / 3),
        "reward_extra/bonus/mean": 1.5,
    }
    assert reward_extra_metrics({"none": [None, None]}) == {}
