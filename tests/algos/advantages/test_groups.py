"""Estimators over groups: numbers worked out by hand, identities, and what does not change the result."""

import pytest
import torch

from hybridrl.algos.advantages import get_adv_estimator

F64 = torch.float64
NAMES = ("opo", "gpg", "grpo_passk", "grpo", "rloo")


def scores(rows, lengths=None, groups=None, valid=None, **kwargs):
    """Return the advantage of each row's first token for rows with these scores."""
    lengths = lengths or [1] * len(rows)
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards_BT = torch.zeros(mask_BT.shape, dtype=F64)
    rewards_BT[torch.arange(len(rows)), torch.tensor(lengths) - 1] = torch.tensor(rows, dtype=F64)
    group_B = torch.tensor(groups or [0] * len(rows))
    name = kwargs.pop("name")
    valid_B = None if valid is None else torch.tensor(valid)
    advantages_BT, returns_BT = get_adv_estimator(name)(rewards_BT, mask_BT, group_B=group_B, valid_B=valid_B, **kwargs)
    torch.testing.assert_close(advantages_BT, returns_BT)
    assert (advantages_BT[~mask_BT] == 0).all()
    return advantages_BT[:, 0].tolist()


def test_opo_weighs_the_baseline_by_length():
    # (1 * 4 + 3 * 0 + 4 * 1) / 8 = 1
    assert scores([4.0, 0.0, 1.0], [1, 3, 4], name="opo") == pytest.approx([3.0, -1.0, 0.0])
    assert scores([4.0], name="opo") == [0.0]


def test_opo_with_equal_lengths_is_centred_by_the_mean():
    found = scores([1.0, 2.0, 6.0], [2, 2, 2], name="opo")
    assert found == pytest.approx(scores([1.0, 2.0, 6.0], [2, 2, 2], name="grpo", norm_by_std=False))


def test_gpg_makes_up_for_groups_that_teach_nothing():
    # of six rows, two are in a group of different scores: alpha = 6 / 2
    rows, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
    assert scores(rows, groups=groups, name="gpg") == pytest.approx([1.5, -1.5, 0, 0, 0, 0])
    assert scores([1.0, 0.0], name="gpg") == pytest.approx([0.5, -0.5])
    assert scores([1.0, 1.0], name="gpg") == [0.0, 0.0]


def test_passk_gives_the_best_row_its_lead():
    rows, groups = [3.0, 1.0, 5.0, 5.0, 2.0, 7.0], [0, 0, 1, 1, 1, 2]
    assert scores(rows, groups=groups, norm_by_std=False, name="grpo_passk") == pytest.approx([2.0, 0, 0, 0, 0, 0])
    # std of (3, 1) is sqrt(2)
    assert scores(rows, groups=groups, name="grpo_passk")[0] == pytest.approx(2.0 / (2**0.5 + 1e-6))


def test_passk_does_not_count_rows_with_a_failed_reward():
    rows = [9.0, 3.0, 1.0]
    assert scores(rows, valid=[False, True, True], norm_by_std=False, name="grpo_passk") == [0.0, 2.0, 0.0]
    assert scores(rows, valid=[False, True, False], norm_by_std=False, name="grpo_passk") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "same"), [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")])
def test_verls_second_names_are_the_same_functions(name, same):
    assert get_adv_estimator(name).fn is get_adv_estimator(same).fn
