import math

import numpy as np
import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.training_service.computation.losses import LOSSES, check_data, checked_config
from hybridrl.training_service.wire import Datum, Pass

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def run(name, log_probs, config=None, **columns):
    """Losses of one row with these positions, and the gradient of their sum."""
    p = torch.tensor(log_probs).reshape(1, -1, 1).requires_grad_()
    named = {key: torch.tensor(value).reshape(1, -1, 1) for key, value in columns.items()}
    losses = LOSSES[name].fn(p, named, LOSSES[name].config if config is None else config)
    losses.sum().backward()
    return losses.flatten().tolist(), p.grad.flatten().tolist()


def test_cross_entropy_is_a_weighted_sum_with_weights_of_any_sign():
    losses, gradient = run("cross_entropy", [-1.0, -2.0], weights=[0.5, -3.0])
    assert losses == pytest.approx([0.5, -6.0])
    assert gradient == pytest.approx([-0.5, 3.0])


def test_importance_sampling_weights_the_advantage_by_the_ratio():
    # p/q = e^(-1 + 1.5) = e^0.5; the gradient of -r A by log p is -r A.
    losses, gradient = run("importance_sampling", [-1.0], logprobs=[-1.5], advantages=[2.0])
    assert losses == gradient == pytest.approx([-2 * math.exp(0.5)])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_a_position_without_advantage_adds_nothing_whatever_its_log_probs(name):
    # A prompt token with q = 0, as clients send it, and one whose ratio would be infinite.
    losses, gradient = run(name, [-3.0, 0.0], logprobs=[0.0, -1e4], advantages=[0.0, 0.0])
    assert losses == gradient == [0.0, 0.0]


def test_ppo_clips_the_ratio_and_not_its_logarithm():
    # Ratios 1.5 and 0.5 with A = 1, -1: min(1.5, 1.2) = 1.2; min(-0.5, -0.8) = -0.8. Both are clipped, no gradient.
    losses, gradient = run("ppo", [math.log(1.5), math.log(0.5)], logprobs=[0.0, 0.0], advantages=[1.0, -1.0])
    assert losses == pytest.approx([-1.2, 0.8])
    assert gradient == [0.0, 0.0]


def test_cispo_keeps_the_gradient_of_a_clipped_ratio():
    losses, gradient = run("cispo", [math.log(1.5)], logprobs=[0.0], advantages=[2.0])
    assert losses == pytest.approx([-1.2 * math.log(1.5) * 2])
    assert gradient == pytest.approx([-2.4])


def test_dro_penalizes_the_squared_distance():
    # -(p A - beta/2 (p - q)^2) = -(-1 * 2 - 0.1/2 * 0.25) = 2.0125; gradient -(A - beta (p - q)) = -(2 - 0.05).
    losses, gradient = run("dro", [-1.0], {"beta": 0.1}, logprobs=[-1.5], advantages=[2.0])
    assert losses == pytest.approx([2.0125])
    assert gradient == pytest.approx([-1.95])


def test_gspo_uses_the_geometric_mean_of_the_ratios_of_a_sequence():
    # Log-ratios 0.1, -0.3 and, off the mask, 9: mean -0.1 for all positions.
    ratio = math.exp(-0.1)
    columns = {"logprobs": [0.0, 0.0, 0.0], "advantages": [1.0, 1.0, 0.0], "sequence_ratio_mask": [1.0, 1.0, 0.0]}
    losses, gradient = run("gspo", [0.1, -0.3, 9.0], **columns)
    assert losses == pytest.approx([-ratio, -ratio, 0.0])
    assert gradient == pytest.approx([-ratio, -ratio, 0.0])


def test_gspo_of_one_token_is_ppo():
    columns = {"logprobs": [-1.2], "advantages": [0.7]}
    assert run("gspo", [-1.1], sequence_ratio_mask=[1.0], **columns) == run("ppo", [-1.1], **columns)


def a_pass(loss_fn="ppo", config=None, tokens=(4, 5), **inputs) -> Pass:
    given = {
        "target_tokens": np.array([5, 6]),
        "logprobs": np.zeros(2, np.float32),
        "advantages": np.ones(2, np.float32),
    }
    return Pass("m", 1, [Datum(np.array(tokens), given | inputs)], loss_fn, config or {})


def test_options_replace_the_defaults():
    assert checked_config(a_pass(config={"clip_high_threshold": 3})) == CLIP | {"clip_high_threshold": 3.0}


@pytest.mark.parametrize(
    ("loss_fn", "config", "words"),
    [
        ("stable_reinforce", {}, "not public"),
        ("custom", {}, "the SDK computes a custom loss itself"),
        ("ppoo", {}, "the losses are cross_entropy"),
        ("ppo", {"beta": 1.0}, "reads clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": math.nan}, "finite"),
        ("ppo", {"clip_low_threshold": "low"}, "finite numbers"),
    ],
)
def test_a_loss_or_an_option_that_is_not_supported_is_refused_by_name(loss_fn, config, words):
    with pytest.raises(DataError, match=words):
        checked_config(a_pass(loss_fn, config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_tokens": np.array([5, 64])}, "token 64; the model has 64"),
        ({"target_tokens": np.array([5, -1])}, "token -1"),
        ({"tokens": (4, 99)}, "token 99"),
        ({"tokens": ()}, "has 0 tokens; send 1 to 8"),
        ({"tokens": range(9)}, "has 9 tokens"),
        ({"target_tokens": np.array([5, 6, 7])}, r"shape \[3\], and the input has 2 tokens"),
        ({"target_tokens": np.array([[5], [6]])}, r"shape \[2, 1\]"),
        ({"advantages": np.array([1.0, np.nan], np.float32)}, "not finite"),
        ({"advantages": np.ones(3, np.float32)}, r"advantages has the shape \[3\]"),
        ({"target_tokens": np.array([5.0, 6.0])}, "token ids are int64"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(changes, words):
    with pytest.raises(DataError, match=words):
        check_data(a_pass(**changes), vocabulary=64, max_length=8)


def test_an_input_that_the_loss_reads_must_be_there():
    request = Pass("m", 1, [Datum(np.array([4]), {"target_tokens": np.array([5])})], "ppo")
    with pytest.raises(DataError, match="lacks logprobs, advantages"):
        check_data(request, vocabulary=64, max_length=8)


def test_short_sequences_beside_a_long_one_are_refused_if_filling_them_up_takes_too_much(monkeypatch):
    monkeypatch.setattr("hybridrl.training_service.computation.losses.MAX_VALUES", 40)
    data = [Datum(np.full(n, 4), {"target_tokens": np.full((n, 2), 5)}) for n in (7, 1, 1)]
    with pytest.raises(DataError, match="3 sequences of up to 7 tokens with 2 targets each.*42 values, of 40"):
        check_data(Pass("m", 1, data, "cross_entropy"), vocabulary=64, max_length=8)
    check_data(Pass("m", 1, data[:2], "cross_entropy"), vocabulary=64, max_length=8)


def test_a_pass_without_data_is_refused():
    with pytest.raises(DataError, match="data is empty"):
        check_data(Pass("m", 1, [], "ppo"), vocabulary=64, max_length=8)
