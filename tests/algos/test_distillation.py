"""Divergences of a student from its teacher: numbers worked out by hand, identities, gradients, chunks."""

import math

import pytest
import torch
from torch.nn import functional as F

from hybridrl.algos.distillation import (
    forward_kl,
    forward_kl_topk,
    reverse_kl,
    reverse_kl_topk,
    sampled_token_advantages,
    sampled_token_loss,
    top_ids,
    top_log_probs,
)
from hybridrl.algos.token_stats import log_probs_and_entropy, of_log_probs

STUDENT = torch.tensor([[0.5, 0.25, 0.25]]).log()
TEACHER = torch.tensor([[0.25, 0.25, 0.5]]).log()


def log_probs(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)


def topk(divergence, student: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    ids = top_ids(teacher, k)
    return divergence(student, ids, top_log_probs(teacher, ids))


def test_numbers_worked_out_by_hand():
    # forward: 0.25 log(0.25/0.5) + 0 + 0.5 log(0.5/0.25) = 0.25 log 2; the reverse has the same number here.
    assert forward_kl(STUDENT, TEACHER).item() == pytest.approx(0.25 * math.log(2))
    assert reverse_kl(STUDENT, TEACHER).item() == pytest.approx(0.25 * math.log(2))
    # Top 1 of the teacher is token 2. Bins {2}, {0, 1}: teacher 0.5, 0.5; student 0.25, 0.75.
    # forward 0.5 log(0.5/0.25) + 0.5 log(0.5/0.75) = 0.5 log(4/3); reverse 0.25 log(0.5) + 0.75 log(1.5).
    assert topk(forward_kl_topk, STUDENT, TEACHER, 1).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert topk(reverse_kl_topk, STUDENT, TEACHER, 1).item() == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    )


def test_the_sampled_tokens_estimates_worked_out_by_hand():
    # s = 0.5, p = 0.25: d = log 2. k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d = log 2 - 1/2.
    student, teacher = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}
    for kind, value in expected.items():
        assert sampled_token_loss(student, teacher, kind=kind).item() == pytest.approx(value)
        assert sampled_token_advantages(student, teacher, kind=kind).item() == pytest.approx(-value)
    assert sampled_token_loss(student, teacher, kind="k1", max_loss=0.1).item() == pytest.approx(0.1)
    assert sampled_token_loss(teacher, student, kind="k1", max_loss=0.1).item() == pytest.approx(-0.1)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expectation_of_the_sampled_token_is_the_reverse_kl(kind):
    # Flat ones, because k3 of a token is limited to 10.
    student, teacher = ((log_probs(4, 9, seed=seed) / 4).log_softmax(dim=-1) for seed in (0, 1))
    # Every token of the vocabulary once, weighted with the student's probability.
    estimates = sampled_token_loss(student, teacher, kind=kind)
    torch.testing.assert_close((student.exp() * estimates).sum(-1), reverse_kl(student, teacher), atol=1e-12, rtol=0)


def test_the_expected_gradient_of_the_advantages_and_of_k2_is_that_of_the_reverse_kl():
    logits, teacher = log_probs(1, 6).requires_grad_(), log_probs(1, 6, seed=1)
    [expected] = torch.autograd.grad(reverse_kl(logits.log_softmax(-1), teacher).sum(), logits)
    student = logits.log_softmax(-1)
    weight = student.exp().detach()  # of every token as the sampled one
    advantages = sampled_token_advantages(student, teacher, kind="k1")
    [found] = torch.autograd.grad((weight * -advantages * student).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    [found] = torch.autograd.grad((weight * sampled_token_loss(student, teacher, kind="k2")).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_over_the_whole_vocabulary_it_is_the_kl_of_torch():
    student, teacher = log_probs(5, 11), log_probs(5, 11, seed=1)
    expected = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(forward_kl(student, teacher), expected)
    expected = F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(reverse_kl(student, teacher), expected)


@pytest.mark.parametrize(("cut", "whole"), [(forward_kl_topk, forward_kl), (reverse_kl_topk, reverse_kl)])
def test_all_tokens_are_the_whole_kl_and_fewer_are_never_more(cut, whole):
    logits, teacher = log_probs(7, 12).requires_grad_(), log_probs(7, 12, seed=1)
    student = logits.log_softmax(-1)
    found, expected = topk(cut, student, teacher, 12), whole(student, teacher)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    values = torch.stack([topk(cut, student, teacher, k) for k in range(1, 13)])
    assert (values >= 0).all()
    assert (values.diff(dim=0) >= -1e-12).all()  # joining two bins never adds divergence


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl])
@pytest.mark.parametrize("k", [None, 1, 4, 9])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(divergence, k):
    logits = log_probs(3, 9).requires_grad_()
    student = logits.log_softmax(-1)
    if k is None:
        losses = divergence(student, student.detach())
    else:
        cut = {forward_kl: forward_kl_topk, reverse_kl: reverse_kl_topk}[divergence]
        losses = topk(cut, student, student.detach(), k)
    [gradient] = torch.autograd.grad(losses.sum(), logits)
    assert losses.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


def test_the_teacher_gets_no_gradient_and_a_limit_of_log_probs_holds():
    student, teacher = log_probs(2, 5).requires_grad_(), log_probs(2, 5, seed=1).requires_grad_()
    for divergence in (forward_kl, reverse_kl):
        divergence(student, teacher).sum().backward()
    sampled_token_loss(student, teacher, kind="k3").sum().backward()
    assert teacher.grad is None and student.grad is not None
    # s = (1 - 1e-9, 1e-9), p = (1e-9, 1 - 1e-9), limit -2: forward p_1 (log p_1 + 2) + exp(-2) (-2 - log s_0).
    rare = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64).log()
    found = forward_kl(rare, rare.flip(1), min_log_prob=-2)
    assert found.item() == pytest.approx(2 - 2 * math.exp(-2), abs=1e-6)


def test_impossible_tokens_have_no_effect():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[0.0, 2.0, -torch.inf]]).log_softmax(-1)
    losses = of_log_probs(logits, forward_kl, [teacher]) + of_log_probs(logits, reverse_kl, [teacher])
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad.isfinite().all() and logits.grad[0, 2] == 0


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_change_neither_values_nor_gradients(chunk):
    logits, teacher = log_probs(10, 7).float().requires_grad_(), log_probs(10, 7, seed=1).float()
    weights = torch.arange(10.0)
    expected = reverse_kl((logits / 0.7).log_softmax(-1), teacher)
    found = of_log_probs(logits, reverse_kl, [teacher], temperature=0.7, chunk=chunk)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((weights * x).sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_the_log_probs_of_tokens_are_those_of_the_training_log_probs():
    logits, labels = log_probs(6, 8).float(), torch.arange(6)
    found = of_log_probs(logits, lambda x, ids: x.gather(1, ids[:, None]).squeeze(1), [labels], temperature=2.0)
    torch.testing.assert_close(found, log_probs_and_entropy(logits, labels, temperature=2.0)[0])
    assert of_log_probs(logits[:0], lambda x, ids: x.sum(-1), [labels[:0]]).shape == (0,)
