"""The picture of a run's stages: from its settings alone, without those that may name code."""

import pytest

from hybridrl.view.graph_picture import _words, graph_picture


def test_settings_that_may_name_code_do_not_reach_the_program_that_draws():
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.path": "evil.py:f",
        "trainer.middleware": ["evil.py:f"],
        "trainer.logger": "evil:Logger",
        "actor_rollout_ref.rollout.name": "evil.module:Rollout",
        "actor_rollout_ref.model.external_lib": "evil",
        "reward_model.reward_manager": "evil.py:f",
        "data.custom_cls.path": "evil.py",
        "actor_rollout_ref.rollout.n": 4,
        "algorithm.use_kl_in_reward": True,
        "hydra.run.dir": "evil",
    }
    words = _words(settings)
    assert "actor_rollout_ref.rollout.n=4" in words and "algorithm.use_kl_in_reward=true" in words
    assert "algorithm.adv_estimator=grpo" in words and not [word for word in words if "evil" in word]


def test_a_run_of_another_kind_has_no_picture():
    assert "only runs of PPO" in str(graph_picture({"optim.lr": 0.1}))


@pytest.mark.slow
def test_the_stages_are_drawn():
    picture = graph_picture({"algorithm.adv_estimator": "gae", "trainer.n_gpus_per_node": 2})
    assert isinstance(picture, bytes) and b"update_critic" in picture
