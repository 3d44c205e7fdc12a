"""Formulas in parts of rows: the numbers and gradients of whole tensors, and nothing kept between the passes."""

import pytest
import torch

from hybridrl.algos import POLICY_LOSSES, clipped_value_loss, masked, masked_sum
from hybridrl.algos.policy_losses import get_policy_loss, vanilla
from hybridrl.algos.row_wise import row_wise
from hybridrl.errors import DataError

B, T = 12, 6
CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # a vectorised exp or sigmoid may round otherwise at the end of a part
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


def samples() -> list[torch.Tensor]:
    """Return log-probs, old ones, advantages, and a mask (B, T) with rows of 0 to T tokens."""
    torch.manual_seed(0)
    return [*torch.randn(3, B, T), (torch.arange(T) < torch.arange(B)[:, None]).float()]


def results_and_gradient(formula, columns, **settings) -> list[torch.Tensor]:
    leaf = columns[0].clone().requires_grad_()
    results = formula(leaf, *columns[1:], **settings)
    (results[0] * torch.arange(T)).sum().backward()
    assert not any(result.requires_grad for result in results[1:])
    return [*(result.detach() for result in results), leaf.grad]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_in_parts_is_that_of_the_whole_batch(name, monkeypatch):
    columns, settings = samples(), CLIP | ({"dro_beta": 0.5} if name == "dro" else {})
    whole = results_and_gradient(get_policy_loss(name), columns, **settings)
    monkeypatch.setattr(masked, "CPU_PART_ELEMENTS", 5 * T)  # parts of 5, 5 and 2 rows
    torch.testing.assert_close(results_and_gradient(get_policy_loss(name), columns, **settings), whole, **CLOSE)


def test_the_value_loss_in_parts_is_that_of_the_whole_batch(monkeypatch):
    columns = samples()[:3]
    whole = results_and_gradient(clipped_value_loss, columns, cliprange=0.5)
    monkeypatch.setattr(masked, "CPU_PART_ELEMENTS", T)
    torch.testing.assert_close(results_and_gradient(clipped_value_loss, columns, cliprange=0.5), whole, **CLOSE)


def test_the_backward_pass_keeps_only_the_arguments(monkeypatch):
    monkeypatch.setattr(masked, "CPU_PART_ELEMENTS", T)
    kept, columns = [], samples()
    columns[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        vanilla(*columns, **CLIP)
    assert [tensor.data_ptr() for tensor in kept] == [column.data_ptr() for column in columns]


def test_columns_of_other_shapes_are_refused_and_columns_by_name_are_taken_as_they_are(monkeypatch):
    monkeypatch.setattr(masked, "CPU_PART_ELEMENTS", T)
    first, second = samples()[:2]
    doubled = row_wise(lambda x_BT, y_BT: (2 * x_BT, y_BT.new_zeros(()).expand(y_BT.shape)))
    assert doubled(first, second)[1].stride() == (0, 0)
    assert torch.equal(doubled(first, y_BT=second[:1])[0], 2 * first)
    with pytest.raises(DataError, match=r"x \(12, 6\), y \(1, 6\)"):
        doubled(first, second[:1])


@pytest.mark.parametrize("dim", [None, 1])
def test_a_sum_of_flags_counts_those_on_the_mask(dim):
    flags_BT, mask_BT = samples()[0] > 0, samples()[3]
    found = masked_sum(flags_BT, mask_BT, dim=dim)
    assert torch.equal(found, (flags_BT & mask_BT.bool()).sum(dim)) and found.sum() > 0
