"""Masked statistics: values off the mask never matter, and an empty mask gives 0."""

import pytest
import torch

from hybridrl.algos.masked import masked_mean, masked_sum, masked_var, masked_whiten
from hybridrl.errors import DataError

NAN = float("nan")


def test_values_off_the_mask_are_not_read_even_if_they_are_nan():
    values_BT = torch.tensor([[1.0, 3.0, NAN], [8.0, NAN, NAN]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # 1 + 3 + 8 = 12, / 3 = 4; rows: 4 / 2 = 2, 8 / 1 = 8; variance ((-3)^2 + (-1)^2 + 4^2) / 2 = 13
    assert masked_sum(values_BT, mask_BT) == 12
    assert masked_mean(values_BT, mask_BT) == 4
    assert masked_mean(values_BT, mask_BT, dim=1).tolist() == [2, 8]
    assert masked_var(values_BT, mask_BT) == 13
    # (x - 4) / sqrt(13): -0.83205, -0.27735, 1.10940
    expected = torch.tensor([[-0.83205, -0.27735, 0.0], [1.10940, 0.0, 0.0]])
    torch.testing.assert_close(masked_whiten(values_BT, mask_BT), expected, atol=1e-5, rtol=0)


def test_whitened_values_have_mean_0_and_variance_1_or_keep_their_mean():
    values_BT, mask_BT = torch.randn(16, 33) * 5 + 7, torch.rand(16, 33) < 0.6
    whitened_BT = masked_whiten(values_BT, mask_BT)
    assert abs(float(masked_mean(whitened_BT, mask_BT))) < 1e-5
    assert float(masked_var(whitened_BT, mask_BT)) == pytest.approx(1, abs=1e-5)
    kept_mean_BT = masked_whiten(values_BT, mask_BT, shift_mean=False)
    assert float(masked_mean(kept_mean_BT, mask_BT)) == pytest.approx(float(masked_mean(values_BT, mask_BT)), abs=1e-4)


def test_variance_is_the_unbiased_one_of_torch():
    values_BT, mask_BT = torch.randn(5, 9, dtype=torch.float64), torch.rand(5, 9) < 0.5
    torch.testing.assert_close(masked_var(values_BT, mask_BT), values_BT[mask_BT].var())


def test_an_empty_mask_gives_zeros_and_a_single_value_is_whitened_to_zero():
    values_BT, empty_BT = torch.full((2, 3), 5.0), torch.zeros(2, 3, dtype=torch.int64)
    assert masked_mean(values_BT, empty_BT) == 0
    assert masked_var(values_BT, empty_BT) == 0
    assert masked_whiten(values_BT, empty_BT).tolist() == [[0, 0, 0], [0, 0, 0]]
    single_BT = empty_BT.clone()
    single_BT[0, 1] = 1
    assert masked_whiten(values_BT, single_BT).abs().max() == 0
    assert masked_whiten(values_BT, single_BT, shift_mean=False)[0, 1] == 5


@pytest.mark.parametrize("value", [0.1, 3.3, 33.3, 1234.6])
def test_equal_values_are_whitened_to_exactly_zero(value):
    mask_BT = torch.rand(64, 33) < 0.9
    assert masked_whiten(torch.full((64, 33), value), mask_BT).abs().max() == 0


def test_no_gradient_flows_off_the_mask():
    values_BT = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    masked_mean(values_BT, torch.tensor([[1, 1, 0]])).backward()
    assert values_BT.grad.tolist() == [[0.5, 0.5, 0.0]]


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(DataError, match=r"values \(2, 3\), mask \(2, 1\)"):
        masked_sum(torch.zeros(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
@pytest.mark.parametrize("dim", [None, 1])
def test_the_gradient_of_a_sum_is_that_of_its_formula_and_0_off_the_mask(reduce, dim):
    torch.manual_seed(0)
    values_BT = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.rand(5, 4) < 0.6
    weights = torch.randn(() if dim is None else (5,), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda values_BT: reduce(values_BT, mask_BT, dim=dim), values_BT)
    (reduce(values_BT, mask_BT, dim=dim) * weights).sum().backward()
    assert (values_BT.grad[~mask_BT] == 0).all() and (values_BT.grad[mask_BT] != 0).all()
