"""Log-probs and entropy from logits: against plain autograd in float64, low precision, and memory."""

import math

import pytest
import torch

from hybridrl.algos.token_stats import log_probs_and_entropy, token_stats
from hybridrl.errors import DataError


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def reference(logits_NV, labels_N, temperature):
    log_softmax_NV = torch.log_softmax(logits_NV.double() / temperature, dim=-1)
    return log_softmax_NV.gather(1, labels_N[:, None])[:, 0], -(log_softmax_NV.exp() * log_softmax_NV).sum(-1)


def test_numbers_worked_out_by_hand():
    # probabilities 1/2, 1/4, 1/4: entropy 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2; at temperature 1/2 they are 2/3, 1/6, 1/6
    logits_NV, labels_N = torch.tensor([[0.5, 0.25, 0.25]] * 2).log(), torch.tensor([0, 2])
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, labels_N, with_entropy=True)
    assert log_probs_N.tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    assert entropy_N.tolist() == pytest.approx([1.5 * math.log(2)] * 2)
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, labels_N, temperature=0.5)
    assert log_probs_N.tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 6)])
    assert entropy_N is None


@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients_equal_plain_autograd_in_float64(chunk, with_entropy):
    logits_NV, labels_N = torch.randn(10, 33) * 4, torch.randint(33, (10,))
    weight_N, bonus_N = torch.randn(2, 10)
    ours_NV, exact_NV = logits_NV.clone().requires_grad_(), logits_NV.double().requires_grad_()
    log_probs_N, entropy_N = log_probs_and_entropy(
        ours_NV, labels_N, temperature=0.7, with_entropy=with_entropy, chunk=chunk
    )
    exact_log_probs_N, exact_entropy_N = reference(exact_NV, labels_N, 0.7)
    torch.testing.assert_close(log_probs_N.double(), exact_log_probs_N, atol=1e-5, rtol=1e-5)
    loss, exact = (log_probs_N * weight_N).sum(), (exact_log_probs_N * weight_N).sum()
    if with_entropy:
        torch.testing.assert_close(entropy_N.double(), exact_entropy_N, atol=1e-5, rtol=1e-5)
        loss, exact = loss + (entropy_N * bonus_N).sum(), exact + (exact_entropy_N * bonus_N).sum()
    loss.backward()
    exact.backward()
    torch.testing.assert_close(ours_NV.grad.double(), exact_NV.grad, atol=1e-5, rtol=1e-4)


def test_entropy_alone_has_its_gradient():
    logits_NV, labels_N = torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)
    ours_NV, exact_NV = logits_NV.clone().requires_grad_(), logits_NV.double().requires_grad_()
    log_probs_and_entropy(ours_NV, labels_N, with_entropy=True)[1].sum().backward()
    reference(exact_NV, labels_N, 1.0)[1].sum().backward()
    torch.testing.assert_close(ours_NV.grad.double(), exact_NV.grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_are_converted_to_float32_first_and_get_gradients_of_their_own_dtype():
    logits_NV = (torch.randn(6, 1000) * 5).bfloat16().requires_grad_()
    labels_N = torch.randint(1000, (6,))
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, labels_N, with_entropy=True)
    exact_log_probs_N, exact_entropy_N = reference(logits_NV, labels_N, 1.0)
    assert (log_probs_N.dtype, entropy_N.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(log_probs_N.double(), exact_log_probs_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.double(), exact_entropy_N, atol=1e-5, rtol=1e-5)
    log_probs_N.sum().backward()
    assert logits_NV.grad.dtype == torch.bfloat16


def test_tokens_that_cannot_occur_make_no_nan():
    logits_NV = torch.tensor([[1.0, 1.0, -math.inf], [0.0, -math.inf, -math.inf]], requires_grad=True)
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, torch.tensor([0, 0]), with_entropy=True)
    assert entropy_N.tolist() == pytest.approx([math.log(2), 0.0])
    (1e6 * entropy_N.sum() + log_probs_N.sum()).backward()
    assert torch.isfinite(logits_NV.grad).all()


def test_each_row_of_the_gradient_sums_to_zero_because_a_shift_of_logits_changes_nothing():
    logits_NV = torch.randn(8, 50, requires_grad=True)
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, torch.randint(50, (8,)), with_entropy=True)
    (log_probs_N.sum() + entropy_N.sum()).backward()
    assert logits_NV.grad.sum(dim=1).abs().max() < 1e-5
    shifted_N, _ = log_probs_and_entropy(logits_NV.detach() + 100, torch.zeros(8, dtype=torch.int64))
    plain_N, _ = log_probs_and_entropy(logits_NV.detach(), torch.zeros(8, dtype=torch.int64))
    torch.testing.assert_close(shifted_N, plain_N, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_the_sum_of_squared_probabilities_is_that_of_the_softmax_and_changes_no_gradient(chunk):
    logits_NV = (torch.randn(7, 50) * 3).requires_grad_()
    labels_N = torch.randint(50, (7,))
    more = {"temperature": 0.7, "with_entropy": True, "chunk": chunk}
    found = token_stats(logits_NV, labels_N, with_sum_pi_squared=True, **more)
    torch.testing.assert_close(found.sum_pi_squared_N, ((logits_NV / 0.7).softmax(-1) ** 2).sum(-1).detach())
    assert not found.sum_pi_squared_N.requires_grad
    [with_squares] = torch.autograd.grad((found.log_probs_N + found.entropy_N).sum(), logits_NV)
    plain = log_probs_and_entropy(logits_NV, labels_N, **more)
    torch.testing.assert_close(with_squares, torch.autograd.grad(sum(x.sum() for x in plain), logits_NV)[0])


def test_the_sum_of_squares_of_equal_logits_is_one_over_the_vocabulary():
    found = token_stats(torch.zeros(2, 4), torch.tensor([0, 1]), with_sum_pi_squared=True)
    assert found.sum_pi_squared_N.tolist() == [0.25, 0.25]
    certain_NV = torch.tensor([[1.0, -math.inf, -math.inf]])
    assert token_stats(certain_NV, torch.tensor([0]), with_sum_pi_squared=True).sum_pi_squared_N.tolist() == [1.0]


def test_only_the_logits_themselves_are_kept_for_the_backward_pass():
    logits_NV = torch.randn(64, 100).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        log_probs_and_entropy(logits_NV, torch.zeros(64, dtype=torch.int64), with_entropy=True)
    large = [tensor for tensor in kept if tensor.numel() > 64]
    assert [tensor.data_ptr() for tensor in large] == [logits_NV.data_ptr()]


def test_no_tokens_and_no_gradient_work():
    log_probs_N, entropy_N = log_probs_and_entropy(
        torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), with_entropy=True
    )
    assert (log_probs_N.shape, entropy_N.shape) == ((0,), (0,))
    logits_NV = torch.randn(3, 5, requires_grad=True)
    with torch.no_grad():
        assert not log_probs_and_entropy(logits_NV, torch.zeros(3, dtype=torch.int64))[0].requires_grad


def test_refusals_name_the_value():
    with pytest.raises(DataError, match=r"are \(2, 3, 4\) and \(2,\)"):
        log_probs_and_entropy(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"are \(2, 3\) and \(3,\)"):
        log_probs_and_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        log_probs_and_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), temperature=0)
