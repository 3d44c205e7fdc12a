"""A formula of one's own that cannot be called is refused when it is registered."""

import pytest
import torch

from hybridrl import register_adv_est
from hybridrl.algos import ADVANTAGE_ESTIMATORS, check_signature
from hybridrl.errors import ConfigError, DataError

OFFERED = ("clip_low", "clip_high")


def wrong_name(a, b, *, clip_ratio_low):
    raise AssertionError


def too_few(a, *, clip_low):
    raise AssertionError


def test_an_argument_that_nobody_passes_is_named_beside_what_is_offered():
    with pytest.raises(ConfigError, match="my loss needs clip_ratio_low, .* it gets clip_high, clip_low"):
        check_signature(wrong_name, what="my loss", positional=("a", "b"), offered=OFFERED)
    with pytest.raises(ConfigError, match="my loss takes 1 arguments by position; it gets a, b"):
        check_signature(too_few, what="my loss", positional=("a", "b"), offered=OFFERED)


@pytest.mark.parametrize("fn", [lambda *all_of_them, **more: 0, lambda a, b, c=1, **more: 0, lambda a, b, clip_low: 0])
def test_what_can_be_called_is_accepted(fn):
    check_signature(fn, what="my loss", positional=("a", "b"), offered=OFFERED)


def test_an_estimator_is_checked_when_it_is_registered_and_its_result_when_it_is_called():
    with pytest.raises(ConfigError, match="'mine' needs groups, which nobody passes; by name it gets .*group_B"):
        register_adv_est("mine")(lambda rewards, mask, *, groups: None)
    register_adv_est("mine")(lambda rewards, mask: (rewards.sum(1), rewards))
    try:
        with pytest.raises(DataError, match=r"'mine' returned advantages of shape \(2,\); they must be \(B, T\)"):
            ADVANTAGE_ESTIMATORS.lookup("mine")(torch.zeros(2, 3), torch.ones(2, 3))
    finally:
        ADVANTAGE_ESTIMATORS.pop("mine")
