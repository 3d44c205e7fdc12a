"""Advantage estimators: from token rewards to how much better each token was than expected.

Shape letters: B rows (responses), T response tokens, K rewards of one response. `token_level_rewards_BT` float,
`response_mask_BT` non-zero on generated tokens. Tokens off the mask are padding, or text of the environment between two
turns. They are skipped without discount, their rewards are not read, and their advantages and returns are 0.

An estimator is a function with the arguments it needs, registered by `@register_adv_est`. The trainer calls the
`AdvantageEstimator` around it, which has one signature, checks the inputs and masks rows with a failed reward. Nothing
here adds the KL penalty (see `kl.apply_kl_penalty`), and nothing has a gradient.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridrl.algos import advantages
from hybridrl.algos.masked import row_counts, row_parts
from hybridrl.algos.shapes import check_same_shape
from hybridrl.algos.signatures import check_signature
from hybridrl.errors import DataError
from hybridrl.registry import Registry

AdvantageFn = Callable[..., Any]
ADVANTAGE_ESTIMATORS: Registry["AdvantageEstimator"] = Registry(
    "algorithm.adv_estimator",
    kind="advantage estimator",
    builtins={
        name: f"hybridrl.algos.advantages.{module}:{name.removesuffix('_vectorized')}"
        for module, names in {
            "groups": (
                *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline"),
                *("opo", "gpg", "grpo_passk", "maxrl", "gdpo"),
            ),
            "rejection": ("raft", "star"),
            "temporal": ("gae", "vapo", "reinforce_plus_plus", "remax"),
            "token_baseline": ("optimal_token_baseline", "tir_optimal_token_baseline"),
        }.items()
        for name in names
    },
    plugins="algorithm.path",
    import_paths=False,
)
OFFERED = (
    *("values_BT", "group_B", "gamma", "lam", "norm_by_std", "baseline_B", "old_log_probs_BT", "sum_pi_squared_BT"),
    *("is_weights_BT", "components_BK", "component_weights", "lam_alpha"),
)
"""Arguments that an estimator gets if its signature names them."""
HINTS = {
    "values_BT": "needs the critic's values and got none; enable the critic",
    "group_B": "compares answers to the same prompt and needs group_B, got None",
    "baseline_B": "needs the reward of a greedy response to each prompt (baseline_B), got None",
    "sum_pi_squared_BT": "needs sum_pi_squared_BT; set actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    "old_log_probs_BT": "needs old_log_probs_BT, got None",
    "components_BK": "needs several rewards per response (components_BK), got None",
}
OF_VERL = ("index", "config")
"""Arguments of verl's estimators: the group of each row as an array, and the settings in `VerlSettings`."""


class VerlSettings(NamedTuple):
    """What an estimator written for verl reads as `config`."""

    gamma: float
    lam: float
    norm_adv_by_std_in_grpo: bool

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator.

    Attributes:
        needs_critic: The call needs values_BT.
        needs_group: The call needs group_B.
        needs: Further arguments that the call needs, by name.
        per_response: The function gets one score per response and returns one advantage per response.
        masks: The function ignores tokens outside the mask and returns 0 for them.
    """

    name: str
    fn: AdvantageFn
    needs_critic: bool
    needs_group: bool
    needs: tuple[str, ...] = ()
    per_response: bool = False
    masks: bool = False

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
        episode_B: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (advantages_BT, returns_BT), both 0 off the mask.

        Args:
            values_BT: The critic's value of the state before each token.
            group_B: int64. Rows with the same number answer the same prompt.
            valid_B: bool. A row that is False (its reward failed) is excluded from group statistics and whitening. Its
                advantages are 0 and its returns are its values (0 without a critic), so that it trains nothing.
            episode_B: int64. The row that stands for the row's episode, itself or another one (`episodes`). None: every
                row is an episode.
            more: Arguments of single estimators: `baseline_B`, `old_log_probs_BT`, `sum_pi_squared_BT`,
                `is_weights_BT`, `components_BK`, `component_weights`, `lam_alpha`. None is as if it were left out.

        Raises:
            DataError: Shapes differ, an argument that the estimator needs is missing, or it compares the tokens of a
                group and an episode has several rows.
        """
        columns = {"values_BT": values_BT, "group_B": group_B}
        given = {**columns, "gamma": gamma, "lam": lam, "norm_by_std": norm_by_std}
        given |= {name: value for name, value in more.items() if value is not None}
        if episode_B is not None:
            given["episode_B"] = self._check_episodes(episode_B)
        self._check(token_level_rewards_BT, response_mask_BT, given, valid_B)
        counted_BT = _counted(response_mask_BT, valid_B)
        if self.per_response:
            advantages_BT = self._per_response(token_level_rewards_BT, counted_BT, given)
            returns_BT = advantages_BT
        elif self.masks:
            advantages_BT, returns_BT = self.fn(token_level_rewards_BT, counted_BT, **self._accepted(given))
        else:
            advantages_BT, returns_BT = self._masked(token_level_rewards_BT, counted_BT, given)
        if values_BT is not None and valid_B is not None and not valid_B.all():
            failed_BT = response_mask_BT.bool() & ~valid_B[:, None]
            returns_BT = torch.where(failed_BT, values_BT.to(returns_BT.dtype), returns_BT)
        return advantages_BT, returns_BT

    def _per_response(self, rewards_BT: torch.Tensor, mask_BT: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        scores_B, lengths_B = response_scores(rewards_BT, mask_BT)
        arguments = self._accepted(given)
        if (episode_B := given.get("episode_B")) is None:
            advantages_B = self.fn(scores_B, lengths_B, **arguments)
        else:
            advantages_B = advantages.of_episodes(self.fn, scores_B, lengths_B, episode_B=episode_B, **arguments)
        return on_every_token(advantages_B.to(rewards_BT.dtype), mask_BT)

    def _check_episodes(self, episode_B: torch.Tensor) -> torch.Tensor:
        has_branches = bool((episode_B != torch.arange(len(episode_B), device=episode_B.device)).any())
        if has_branches and self.needs_group and not self.per_response:
            raise DataError(
                f"advantage estimator {self.name!r} compares the tokens of a group position by position, and the "
                "batch has episodes of several rows; set actor_rollout_ref.rollout.agent.train_branches=false, or "
                "take an estimator that compares whole responses, such as grpo"
            )
        return episode_B

    def _masked(
        self, rewards_BT: torch.Tensor, mask_BT: torch.Tensor, given: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rewards_BT = torch.where(mask_BT, rewards_BT, 0)
        advantages_BT, returns_BT = self.fn(rewards_BT, mask_BT, **self._accepted(given))
        for part, column in (("advantages", advantages_BT), ("returns", returns_BT)):
            if column.shape != mask_BT.shape:
                raise DataError(
                    f"advantage estimator {self.name!r} returned {part} of shape {tuple(column.shape)}; they must be "
                    f"(B, T) = {tuple(mask_BT.shape)}, as the mask is"
                )
        return torch.where(mask_BT, advantages_BT, 0), torch.where(mask_BT, returns_BT, 0)

    def _check(
        self, rewards_BT: torch.Tensor, mask_BT: torch.Tensor, given: dict[str, Any], valid_B: torch.Tensor | None
    ) -> None:
        check_same_shape(token_level_rewards=rewards_BT, response_mask=mask_BT)
        needs = ("values_BT",) * self.needs_critic + ("group_B",) * self.needs_group + self.needs
        for name in needs:
            if given.get(name) is None:
                raise DataError(f"advantage estimator {self.name!r} {HINTS.get(name, f'needs {name}, got None')}")
        for name, column in {**given, "valid_B": valid_B}.items():
            if name.endswith("_BT") and column is not None:
                check_same_shape(**{"token_level_rewards": rewards_BT, name.removesuffix("_BT"): column})
            if name.endswith(("_B", "_BK")) and column is not None:
                _check_one_per_row(name, column, num_rows=len(rewards_BT))

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.fn).parameters
        if "config" in parameters:
            given = given | {"config": VerlSettings(given["gamma"], given["lam"], given["norm_by_std"])}
        if "index" in parameters:
            given = given | {"index": given["group_B"].cpu().numpy()}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return {name: value for name, value in given.items() if takes_all or name in parameters}


def register_adv_est(
    name: str,
    *,
    needs_critic: bool = False,
    needs_group: bool = False,
    needs: Sequence[str] = (),
    per_response: bool = False,
    masks: bool = False,
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register the decorated function as `algorithm.adv_estimator=name`, and return it unchanged.

    It is called as fn(token_level_rewards_BT, response_mask_BT, **kwargs) and returns (advantages_BT, returns_BT). With
    `per_response` it is called as fn(scores_B, lengths_B, **kwargs) and returns advantages_B: `scores_B` float64 are
    the sums of the rewards, `lengths_B` int64 the numbers of tokens. The kwargs are those of
    `AdvantageEstimator.__call__` that its signature names. One that was written for verl also gets its `index` and
    `config`. Rows with a failed reward have an empty mask, or length 0.

    Args:
        name: A str, or a member of an Enum whose value is one.
        needs_critic, needs_group, needs: Arguments that must be given: values_BT, group_B, and any by name.
        per_response: See above. It costs one pass over the rewards and one over the result.
        masks: The function ignores tokens outside the mask and returns 0 for them, so the wrapper need not.

    Raises:
        ConfigError: The name is taken, or the function needs an argument that it does not get.
    """

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        positional = ("scores_B", "lengths_B") if per_response else ("token_level_rewards_BT", "response_mask_BT")
        what = f"the advantage estimator {str(getattr(name, 'value', name))!r}"
        check_signature(fn, what=what, positional=positional, offered=(*OFFERED, *OF_VERL, *needs))
        is_of_groups = needs_group or "index" in inspect.signature(fn).parameters
        estimator = AdvantageEstimator(
            str(getattr(name, "value", name)), fn, needs_critic, is_of_groups, tuple(needs), per_response, masks
        )
        ADVANTAGE_ESTIMATORS.enter(name, estimator)
        return fn

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator registered as `name`.

    Raises:
        ConfigError: The name is unknown; the message lists the known names and the nearest.
    """
    return ADVANTAGE_ESTIMATORS.lookup(name)


def response_scores(rewards_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's sum of rewards on the mask, (B,) float64, and its number of tokens, (B,) int64.

    float64: the mean of equal float32 scores is not always that score, and GRPO divides the difference by about 1e-6.
    """
    scores_B = torch.zeros(len(rewards_BT), dtype=torch.float64, device=rewards_BT.device)
    for part in row_parts(rewards_BT):
        scores_B[part] = rewards_BT[part].to(torch.float64, copy=True).masked_fill_(~mask_BT[part], 0).sum(1)
    return scores_B, row_counts(mask_BT)


def on_every_token(advantages_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each row's advantage on all of its tokens, (B, T).

    It is 0 off the mask. The dtype is that of `advantages_B`.
    """
    return torch.where(mask_BT, advantages_B[:, None], torch.zeros((), dtype=advantages_B.dtype))


def _counted(mask_BT: torch.Tensor, valid_B: torch.Tensor | None) -> torch.Tensor:
    """Return the bool mask of the tokens of rows that count."""
    mask_BT = mask_BT.bool()
    return mask_BT if valid_B is None or valid_B.all() else mask_BT & valid_B.bool()[:, None]


def _check_one_per_row(name: str, column: torch.Tensor, *, num_rows: int) -> None:
    if column.shape[:1] != (num_rows,) or (name.endswith("_B") and column.ndim != 1):
        raise DataError(f"{name} must have one number for each of {num_rows} rows, and is {tuple(column.shape)}")
