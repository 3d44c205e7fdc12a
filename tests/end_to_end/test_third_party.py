"""Parts from one file outside the package take part in a whole run, by their import path."""

from pathlib import Path

import pytest

from hybridrl import main_ppo
from tests.support.end_to_end.runs import settings, train

TOYS = Path(__file__).parents[1] / "support" / "third_party"
ROLLOUT = {"actor_rollout_ref__rollout__name": f"{TOYS / 'toy_rollout.py'}:ToyRollout"}
SHORT = {"trainer__save_freq": -1, "trainer__val_before_train": "false"}


def test_a_rollout_from_a_file_trains_two_steps_in_one_process(tmp_path, tiny_qwen2):
    rows = [row for row in train(tmp_path, tiny_qwen2, **ROLLOUT, **SHORT) if "actor/grad_norm" in row]
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    # Its log-probs are those of the weights that training holds, so every push arrived.
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 for row in rows)


@pytest.mark.slow
def test_a_rollout_from_a_file_gets_weights_from_other_processes(tmp_path, tiny_qwen2, ray_cluster):
    pools = {"trainer__backend": "ray", "actor_rollout_ref__rollout__n_gpus_per_node": 2}
    rows = [row for row in train(tmp_path, tiny_qwen2, **ROLLOUT, **SHORT, **pools) if "actor/grad_norm" in row]
    assert len(rows) == 2 and all(row["training/rollout_probs_diff_max"] < 1e-3 for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sglang"}, "'sglang' is not a known rollout"),
        ({"name": "nowhere.py:Toy"}, "actor_rollout_ref.rollout.name=nowhere.py:Toy: no file nowhere.py"),
        ({"name": f"{TOYS / 'toy_rollout.py'}:SamplingParams"}, "is not a rollout; derive a class from"),
        ({"mode": "async"}, "actor_rollout_ref.rollout.mode=async: needs the capability requests, which"),
        ({"top_k": 3}, "actor_rollout_ref.rollout.top_k=3: "),
    ],
    ids=str,
)
def test_what_a_rollout_cannot_do_is_refused_before_anything_starts(tmp_path, tiny_qwen2, capsys, changes, message):
    words = settings(tmp_path, tiny_qwen2, **ROLLOUT)
    assert main_ppo.main([*words, *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in changes.items())]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
