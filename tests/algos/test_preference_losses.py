"""Preference losses: numbers worked out by hand, identities between losses, gradients, and TRL's formulas.

Shape letters: N pairs, B responses, T tokens.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from hybridrl.algos.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    bradley_terry,
    dpo,
    ipo,
    kto,
    kto_baseline,
    orpo,
    register_preference_loss,
    sequence_scores,
    simpo,
)
from hybridrl.errors import ConfigError, DataError


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(n: int = 50, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen_N, rejected_N = torch.randn(2, n, generator=generator, dtype=torch.float64) * 3
    return chosen_N.requires_grad_(), rejected_N.requires_grad_()


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_of_equal_scores_is_log_2_with_slope_half_beta():
    chosen_N, rejected_N = numbers(-3.0).requires_grad_(), numbers(-3.0).requires_grad_()
    loss = dpo(chosen_N, rejected_N, beta=0.2).sum()
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert (chosen_N.grad.item(), rejected_N.grad.item()) == (pytest.approx(-0.1), pytest.approx(0.1))


def test_dpo_worked_out_by_hand():
    # h = 0.5 (4 - 2) = 1: -log sigma(1) = log(1 + e^-1) = 0.313262; smoothed 0.9 * 0.313262 + 0.1 * 1.313262 = 0.413262
    assert dpo(numbers(4.0), numbers(2.0), beta=0.5).item() == pytest.approx(0.313262, abs=1e-6)
    assert dpo(numbers(4.0), numbers(2.0), beta=0.5, label_smoothing=0.1).item() == pytest.approx(0.413262, abs=1e-6)


def test_the_gradient_of_dpo_is_that_of_the_paper():
    # equation below (7): -beta sigma(r_rejected - r_chosen) on the chosen score, the opposite on the rejected one
    chosen_N, rejected_N = draw()
    dpo(chosen_N, rejected_N, beta=0.3).sum().backward()
    expected_N = -0.3 * torch.sigmoid(0.3 * (rejected_N - chosen_N)).detach()
    torch.testing.assert_close(chosen_N.grad, expected_N)
    torch.testing.assert_close(rejected_N.grad, -expected_N)


def test_smoothed_dpo_is_least_where_the_margin_says_the_share_of_swapped_labels():
    # sigma(h) = 1 - eps: with eps = 0.2 h = log 4
    margin_N = numbers(math.log(4.0)).requires_grad_()
    dpo(margin_N, numbers(0.0), beta=1.0, label_smoothing=0.2).sum().backward()
    assert margin_N.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_smoothing_by_half_does_not_know_which_response_is_better():
    chosen_N, rejected_N = draw()
    one_N, other_N = (
        dpo(*pair, beta=0.3, label_smoothing=0.5) for pair in ((chosen_N, rejected_N), (rejected_N, chosen_N))
    )
    torch.testing.assert_close(one_N, other_N)


def test_ipo_is_zero_at_its_target_and_a_parabola_around_it():
    # 1 / (2 * 0.1) = 5: (6 - 1 - 5)^2 = 0, (4 - 1 - 5)^2 = 4 with slope 2 * -2
    assert ipo(numbers(6.0), numbers(1.0), beta=0.1).item() == pytest.approx(0.0)
    chosen_N = numbers(4.0).requires_grad_()
    loss = ipo(chosen_N, numbers(1.0), beta=0.1).sum()
    loss.backward()
    assert (loss.item(), chosen_N.grad.item()) == (pytest.approx(4.0), pytest.approx(-4.0))


def test_orpo_worked_out_by_hand():
    # P = 1/2: odds 1. P = 1/3: odds 1/2. L = log 2 - 0.1 log sigma(log 2) = log 2 - 0.1 log(2/3) = 0.693147 + 0.040547
    found = orpo(numbers(math.log(1 / 2)), numbers(math.log(1 / 3)), beta=0.1)
    assert found.item() == pytest.approx(0.733694, abs=1e-6)


def test_orpo_stays_finite_where_a_response_is_certain():
    chosen_N = numbers(0.0, -1e-9, -200.0).requires_grad_()
    losses_N = orpo(chosen_N, numbers(-200.0, -1.0, 0.0), beta=0.1)
    losses_N.sum().backward()
    assert torch.isfinite(losses_N).all() and torch.isfinite(chosen_N.grad).all()


def test_simpo_without_margin_is_dpo_and_a_margin_shifts_it():
    chosen_N, rejected_N = draw()
    plain_N = simpo(chosen_N, rejected_N, beta=2.0, simpo_gamma=0.0)
    torch.testing.assert_close(plain_N, dpo(chosen_N, rejected_N, beta=2.0))
    # a margin of beta * 1.5 is the same as a chosen score lower by 1.5
    shifted_N = simpo(chosen_N, rejected_N, beta=2.0, simpo_gamma=3.0)
    torch.testing.assert_close(shifted_N, dpo(chosen_N - 1.5, rejected_N, beta=2.0))


def test_kto_worked_out_by_hand():
    # s - z = 2 - 1, beta 0.5: desirable 1.5 (1 - sigma(0.5)), undesirable 2 (1 - sigma(-0.5)) = 2 sigma(0.5)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 2.0}
    losses_B = kto(numbers(2.0, 2.0), torch.tensor([True, False]), numbers(1.0, 1.0), beta=0.5, **weights)
    assert losses_B.tolist() == pytest.approx([1.5 * (1 - sigma(0.5)), 2 * sigma(0.5)])


def test_kto_at_the_reference_is_one_half_and_its_baseline_has_no_gradient():
    scores_B, baseline_B = numbers(0.0, 0.0).requires_grad_(), numbers(0.0, 0.0).requires_grad_()
    losses_B = kto(scores_B, torch.tensor([1, 0]), baseline_B, beta=0.1)
    losses_B.sum().backward()
    assert losses_B.tolist() == pytest.approx([0.5, 0.5])
    # d/ds (1 - sigma(beta s)) = -beta / 4 at 0
    assert scores_B.grad.tolist() == pytest.approx([-0.025, 0.025]) and baseline_B.grad is None


def test_the_baseline_of_kto_is_the_mean_score_and_never_negative():
    assert kto_baseline(numbers(1.0, 4.0, -2.0)) == pytest.approx(1.0)
    assert kto_baseline(numbers(1.0, -4.0)) == 0.0
    assert kto_baseline(numbers()) == 0.0


def test_bradley_terry_is_dpo_with_beta_1_and_a_margin_lowers_the_difference():
    chosen_N, rejected_N = draw()
    torch.testing.assert_close(bradley_terry(chosen_N, rejected_N), dpo(chosen_N, rejected_N, beta=1.0))
    margins_N = torch.arange(50, dtype=torch.float64) / 10
    with_margin_N = bradley_terry(chosen_N, rejected_N, margins_N)
    torch.testing.assert_close(with_margin_N, bradley_terry(chosen_N - margins_N, rejected_N))


def test_two_preferences_of_bradley_terry_are_probabilities():
    chosen_N, rejected_N = draw()
    one_N, other_N = bradley_terry(chosen_N, rejected_N), bradley_terry(rejected_N, chosen_N)
    torch.testing.assert_close((-one_N).exp() + (-other_N).exp(), torch.ones_like(one_N))


def test_scores_count_tokens_on_the_mask_only():
    log_probs_BT = torch.tensor([[-1.0, -2.0, math.nan], [math.inf, -4.0, -6.0], [-1.0, -1.0, -1.0]])
    mask_BT = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert sequence_scores(log_probs_BT, mask_BT).tolist() == [-3.0, -10.0, 0.0]
    assert sequence_scores(log_probs_BT, mask_BT, is_mean=True).tolist() == [-1.5, -5.0, 0.0]


def trl(name: str, chosen_N, rejected_N, *, beta: float, smoothing: float = 0.0, gamma: float = 0.0) -> torch.Tensor:
    """Return the loss of TRL's dpo_trainer, orpo_trainer or cpo_trainer, written anew in plain logarithms."""
    if name == "dpo":
        logits_N = chosen_N - rejected_N
        return -F.logsigmoid(beta * logits_N) * (1 - smoothing) - F.logsigmoid(-beta * logits_N) * smoothing
    if name == "ipo":
        return (chosen_N - rejected_N - 1 / (2 * beta)).square()
    if name == "simpo":
        return -F.logsigmoid(beta * (chosen_N - rejected_N - gamma / beta))
    odds_N = (chosen_N - rejected_N) - (torch.log1p(-torch.exp(chosen_N)) - torch.log1p(-torch.exp(rejected_N)))
    return -chosen_N - beta * torch.log(torch.sigmoid(odds_N))


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("dpo", {"beta": 0.1, "label_smoothing": 0.1}, {"beta": 0.1, "smoothing": 0.1}),
        ("ipo", {"beta": 0.1}, {"beta": 0.1}),
        ("simpo", {"beta": 2.0, "simpo_gamma": 0.5}, {"beta": 2.0, "gamma": 0.5}),
        ("orpo", {"beta": 0.1}, {"beta": 0.1}),
    ],
)
def test_losses_and_gradients_are_those_of_trls_formulas(name, ours, theirs):
    chosen_N, rejected_N = (-scores_N.detach().abs() - 1e-3 for scores_N in draw())  # mean log-probs are negative
    results = []
    for fn, settings in ((PREFERENCE_LOSSES[name].fn, ours), (lambda *a, **kw: trl(name, *a, **kw), theirs)):
        pair = chosen_N.clone().requires_grad_(), rejected_N.clone().requires_grad_()
        losses_N = fn(*pair, **settings)
        losses_N.sum().backward()
        results.append((losses_N.detach(), pair[0].grad, pair[1].grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_kto_is_trls_formula():
    # kto_trainer: 1 - sigmoid(beta (chosen - kl)) and 1 - sigmoid(beta (kl - rejected))
    scores_B, other_B = draw()
    scores_B, kl = scores_B.detach(), 0.7
    labels_B = other_B > 0
    expected_B = torch.where(
        labels_B, 1 - torch.sigmoid(0.1 * (scores_B - kl)), 1 - torch.sigmoid(0.1 * (kl - scores_B))
    )
    torch.testing.assert_close(kto(scores_B, labels_B, torch.full_like(scores_B, kl), beta=0.1), expected_B)


def test_what_each_loss_compares():
    compared = {
        name: (loss.needs_reference, loss.is_mean, loss.is_paired)
        for name, loss in PREFERENCE_LOSSES.items()
        if loss.fn.__module__ == "hybridrl.algos.preference_losses"
    }
    assert compared == {
        "dpo": (True, False, True),
        "ipo": (True, True, True),
        "kto": (True, False, False),
        "orpo": (False, True, True),
        "simpo": (False, True, True),
    }
    assert PREFERENCE_LOSSES["kto"].settings == {"beta", "desirable_weight", "undesirable_weight"}


def test_a_loss_of_ones_own_is_registered_once():
    @register_preference_loss("hinge_of_a_test")
    def hinge(chosen_N, rejected_N, *, beta):
        return F.relu(1 - beta * (chosen_N - rejected_N))

    try:
        assert PREFERENCE_LOSSES.lookup("hinge_of_a_test") == PreferenceLoss(hinge)
        with pytest.raises(ConfigError, match="the name 'dpo' is taken"):
            register_preference_loss("dpo")(hinge)
    finally:
        del PREFERENCE_LOSSES["hinge_of_a_test"]


@pytest.mark.parametrize("loss", [dpo, ipo, orpo, bradley_terry])
def test_shapes_that_would_broadcast_are_refused(loss):
    settings = {} if loss is bradley_terry else {"beta": 0.1}
    with pytest.raises(DataError, match=r"chosen \(2,\), rejected \(1,\)"):
        loss(numbers(-1.0, -2.0), numbers(-1.0), **settings)
