"""Advantage estimators: hand-worked numbers, identities, independent loops, and invariances."""

import subprocess
import sys

import pytest
import torch

from hybridrl.algos import advantages
from hybridrl.algos.advantages import ADVANTAGE_ESTIMATORS, get_adv_estimator, register_adv_est
from hybridrl.algos.masked import masked_mean, masked_var, masked_whiten
from hybridrl.errors import ConfigError, DataError

F64 = torch.float64


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def batch(num_rows: int = 12, num_tokens: int = 7, *, holes: bool = True) -> dict:
    """Random rows in groups of three; with `holes`, some tokens inside a response were written by the environment."""
    lengths_B = torch.randint(1, num_tokens + 1, (num_rows,))
    mask_BT = torch.arange(num_tokens) < lengths_B[:, None]
    if holes:
        mask_BT &= torch.rand(num_rows, num_tokens) < 0.8
        mask_BT[:, 0] = True
    return {
        "rewards": torch.randn(num_rows, num_tokens, dtype=F64) * mask_BT,
        "mask": mask_BT.long(),
        "values": torch.randn(num_rows, num_tokens, dtype=F64),
        "group": torch.arange(num_rows) // 3 * 10 - 5,
        "log_probs": -torch.rand(num_rows, num_tokens, dtype=F64) - 0.1,
        "sum_pi_squared": torch.rand(num_rows, num_tokens, dtype=F64),
        "baseline": torch.randn(num_rows, dtype=F64),
        "components": torch.randn(num_rows, 2, dtype=F64),
    }


def estimate(name: str, b: dict, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    more = {
        "old_log_probs_BT": b.get("log_probs"),
        "sum_pi_squared_BT": b.get("sum_pi_squared"),
        "baseline_B": b.get("baseline"),
        "components_BK": b.get("components"),
    }
    rewards_BT = b["rewards"].abs() if name == "maxrl" else b["rewards"]
    return get_adv_estimator(name)(rewards_BT, b["mask"], values_BT=b["values"], group_B=b["group"], **(more | kwargs))


def on_mask(row: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return row[mask.bool()].tolist()


# --- GAE ------------------------------------------------------------------------------------------


def test_gae_numbers_worked_out_by_hand():
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0, 9.0]])
    mask_BT = torch.tensor([[1, 1, 1, 0]])
    values_BT = torch.tensor([[0.2, 0.4, 0.6, 9.0]])
    _, returns_BT = advantages.gae(rewards_BT, mask_BT, values_BT=values_BT, gamma=0.5, lam=0.5)
    # delta = 0 + .5 * .4 - .2 = 0;  0 + .5 * .6 - .4 = -.1;  1 + 0 - .6 = .4
    # A_2 = .4, A_1 = -.1 + .25 * .4 = 0, A_0 = 0 + .25 * 0 = 0;  returns = A + V = .2, .4, 1
    torch.testing.assert_close(returns_BT, torch.tensor([[0.2, 0.4, 1.0, 0.0]]))


def test_gae_with_gamma_and_lambda_1_is_the_monte_carlo_return_minus_the_value():
    b = batch()
    advantages_BT, returns_BT = estimate("gae", b)
    for i, row_mask in enumerate(b["mask"]):
        rewards = on_mask(b["rewards"][i], row_mask)
        to_go = [sum(rewards[t:]) for t in range(len(rewards))]
        assert on_mask(returns_BT[i], row_mask) == pytest.approx(to_go)
    torch.testing.assert_close(advantages_BT, masked_whiten(returns_BT - b["values"], b["mask"]))


def test_gae_with_lambda_0_is_the_td_error():
    b = batch(holes=False)
    _, returns_BT = estimate("gae", b, gamma=0.9, lam=0.0)
    next_BT = torch.cat([(b["values"] * b["mask"])[:, 1:], torch.zeros(12, 1, dtype=F64)], dim=1)
    torch.testing.assert_close(returns_BT, (b["rewards"] + 0.9 * next_BT) * b["mask"])


def test_gae_equals_a_loop_over_the_generated_tokens_of_each_row():
    b, gamma, lam = batch(), 0.97, 0.9
    _, returns_BT = estimate("gae", b, gamma=gamma, lam=lam)
    for i, row_mask in enumerate(b["mask"]):
        rewards, values = on_mask(b["rewards"][i], row_mask), on_mask(b["values"][i], row_mask)
        expected, carried = [0.0] * len(values), 0.0
        for t in reversed(range(len(values))):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
            expected[t] = carried + values[t]
        assert on_mask(returns_BT[i], row_mask) == pytest.approx(expected)


def test_gae_advantages_are_whitened():
    b = batch(num_rows=40)
    advantages_BT, _ = estimate("gae", b, gamma=0.9, lam=0.8)
    assert float(masked_mean(advantages_BT, b["mask"])) == pytest.approx(0, abs=1e-6)
    assert float(masked_var(advantages_BT, b["mask"])) == pytest.approx(1, abs=1e-6)


# --- estimators with groups -----------------------------------------------------------------------


def outcome(scores: list[float], groups: list[int]) -> dict:
    """One row of two tokens per score, the score on the second."""
    rewards_BT = torch.tensor([[0.0, s, 7.0] for s in scores], dtype=F64)
    mask_BT = torch.tensor([[1, 1, 0]] * len(scores))
    return {
        "rewards": rewards_BT,
        "mask": mask_BT,
        "values": torch.zeros_like(rewards_BT),
        "group": torch.tensor(groups),
    }


def test_grpo_numbers_worked_out_by_hand():
    # group 7: scores 0, 0, 3: mean 1, unbiased std sqrt((1 + 1 + 4) / 2) = sqrt 3; group 2: one score, mean 0, std 1
    advantages_BT, returns_BT = estimate("grpo", outcome([0, 5, 0, 3], [7, 2, 7, 7]))
    expected_B = torch.tensor([-1 / 3**0.5, 5.0, -1 / 3**0.5, 2 / 3**0.5], dtype=F64)
    torch.testing.assert_close(advantages_BT, expected_B[:, None] * torch.tensor([1, 1, 0]), atol=1e-5, rtol=0)
    assert torch.equal(advantages_BT, returns_BT)


def test_dr_grpo_subtracts_the_mean_only():
    advantages_BT, _ = estimate("grpo", outcome([0, 5, 0, 3], [7, 2, 7, 7]), norm_by_std=False)
    assert advantages_BT[:, 0].tolist() == [-1, 5, -1, 2]


def test_rloo_is_the_score_minus_the_mean_of_the_others():
    scores, groups = [1.0, 4.0, 2.5, -1.0, 6.0, 3.0], [0, 0, 0, 1, 1, 9]
    advantages_BT, _ = estimate("rloo", outcome(scores, groups))
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        others = [s for j, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and j != i]
        baseline = sum(others) / len(others) if others else 0.0
        assert advantages_BT[i, :2].tolist() == pytest.approx([score - baseline] * 2)


def test_grpo_and_rloo_advantages_sum_to_zero_in_every_group():
    b = batch(num_rows=30)
    for name in ("grpo", "rloo"):
        first_token_B = estimate(name, b)[0][:, 0]
        assert first_token_B.view(10, 3).sum(dim=1).abs().max() < 1e-9
        assert first_token_B.abs().max() > 0.1


@pytest.mark.parametrize("score", [0.1, 0.3, 0.7, 1e4])
def test_a_group_of_equal_float32_scores_has_advantage_0(score):
    b = outcome([score] * 7, [0] * 7)
    b = {name: column.float() if column.is_floating_point() else column for name, column in b.items()}
    assert estimate("grpo", b)[0].abs().max() < 1e-4


def test_grpo_advantages_do_not_depend_on_the_scale_of_the_reward():
    b = batch()
    scaled = {**b, "rewards": b["rewards"] * 50 + 0.0}
    torch.testing.assert_close(estimate("grpo", scaled)[0], estimate("grpo", b)[0], atol=1e-4, rtol=0)


def test_reinforce_plus_plus_is_the_discounted_reward_to_go_whitened():
    b = outcome([8.0, -2.0], [0, 0])
    advantages_BT, returns_BT = estimate("reinforce_plus_plus", b, gamma=0.5)
    assert returns_BT.tolist() == [[4, 8, 0], [-1, -2, 0]]
    # mean 9 / 4 = 2.25, squares 3.0625 + 33.0625 + 10.5625 + 18.0625 = 64.75, variance / 3 = 21.5833, std 4.64579
    expected = torch.tensor([[0.37669, 1.23768, 0], [-0.69956, -0.91481, 0]], dtype=F64)
    torch.testing.assert_close(advantages_BT, expected, atol=1e-5, rtol=0)


def test_reinforce_plus_plus_is_gae_with_a_critic_that_returns_zero():
    b = batch()
    b["values"] = torch.zeros_like(b["values"])
    for ours, theirs in zip(estimate("reinforce_plus_plus", b, gamma=0.9), estimate("gae", b, gamma=0.9), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_reinforce_plus_plus_baseline_whitens_what_dr_grpo_gives():
    b = batch()
    dr_grpo_BT, _ = estimate("grpo", b, norm_by_std=False)
    torch.testing.assert_close(estimate("reinforce_plus_plus_baseline", b)[0], masked_whiten(dr_grpo_BT, b["mask"]))


# --- registry and refusals ------------------------------------------------------------------------


def test_each_estimator_declares_its_inputs():
    needs = {name: (e.needs_critic, e.needs_group) for name, e in ADVANTAGE_ESTIMATORS.items()}
    assert needs == {
        "gae": (True, False),
        "vapo": (True, False),
        **dict.fromkeys(
            ("grpo", "grpo_vectorized", "grpo_passk", "gpg", "opo", "maxrl", "gdpo", "raft"), (False, True)
        ),
        **dict.fromkeys(("rloo", "rloo_vectorized"), (False, True)),
        **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), (False, True)),
        "reinforce_plus_plus": (False, False),
        **dict.fromkeys(("remax", "star"), (False, False)),
        "reinforce_plus_plus_baseline": (False, True),
    }


def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"adv_estimator='gpro'.*'grpo'\? Known: gae, gdpo, gpg, grpo, ",
    ):
        get_adv_estimator("gpro")


@pytest.fixture
def registry_as_it_was():
    before = dict(ADVANTAGE_ESTIMATORS)
    yield
    ADVANTAGE_ESTIMATORS.clear()
    for name, entry in before.items():  # as their decorators had entered them, whatever the test has entered
        ADVANTAGE_ESTIMATORS.enter(name, entry)


def test_a_users_estimator_gets_the_arguments_its_signature_names(registry_as_it_was):
    @register_adv_est("minus_value", needs_critic=True)
    def minus_value(rewards_BT, mask_BT, *, values_BT, gamma):
        return rewards_BT - gamma * values_BT, rewards_BT

    @register_adv_est("everything")
    def everything(rewards_BT, mask_BT, **kwargs):
        return rewards_BT + len(kwargs), rewards_BT

    rewards_BT, mask_BT, values_BT = torch.ones(1, 2), torch.tensor([[1, 0]]), torch.full((1, 2), 4.0)
    assert get_adv_estimator("minus_value")(rewards_BT, mask_BT, values_BT=values_BT, gamma=0.5)[0].tolist() == [
        [-1, 0]
    ]
    assert get_adv_estimator("everything")(rewards_BT, mask_BT, baseline_B=torch.ones(1))[0].tolist() == [[7, 0]]


def test_a_name_can_be_registered_again_by_the_same_function_only(registry_as_it_was):
    register_adv_est("grpo", needs_group=True)(advantages.grpo)
    with pytest.raises(ConfigError, match="'grpo' is taken by hybridrl.algos.advantages.groups.grpo"):
        register_adv_est("grpo")(advantages.rloo)


def test_missing_or_misshapen_inputs_are_refused_by_name():
    b = batch()
    with pytest.raises(DataError, match="'gae' needs the critic's values"):
        get_adv_estimator("gae")(b["rewards"], b["mask"])
    with pytest.raises(DataError, match="'rloo' compares answers to the same prompt"):
        get_adv_estimator("rloo")(b["rewards"], b["mask"])
    with pytest.raises(DataError, match=r"response_mask \(12, 6\)"):
        get_adv_estimator("grpo")(b["rewards"], b["mask"][:, 1:], group_B=b["group"])
    with pytest.raises(DataError, match="group_B must have .* 12 rows"):
        get_adv_estimator("grpo")(b["rewards"], b["mask"], group_B=b["group"][1:])
    with pytest.raises(DataError, match="valid_B must have .* 12 rows"):
        get_adv_estimator("grpo")(b["rewards"], b["mask"], group_B=b["group"], valid_B=torch.ones(12, 7))


def test_the_formulas_import_nothing_of_ours_but_errors_and_the_registry():
    code = (
        "import sys\nfrom hybridrl import algos\n[getattr(algos, name) for name in algos.__all__]\n"
        "print(*sorted({m.split('.')[1] for m in sys.modules if m.startswith('hybridrl.')}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == ["algos", "errors", "import_path", "registry"]


def test_a_script_that_is_also_imported_by_its_path_registers_once(registry_as_it_was, tmp_path):
    code = tmp_path / "own.py"
    code.write_text(
        "def threes(token_level_rewards_BT, response_mask_BT): return response_mask_BT * 3, response_mask_BT\n"
    )
    for module in ("__main__", "own_1234abcd"):
        names = {"__name__": module}
        exec(compile(code.read_text(), str(code), "exec"), names)
        register_adv_est("threes")(names["threes"])
