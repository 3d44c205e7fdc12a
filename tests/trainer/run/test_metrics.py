"""Means and sums over the generation batches of a step."""

from hybridrl.trainer.run.metrics import mean_over_batches


def test_numbers_of_samples_are_summed_and_other_metrics_averaged():
    batches = [{"reward/num_failed": 8.0, "rollout/agent/samples_left_out": 1.0, "a": 1.0}, {"reward/num_failed": 0.0}]
    found = mean_over_batches([*batches, {"reward/num_failed": 1.0, "a": 3.0}])
    assert found == {"reward/num_failed": 9.0, "rollout/agent/samples_left_out": 1.0, "a": 2.0}
