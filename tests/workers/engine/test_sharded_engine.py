"""Learning rates, worked out by hand."""

import pytest

from hybridrl.config.schema.workers import OptimConfig
from hybridrl.workers.engine.sharded_engine import learning_rate, lr_factor


def factors(shape: str, *, steps: int, warmup: int, total: int, low: float = 0.0) -> list[float]:
    return [lr_factor(k, shape=shape, warmup_steps=warmup, total_steps=total, min_lr_ratio=low) for k in range(steps)]


def test_warm_up_rises_linearly_without_a_step_at_zero_and_then_stays():
    assert factors("constant", steps=6, warmup=4, total=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_falls_by_equal_amounts_to_the_smallest_rate():
    # 2 warm-up steps, then x = 0, 1/4, 2/4, 3/4, 1, 1 and 0.2 + 0.8 (1 - x)
    assert factors("linear", steps=8, warmup=2, total=6, low=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_decay_is_half_way_in_the_middle():
    # x = 0, 1/4, 1/2, 3/4, 1: (1 + cos(pi x)) / 2 = 1, 0.853553, 0.5, 0.146447, 0
    assert factors("cosine", steps=5, warmup=0, total=4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_warm_up_steps_go_before_the_ratio_and_minus_one_means_the_ratio():
    # ratio 0.25 of 10 steps is 2, rounded down
    by_ratio = OptimConfig(lr=2.0, lr_warmup_steps_ratio=0.25)
    assert [learning_rate(by_ratio, k, total_steps=10) for k in range(3)] == [1.0, 2.0, 2.0]
    both = OptimConfig(lr=2.0, lr_warmup_steps_ratio=0.25, lr_warmup_steps=0)
    assert learning_rate(both, 0, total_steps=10) == 2.0


def test_a_run_without_a_length_keeps_the_peak_rate():
    assert learning_rate(OptimConfig(lr=0.5), 1000, total_steps=0) == 0.5
