"""A run with `actor.use_prefix_grouper` learns what the run without it learns, from fewer computed tokens."""

import pytest

from tests.support.end_to_end.runs import largest_difference, train, weights


def test_a_run_with_shared_prompts_has_the_weights_of_one_without(tmp_path, tiny_qwen2):
    rows, found = {}, {}
    for shared in (False, True):
        folder = tmp_path / str(shared)
        rows[shared] = train(
            folder,
            tiny_qwen2,
            actor_rollout_ref__actor__use_prefix_grouper=shared,
            actor_rollout_ref__actor__use_kl_loss=True,
            trainer__test_freq=-1,
        )
        found[shared] = weights(folder / "run" / "global_step_2", folder / "export")
    assert largest_difference(found[False], found[True]) < 1e-4
    with_trees, without = rows[True][-1], rows[False][-1]
    assert with_trees["actor/pg_loss"] == pytest.approx(without["actor/pg_loss"], abs=1e-5)
    assert with_trees["perf/mfu/actor"] > 0 and not any("computed" in name for name in with_trees)
    # 3 samples of each prompt: two of its three copies are not computed
    assert 0.2 < with_trees["actor/shared_prefix_ratio"] < 2 / 3
    assert "actor/shared_prefix_ratio" not in without
