"""The critic's loss and its explained variance."""

import pytest
import torch

from hybridrl.algos.value_losses import clipped_value_loss, explained_variance
from hybridrl.errors import DataError


def test_clipped_value_loss_numbers_worked_out_by_hand():
    # old value 0, range 0.5, return 2:
    #   V = 0.3 inside the range: 1/2 * 1.7^2 = 1.445
    #   V = 1.0 -> clipped to 0.5: 1/2 * max(1, 2.25) = 1.125, clipped, no gradient
    #   V = -1.0 -> clipped to -0.5: 1/2 * max(9, 6.25) = 4.5, gradient V - G = -3
    values_BT = torch.tensor([[0.3, 1.0, -1.0]], requires_grad=True)
    losses_BT, clipped_BT = clipped_value_loss(values_BT, torch.zeros(1, 3), torch.full((1, 3), 2.0), cliprange=0.5)
    assert losses_BT[0].tolist() == pytest.approx([1.445, 1.125, 4.5])
    assert clipped_BT[0].tolist() == [False, True, False]
    losses_BT.sum().backward()
    assert values_BT.grad[0].tolist() == pytest.approx([-1.7, 0.0, -3.0])


def test_with_a_wide_range_it_is_half_the_squared_error():
    torch.manual_seed(0)
    values_BT, old_BT, returns_BT = torch.randn(3, 4, 5)
    losses_BT, clipped_BT = clipped_value_loss(values_BT, old_BT, returns_BT, cliprange=100.0)
    torch.testing.assert_close(losses_BT, 0.5 * (values_BT - returns_BT) ** 2)
    assert not clipped_BT.any()


def test_clipping_never_makes_the_loss_smaller():
    torch.manual_seed(0)
    values_BT, old_BT, returns_BT = torch.randn(3, 40, 5)
    losses_BT, clipped_BT = clipped_value_loss(values_BT, old_BT, returns_BT, cliprange=0.2)
    plain_BT = 0.5 * (values_BT - returns_BT) ** 2
    assert (losses_BT >= plain_BT).all()
    assert torch.equal(losses_BT > plain_BT, clipped_BT)


def test_explained_variance_of_perfect_constant_and_reversed_critics():
    returns_BT = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    mask_BT = torch.tensor([[1, 1], [1, 0]])
    assert explained_variance(returns_BT, returns_BT, mask_BT) == 1
    assert explained_variance(returns_BT + 5, returns_BT, mask_BT) == 1  # a constant offset is not variance
    assert explained_variance(torch.zeros(2, 2), returns_BT, mask_BT) == 0
    assert explained_variance(-returns_BT, returns_BT, mask_BT) == -3  # var(2 G) / var(G) = 4
    assert explained_variance(returns_BT, torch.ones(2, 2), mask_BT) == 0  # nothing to explain
    assert explained_variance(returns_BT, returns_BT, torch.zeros(2, 2)) == 0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(DataError, match=r"old_values \(2, 1\)"):
        clipped_value_loss(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3), cliprange=0.5)
