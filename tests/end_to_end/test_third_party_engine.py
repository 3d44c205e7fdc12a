"""An engine that is one file outside the package trains in `main_ppo`, named by its import path."""

from pathlib import Path

import pytest

from hybridrl import main_ppo
from tests.support.end_to_end.runs import largest_difference, settings, train, weights

TOY = f"{Path(__file__).parents[1] / 'support' / 'third_party' / 'toy_engine.py'}:ToyEngine"


def test_two_steps_with_a_toy_engine_are_those_of_fsdp(tmp_path, tiny_qwen2):
    toy = {"actor_rollout_ref__actor__strategy": TOY, "actor_rollout_ref__actor__engine_config": "{foreach:true}"}
    rows = train(tmp_path / "toy", tiny_qwen2, **toy)
    expected = train(tmp_path / "fsdp", tiny_qwen2)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row, other in zip(rows[1:], expected[1:], strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert row[name] == pytest.approx(other[name], abs=1e-5, rel=1e-4), name
    found, wanted = (
        weights(tmp_path / name / "run" / "global_step_2", tmp_path / f"{name}_hf") for name in ("toy", "fsdp")
    )
    assert largest_difference(found, wanted) < 1e-4


def test_a_mistake_in_the_settings_of_a_toy_engine_is_refused_before_training(tmp_path, tiny_qwen2, capsys):
    changes = {"actor_rollout_ref__actor__strategy": TOY, "actor_rollout_ref__actor__engine_config": "{foreech:true}"}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) == 2
    refused = "actor_rollout_ref.actor.engine_config.foreech: there is no such key; did you mean foreach?"
    assert refused in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
