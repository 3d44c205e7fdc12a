"""Advantage estimators: from token rewards to how much better each token was than expected.

Shape letters: B rows (responses), T response tokens. `token_level_rewards_BT` float, `response_mask_BT` non-zero on
generated tokens. Tokens off the mask are padding, or text of the environment between two turns. They are skipped
without discount, their rewards are not read, and their advantages and returns are 0.

An estimator is a function with the arguments it needs, registered by `@register_adv_est`. The trainer calls the
`AdvantageEstimator` around it, which has one signature, checks the inputs and masks rows with a failed reward. Nothing
here adds the KL penalty (see `kl.apply_kl_penalty`), and nothing has a gradient.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridrl.algos.shapes import check_same_shape
from hybridrl.errors import DataError
from hybridrl.registry import Registry

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ADVANTAGE_ESTIMATORS: Registry["AdvantageEstimator"] = Registry(
    "algorithm.adv_estimator", kind="advantage estimator", plugins="algorithm.path", import_paths=False
)


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator.

    Attributes:
        needs_critic: The call needs values_BT.
        needs_group: The call needs group_B.
    """

    name: str
    fn: AdvantageFn
    needs_critic: bool
    needs_group: bool

    @torch.no_grad()
    def __call__(
        self,
        token_level_rewards_BT: torch.Tensor,
        response_mask_BT: torch.Tensor,
        *,
        values_BT: torch.Tensor | None = None,
        group_B: torch.Tensor | None = None,
        valid_B: torch.Tensor | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        norm_by_std: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (advantages_BT, returns_BT), both 0 off the mask.

        Args:
            values_BT: The critic's value of the state before each token.
            group_B: int64. Rows with the same number answer the same prompt.
            valid_B: bool. A row that is False (its reward failed) is excluded from group statistics and whitening. Its
                advantages are 0 and its returns are its values (0 without a critic), so that it trains nothing.

        Raises:
            DataError: Shapes differ, or values_BT or group_B is missing.
        """
        self._check(token_level_rewards_BT, response_mask_BT, values_BT, group_B, valid_B)
        mask_BT = (
            response_mask_BT if valid_B is None else response_mask_BT * valid_B[:, None].to(response_mask_BT.dtype)
        )
        zeros_BT, counted_BT = torch.zeros_like(token_level_rewards_BT), mask_BT.bool()
        given = {"values_BT": values_BT, "group_B": group_B, "gamma": gamma, "lam": lam, "norm_by_std": norm_by_std}
        rewards_BT = torch.where(counted_BT, token_level_rewards_BT, zeros_BT)
        advantages_BT, returns_BT = self.fn(rewards_BT, mask_BT, **self._accepted(given))
        returns_BT = torch.where(counted_BT, returns_BT, zeros_BT if values_BT is None else values_BT)
        returns_BT = torch.where(response_mask_BT.bool(), returns_BT, zeros_BT)
        return torch.where(counted_BT, advantages_BT, zeros_BT), returns_BT

    def _check(
        self,
        rewards_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        values_BT: torch.Tensor | None,
        group_B: torch.Tensor | None,
        valid_B: torch.Tensor | None,
    ) -> None:
        check_same_shape(token_level_rewards=rewards_BT, response_mask=mask_BT)
        if self.needs_critic and values_BT is None:
            raise DataError(
                f"advantage estimator {self.name!r} needs the critic's values and got none; enable the critic"
            )
        if self.needs_group and group_B is None:
            raise DataError(
                f"advantage estimator {self.name!r} compares answers to the same prompt and needs group_B, got None"
            )
        if values_BT is not None:
            check_same_shape(token_level_rewards=rewards_BT, values=values_BT)
        for name, column_B in (("group_B", group_B), ("valid_B", valid_B)):
            if column_B is not None and column_B.shape != rewards_BT.shape[:1]:
                raise DataError(
                    f"{name} must have one number for each of {len(rewards_BT)} rows, and is {tuple(column_B.shape)}"
                )

    def _accepted(self, given: dict) -> dict:
        parameters = inspect.signature(self.fn).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return {name: value for name, value in given.items() if takes_all or name in parameters}


def register_adv_est(
    name: str, *, needs_critic: bool = False, needs_group: bool = False
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register the decorated function as `algorithm.adv_estimator=name`, and return it unchanged.

    It is called as fn(token_level_rewards_BT, response_mask_BT, **kwargs). The kwargs are those of values_BT, group_B,
    gamma, lam and norm_by_std that its signature names. Rows with a failed reward have an empty mask.
    """

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        ADVANTAGE_ESTIMATORS.enter(name, AdvantageEstimator(name, fn, needs_critic, needs_group))
        return fn

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator registered as `name`.

    Raises:
        ConfigError: The name is unknown; the message lists the known names and the nearest.
    """
    return ADVANTAGE_ESTIMATORS.lookup(name)
