"""PPO whose two processes share the tokens of every row.

It takes the steps of one process, and exports its weights.
"""

import pytest
import torch

from tests.support.end_to_end.runs import largest_difference, train, weights

ACTOR = "actor_rollout_ref__actor__"
PEERS = {
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
    f"{ACTOR}fsdp_config__ulysses_sequence_parallel_size": 2,
}
SAME = (
    *("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm"),
    "critic/score/mean",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_of_two_peers_takes_the_steps_of_one_process(tiny_qwen2, tiny_tokenizer, tmp_path, ray_cluster):
    from transformers import AutoModelForSequenceClassification

    scorer = tmp_path / "scorer"
    AutoModelForSequenceClassification.from_pretrained(tiny_qwen2, num_labels=1).save_pretrained(scorer)
    tiny_tokenizer.save_pretrained(scorer)
    ppo = {
        "algorithm__adv_estimator": "gae",
        f"{ACTOR}use_kl_loss": True,
        f"{ACTOR}entropy_coeff": 0.01,
        f"{ACTOR}use_prefix_grouper": True,
        "critic__optim__lr": 1e-3,
        "critic__model__use_remove_padding": True,
        "reward_model__enable": True,
        "reward_model__model__path": scorer,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
    }
    rows, found = {}, {}
    for name, layout in {"one": {}, "peers": PEERS}.items():
        torch.manual_seed(0)
        rows[name] = train(tmp_path / name, tiny_qwen2, **ppo, **layout)
        found[name] = weights(tmp_path / name / "run" / "global_step_2", tmp_path / name / "export")
    for one, peers in zip(rows["one"], rows["peers"], strict=True):
        for metric in SAME:
            assert peers[metric] == pytest.approx(one[metric], abs=1e-6, rel=1e-4), metric
        # the peers also compute the tokens that fill a row
        assert peers["actor/shared_prefix_ratio"] == pytest.approx(one["actor/shared_prefix_ratio"], abs=0.01)
    assert largest_difference(found["one"], found["peers"]) < 1e-5
