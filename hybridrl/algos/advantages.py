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

from hybridrl.algos.masked import masked_sum, masked_whiten
from hybridrl.algos.shapes import check_same_shape
from hybridrl.errors import DataError
from hybridrl.registry import Registry

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ADVANTAGE_ESTIMATORS: Registry["AdvantageEstimator"] = Registry(
    "algorithm.adv_estimator", kind="advantage estimator", plugins="algorithm.path", import_paths=False
)

GROUP_STD_EPS = 1e-6
"""Added to a group's standard deviation, as in verl: a group in which all scores are equal has advantage 0."""


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


@register_adv_est("gae", needs_critic=True)
def gae(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    values_BT: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438, equations 11 and 16.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

    V is 0 after the last token.

    Returns:
        Advantages whitened over all tokens, as in verl, and returns from the advantages before whitening.
    """
    mask_BT = response_mask_BT.bool()
    deltas_BT = token_level_rewards_BT + gamma * _value_after(values_BT, mask_BT) - values_BT
    advantages_BT = _discounted_sum_to_go(deltas_BT, mask_BT, decay=gamma * lam)
    returns_BT = torch.where(mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))
    return masked_whiten(advantages_BT, mask_BT), returns_BT


@register_adv_est("grpo", needs_group=True)
def grpo(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages, arXiv:2402.03300, section 4.1.2.

        A_i = (R_i - mean_g) / (std_g + 1e-6)        R_i = sum_t r_t, the same for all tokens of row i

    std_g is unbiased. `norm_by_std=False`: A_i = R_i - mean_g (Dr. GRPO, arXiv:2503.20783). A group of one has mean 0
    and std 1, as in verl.

    Returns:
        Advantages, not whitened, and the same as returns.
    """
    scores_B, mean_B, std_B, _ = _group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    advantages_B = scores_B - mean_B
    if norm_by_std:
        advantages_B = advantages_B / (std_B + GROUP_STD_EPS)
    advantages_BT = _on_every_token(advantages_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("rloo", needs_group=True)
def rloo(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave-one-out baseline, arXiv:2402.14740.

        A_i = R_i - mean of the other n - 1 scores of its group = n / (n - 1) (R_i - mean_g)

    A group of one has no baseline: A_i = R_i.

    Returns:
        Advantages, not whitened, and the same as returns.
    """
    scores_B, mean_B, _, count_B = _group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    advantages_B = (scores_B - mean_B) * count_B / (count_B - 1).clamp(min=1)
    advantages_BT = _on_every_token(advantages_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, gamma: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ without critic and groups, arXiv:2501.03262.

        G_t = r_t + gamma G_{t+1}        A = whiten(G) over all tokens of the batch

    Returns:
        Advantages and G.
    """
    returns_BT = _discounted_sum_to_go(token_level_rewards_BT, response_mask_BT.bool(), decay=gamma)
    return masked_whiten(returns_BT, response_mask_BT), returns_BT


@register_adv_est("reinforce_plus_plus_baseline", needs_group=True)
def reinforce_plus_plus_baseline(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with the group's mean as baseline, arXiv:2501.03262.

        A = whiten(R_i - mean_g) over all tokens of the batch

    A group of one has mean 0, as in verl. There is no division by the group's std.

    Returns:
        Advantages and the same as returns.
    """
    scores_B, mean_B, _, _ = _group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    centred_BT = _on_every_token(scores_B - mean_B, token_level_rewards_BT, response_mask_BT)
    advantages_BT = masked_whiten(centred_BT, response_mask_BT)
    return advantages_BT, advantages_BT


def _value_after(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return for each token the value at the next token on the mask, 0 where there is none."""
    num_tokens = values_BT.shape[1]
    here_BT = torch.where(mask_BT, torch.arange(num_tokens, device=values_BT.device), num_tokens)
    at_or_after_BT = here_BT.flip(1).cummin(dim=1).values.flip(1)
    end_B1 = torch.full_like(at_or_after_BT[:, :1], num_tokens)
    values_and_zero = torch.cat([values_BT, torch.zeros_like(values_BT[:, :1])], dim=1)
    return values_and_zero.gather(1, torch.cat([at_or_after_BT[:, 1:], end_B1], dim=1))


def _discounted_sum_to_go(terms_BT: torch.Tensor, mask_BT: torch.Tensor, *, decay: float) -> torch.Tensor:
    """Return S_t = x_t + decay S_{t+1} for t over the tokens on the mask; 0 off it."""
    # Transposed, one token of all rows is contiguous.
    terms_TB, mask_TB = terms_BT.T.contiguous(), mask_BT.T.contiguous()
    sums_TB, sum_B = torch.zeros_like(terms_TB), torch.zeros_like(terms_BT[:, 0])
    for t in reversed(range(len(terms_TB))):
        sum_B = torch.where(mask_TB[t], terms_TB[t] + decay * sum_B, sum_B)
        sums_TB[t] = sum_B
    return torch.where(mask_BT, sums_TB.T, torch.zeros_like(terms_BT))


def _group_statistics(
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row its score sum_t r_t and its group's mean, unbiased std and count.

    All are float64: the mean of equal float32 scores is not always that score, and GRPO divides the difference by about
    1e-6. Rows without a token on the mask are not counted. A group of one (or none) has mean 0 and std 1.
    """
    scores_B, counted_B = masked_sum(rewards_BT.double(), mask_BT, dim=1), mask_BT.bool().any(dim=1).double()
    ids_G, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(terms_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_G), dtype=torch.float64, device=scores_B.device).index_add_(
            0, index_B, terms_B * counted_B
        )

    count_G = per_group(torch.ones_like(scores_B))
    mean_G = per_group(scores_B) / count_G.clamp(min=1)
    std_G = (per_group((scores_B - mean_G[index_B]) ** 2) / (count_G - 1).clamp(min=1)).sqrt()
    mean_G = torch.where(count_G > 1, mean_G, torch.zeros_like(mean_G))
    std_G = torch.where(count_G > 1, std_G, torch.ones_like(std_G))
    return scores_B, mean_G[index_B], std_G[index_B], count_G[index_B]


def _on_every_token(advantages_B: torch.Tensor, like_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_BT.bool(), advantages_B.to(like_BT.dtype)[:, None], torch.zeros_like(like_BT))
