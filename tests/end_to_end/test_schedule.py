"""Learning-rate schedules end where training ends."""

import math

import pytest

from tests.support.end_to_end.runs import train


def cosine(step: int, total: int) -> float:
    return 1e-3 * (1 + math.cos(math.pi * step / total)) / 2


def test_the_last_optimizer_step_has_the_last_rate_of_the_schedule(tmp_path, tiny_qwen2):
    rows = train(
        tmp_path,
        tiny_qwen2,
        algorithm__adv_estimator="gae",
        actor_rollout_ref__actor__optim__lr_scheduler_type="cosine",
        critic__optim__lr=1e-3,
        critic__optim__lr_scheduler_type="cosine",
        trainer__critic_warmup=2,
        trainer__total_training_steps=6,
        trainer__save_freq=-1,
        trainer__test_freq=-1,
        trainer__val_before_train=False,
    )
    # 10 prompts in batches of 4, 4, 2 make 2, 2, 1 optimizer steps; the actor joins in the third batch: 1 + 2 + 2 + 1
    # of its own
    assert rows[2]["actor/lr"] == pytest.approx(cosine(0, 6)) and rows[5]["actor/lr"] == pytest.approx(cosine(5, 6))
    assert rows[5]["critic/lr"] == pytest.approx(cosine(9, 10))
