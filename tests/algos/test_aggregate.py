"""Aggregation: numbers by hand for each mode, and independence of the split into micro-batches."""

import pytest
import torch

from hybridrl.algos.aggregate import agg_loss, loss_counts
from hybridrl.errors import ConfigError, DataError

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("mode", "expected"),
    # rows 1 + 2 + 3 = 6 (mean 2), 10 (mean 10), and one without tokens; 4 tokens, 2 sequences, T = 4
    list(zip(MODES, (16 / 4, 16, 16 / 2, 12 / 2, 16 / 2 / 4), strict=True)),
)
def test_numbers_worked_out_by_hand(mode, expected):
    nan = float("nan")
    losses_BT = torch.tensor([[1.0, 2.0, 3.0, nan], [10.0, 5.0, nan, 5.0], [nan, 1.0, 1.0, 1.0]])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    num_tokens, num_seqs = loss_counts(mask_BT)
    assert (num_tokens, num_seqs) == (4, 2)
    assert agg_loss(losses_BT, mask_BT, mode, num_tokens=num_tokens, num_seqs=num_seqs).item() == pytest.approx(
        expected
    )


def test_the_norm_of_dr_grpo_is_a_constant_if_given():
    losses_BT = torch.ones(2, 4)
    # 8 / 2 sequences / 16
    assert agg_loss(losses_BT, losses_BT, "seq-mean-token-sum-norm", num_tokens=8, num_seqs=2, max_len=16) == 0.25


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_any_size_add_up_to_the_whole_in_loss_and_gradient(mode):
    torch.manual_seed(0)
    losses_BT = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.arange(6) < torch.randint(0, 7, (11, 1))
    num_tokens, num_seqs = (torch.tensor(count) for count in loss_counts(mask_BT))
    assert num_seqs < 11
    whole = agg_loss(losses_BT, mask_BT, mode, num_tokens=num_tokens, num_seqs=num_seqs)
    whole.backward()
    whole_gradient_BT, losses_BT.grad = losses_BT.grad, None
    for size in (1, 2, 4):
        parts = [
            agg_loss(losses, mask, mode, num_tokens=num_tokens, num_seqs=num_seqs)
            for losses, mask in zip(losses_BT.split(size), mask_BT.split(size), strict=True)
        ]
        torch.testing.assert_close(sum(parts), whole)
        sum(parts).backward()
        torch.testing.assert_close(losses_BT.grad, whole_gradient_BT)
        losses_BT.grad = None


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_has_loss_and_gradient_0(mode):
    losses_BT = torch.ones(2, 3, requires_grad=True)
    for counts in ((0, 0), (torch.tensor(0), torch.tensor(0))):
        loss = agg_loss(losses_BT, torch.zeros(2, 3), mode, num_tokens=counts[0], num_seqs=counts[1])
        loss.backward()
        assert loss == 0
    assert losses_BT.grad.abs().max() == 0


def test_an_unknown_mode_and_other_shapes_are_refused():
    ones_BT = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="loss_agg_mode='token_mean'.*did you mean 'token-mean'"):
        agg_loss(ones_BT, ones_BT, "token_mean", num_tokens=6, num_seqs=2)
    with pytest.raises(DataError, match="same shape"):
        agg_loss(ones_BT, ones_BT[:, :1], "token-mean", num_tokens=6, num_seqs=2)


def test_rows_of_equal_length_make_the_means_equal_and_sums_are_means_times_counts():
    torch.manual_seed(0)
    losses_BT, mask_BT = torch.randn(4, 6, dtype=torch.float64), torch.ones(4, 6)
    found = {mode: agg_loss(losses_BT, mask_BT, mode, num_tokens=24, num_seqs=4).item() for mode in MODES}
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum-norm"):
        assert found[mode] == pytest.approx(found["token-mean"])
    assert found["token-sum"] == pytest.approx(24 * found["token-mean"])
    assert found["seq-mean-token-sum"] == pytest.approx(6 * found["token-mean"])
