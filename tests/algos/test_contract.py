"""What holds for every registered estimator, loss and aggregation: a new entry is tested without a line here.

Micro-batches, ranks, padding on both sides and the order of rows change nothing: in float64 to 1e-9, shares of tokens,
which are float32, to 1e-6. What an entry needs beside any columns is in `tests/support/algos/contract.py`.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from hybridrl.algos import ADVANTAGE_ESTIMATORS, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.algos.distillation import DIVERGENCES
from hybridrl.algos.policy_losses import OWN_AGG_MODES, get_policy_loss
from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, sequence_scores
from hybridrl.config.schema.distillation import DistillationConfig, DistillationLossConfig
from hybridrl.config.schema.rollout_correction import RolloutCorrectionConfig, correction_plan
from hybridrl.config.schema.workers import ActorConfig, PolicyLossConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.critic import critic_loss
from hybridrl.workers.losses import GlobalCounts, actor_loss
from hybridrl.workers.sft import sft_loss
from tests.support.algos.contract import (
    LOSS_SETTINGS,
    NON_NEGATIVE_SCORES,
    PREFERENCE_SETTINGS,
    columns_of,
)

F64 = torch.float64
B, T = 12, 6
ESTIMATORS, LOSSES = sorted(ADVANTAGE_ESTIMATORS), sorted(POLICY_LOSSES)
MODES, KL_KINDS = sorted(AGGREGATIONS), sorted(KL_ESTIMATORS)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _a_seed():
    torch.manual_seed(0)


def response_mask() -> torch.Tensor:
    """Return rows of 0 to T tokens, some with turns of an environment between them."""
    mask_BT = torch.arange(T) < torch.tensor([6, 5, 4, 3, 2, 1, 6, 6, 0, 4, 5, 6])[:, None]
    return mask_BT & (torch.rand(B, T) < 0.8)


def pad(values: torch.Tensor, *, left: int, right: int) -> torch.Tensor:
    """Return a (B, T) column with NaN, or 0 in a column of integers, on both sides.

    Others unchanged.
    """
    if values.ndim < 2 or values.shape[1] != T:
        return values
    filling = math.nan if values.is_floating_point() else 0
    return torch.nn.functional.pad(values, (left, right), value=filling)


# --- estimators


class Samples:
    """Rewards, mask and the columns that an estimator takes."""

    def __init__(self, name: str) -> None:
        self.name, self.mask_BT = name, response_mask()
        self.rewards_BT = torch.randn(B, T, dtype=F64)
        if name in NON_NEGATIVE_SCORES:
            self.rewards_BT = self.rewards_BT.abs()
        self.columns = columns_of(ADVANTAGE_ESTIMATORS[name].fn, B, T)
        self.valid_B = torch.ones(B, dtype=torch.bool)

    def estimate(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda values: values) -> list[torch.Tensor]:
        """Return advantages and returns for changed columns."""
        columns = {key: change(values) for key, values in self.columns.items()}
        mask_BT = change(self.mask_BT)
        pair = get_adv_estimator(self.name)(
            change(self.rewards_BT), mask_BT, valid_B=change(self.valid_B), gamma=0.9, lam=0.8, **columns
        )
        assert all((values_BT[~mask_BT] == 0).all() for values_BT in pair)
        return list(pair)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_reads_nothing_off_the_mask_and_no_column_of_padding(name):
    samples = Samples(name)
    plain = samples.estimate()
    assert plain[0].abs().sum() > 0
    for left, right in ((0, 3), (2, 0), (3, 1)):
        padded = samples.estimate(lambda values, left=left, right=right: pad(values, left=left, right=right))
        torch.testing.assert_close([values_BT[:, left : left + T] for values_BT in padded], plain, **CLOSE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_does_not_depend_on_the_order_of_rows(name):
    samples, order = Samples(name), torch.randperm(B)
    moved = samples.estimate(lambda values: values[order])
    torch.testing.assert_close(moved, [values_BT[order] for values_BT in samples.estimate()], **CLOSE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_leaves_its_inputs_alone_and_keeps_their_dtype(name):
    samples = Samples(name)
    given = {"rewards": samples.rewards_BT, "mask": samples.mask_BT} | samples.columns
    before = {key: values.clone() for key, values in given.items()}
    samples.estimate()
    assert all(torch.equal(given[key], before[key]) for key in given)
    half = samples.estimate(lambda values: values.float() if values.is_floating_point() else values)
    assert [values_BT.dtype for values_BT in half] == [torch.float32] * 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_whose_reward_failed_is_as_if_it_were_not_there(name):
    samples = Samples(name)
    samples.valid_B[[1, 5, 6]] = False
    samples.rewards_BT[~samples.valid_B] = math.nan
    values_BT = torch.where(samples.mask_BT, samples.columns.get("values_BT", torch.zeros(B, T, dtype=F64)), 0)
    found, present = samples.estimate(), samples.estimate(lambda values: values[samples.valid_B])
    torch.testing.assert_close([values_BT[samples.valid_B] for values_BT in found], present, **CLOSE)
    assert (found[0][~samples.valid_B] == 0).all()
    torch.testing.assert_close(found[1][~samples.valid_B], values_BT[~samples.valid_B])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_in_which_every_reward_failed_trains_nothing(name):
    samples = Samples(name)
    samples.valid_B[:] = False
    advantages_BT, returns_BT = samples.estimate()
    assert (advantages_BT == 0).all() and returns_BT.isfinite().all()


# --- losses


def rows_of(name: str, advantages_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the columns of an update, the policy's log-probs and its entropy included."""
    old_BT = -torch.rand(B, T, dtype=F64) - 0.05
    own = columns_of(get_policy_loss(name), B, T)
    return {key.removesuffix("_BT"): values for key, values in own.items()} | {
        "response_mask": response_mask(),
        "advantages": advantages_BT,
        "old_log_probs": old_BT,
        "ref_log_prob": old_BT + 0.2 * torch.randn(B, T, dtype=F64),
        "teacher_log_prob": old_BT + 0.2 * torch.randn(B, T, dtype=F64),
        "rollout_is_weights": torch.rand(B, T, dtype=F64) + 0.5,
        "log_probs": old_BT + 0.3 * torch.randn(B, T, dtype=F64),
        "entropy": torch.rand(B, T, dtype=F64),
        "values": torch.randn(B, T, dtype=F64),
        "returns": torch.randn(B, T, dtype=F64),
        "nll_weights": torch.rand(B, dtype=F64) * (torch.arange(B) % 2),
    }


OUTPUTS = ("log_probs", "entropy", "values")
Cut = Sequence[Sequence[int]]  # rows of each micro-batch; all ranks together, because ranks sum
CUTS: dict[str, tuple[Cut, int, int]] = {  # and padding on the left and on the right
    "micro-batches": ([range(5), range(5, 12)], 0, 0),
    "rows one by one, in another order, padded": ([[row] for row in (7, 3, 11, 0, 8, 1, 2, 10, 4, 9, 6, 5)], 0, 2),
    "ranks with rows of all lengths, padded on the left": ([range(0, 12, 2), range(1, 12, 2)], 3, 0),
}


def step(
    make_loss: Callable[[GlobalCounts], Callable], columns: dict[str, torch.Tensor], cut: Cut, left: int, right: int
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the sums over micro-batches: statistics with the loss, and the gradients of the model's outputs."""
    counts = GlobalCounts(*GlobalCounts.local(columns["response_mask"]))
    leaves = {name: columns[name].clone().requires_grad_() for name in OUTPUTS}
    totals: dict[str, torch.Tensor] = {}
    for part in cut:
        rows = {name: pad(values[list(part)], left=left, right=right) for name, values in (columns | leaves).items()}
        outputs = {name: rows.pop(name) if name != "values" else rows[name] for name in OUTPUTS}
        if "values" in outputs:
            rows["values"] = rows["values"].detach() - 0.1
        loss, stats = make_loss(counts)(outputs, DataProto.from_dict(tensors=rows))
        loss.backward()
        for name, value in (stats | {"loss": loss}).items():
            totals[name] = totals.get(name, 0) + value.detach()
    return totals, [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def assert_no_cut_changes_it(make_loss, columns, cuts=tuple(CUTS)):
    whole, gradients = step(make_loss, columns, [range(B)], 0, 0)
    mask_BT = columns["response_mask"]
    assert all(gradient.isfinite().all() and (gradient[~mask_BT] == 0).all() for gradient in gradients)
    assert sum(gradient.abs().sum() for gradient in gradients) > 0
    for cut in cuts:
        found, found_gradients = step(make_loss, columns, *CUTS[cut])
        name = {"msg": lambda text, cut=cut: f"{cut}: {text}"}
        torch.testing.assert_close(found_gradients, gradients, **CLOSE, **name)
        torch.testing.assert_close(found.pop("loss"), whole["loss"], **CLOSE, **name)
        # Shares of tokens are float32 whatever the dtype of the losses.
        torch.testing.assert_close(found, {key: whole[key] for key in found}, rtol=1e-6, atol=1e-7, **name)


def actor_config(loss: str, mode: str, **more: object) -> ActorConfig:
    policy = PolicyLossConfig(loss_mode=loss, **LOSS_SETTINGS.get(loss, {}))
    if "norm" in mode:
        more["loss_scale_factor"] = 10  # else the width of the batch, which padding changes
    return ActorConfig(policy_loss=policy, loss_agg_mode=mode, **more)


def modes_of(loss: str) -> Sequence[str]:
    return (OWN_AGG_MODES[loss],) if loss in OWN_AGG_MODES else MODES


@pytest.mark.parametrize(("loss", "mode"), [(loss, mode) for loss in LOSSES for mode in modes_of(loss)])
def test_no_cut_of_the_rows_changes_a_loss_its_statistics_or_its_gradient(loss, mode):
    columns = rows_of(loss, torch.randn(B, T, dtype=F64))
    terms = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_type": KL_KINDS[MODES.index(mode) % len(KL_KINDS)]}
    config = actor_config(loss, mode, positive_nll_coef=0.1, **terms)
    assert_no_cut_changes_it(lambda counts: actor_loss(config, counts), columns)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_cut_changes_what_an_estimator_teaches_with_any_loss(estimator):
    advantages_BT, _ = Samples(estimator).estimate()
    for number, loss in enumerate(LOSSES):
        columns = rows_of(loss, torch.where(advantages_BT == 0, torch.randn(B, 1, dtype=F64), advantages_BT))
        mode = modes_of(loss)[number % len(modes_of(loss))]
        config, cut = actor_config(loss, mode), sorted(CUTS)[number % len(CUTS)]
        assert_no_cut_changes_it(lambda counts, config=config: actor_loss(config, counts), columns, (cut,))


@pytest.mark.parametrize("kind", [*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS)])
def test_no_cut_changes_the_kl_loss(kind):
    columns = rows_of("vanilla", torch.randn(B, T, dtype=F64))
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
    assert_no_cut_changes_it(lambda counts: actor_loss(config, counts), columns)


CORRECTIONS = (
    {"loss_type": "ppo_clip", "rollout_rs": ["token_k1"], "rollout_rs_threshold": [1.2]},
    {"loss_type": "reinforce", "rollout_is": "token"},
    {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": [0.05]},
)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction["loss_type"])
def test_no_cut_changes_the_loss_of_bypass_mode(correction):
    columns = rows_of("vanilla", torch.randn(B, T, dtype=F64))
    columns.pop("rollout_is_weights")
    plan = correction_plan(RolloutCorrectionConfig(bypass_mode=True, **correction))
    assert_no_cut_changes_it(lambda counts: actor_loss(ActorConfig(), counts, correction=plan), columns)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", MODES)
def test_no_cut_changes_the_divergence_from_a_teacher(kind, mode):
    columns = rows_of("vanilla", torch.zeros(B, T, dtype=F64))
    loss = DistillationLossConfig(loss_mode=kind, use_task_rewards=False, use_policy_gradient=False)
    teacher = DistillationConfig(
        enabled=True, teacher_models={"t": {"model_path": "somewhere"}}, distillation_loss=loss
    )
    config = actor_config("vanilla", mode)
    assert_no_cut_changes_it(lambda counts: actor_loss(config, counts, distillation=teacher), columns)


def test_no_cut_changes_the_loss_of_the_critic_or_of_fine_tuning():
    columns = rows_of("vanilla", torch.zeros(B, T, dtype=F64))
    assert_no_cut_changes_it(lambda counts: critic_loss(0.5, counts), columns)
    assert_no_cut_changes_it(sft_loss, columns)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_a_divergence_of_a_token_depends_on_that_token_only_and_not_on_the_order_of_the_vocabulary(name):
    divergence, (student_CV, teacher_CV) = DIVERGENCES[name], torch.randn(2, 7, 9, dtype=F64).log_softmax(-1)
    renamed_V, k = torch.randperm(9), 3

    def losses(student_CV: torch.Tensor, teacher_CV: torch.Tensor) -> torch.Tensor:
        if not name.endswith("_topk"):
            return divergence(student_CV, teacher_CV)
        top = teacher_CV.topk(k, dim=1)
        rest_C1 = torch.log1p(-top.values.exp().sum(1, keepdim=True))
        return divergence(student_CV, top.indices, torch.cat([top.values, rest_C1], dim=1))

    whole_C = losses(student_CV, teacher_CV)
    parts = [losses(student_CV[part], teacher_CV[part]) for part in (slice(0, 2), slice(2, 7))]
    torch.testing.assert_close(torch.cat(parts), whole_C, **CLOSE)
    torch.testing.assert_close(losses(student_CV[:, renamed_V], teacher_CV[:, renamed_V]), whole_C, **CLOSE)


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_preference_loss_depends_on_its_own_comparison_only(name):
    loss, mask_BT = PREFERENCE_LOSSES[name], response_mask()
    mask_BT[:, 0] = True
    log_probs_BT = (-torch.rand(B, T, dtype=F64) - 0.05).requires_grad_()
    settings = {key: value for key, value in PREFERENCE_SETTINGS.items() if key in loss.settings}
    baseline_B, desirable_B = torch.full((B,), 0.2, dtype=F64), torch.arange(B) % 3 > 0

    def losses(rows: Sequence[int], left: int = 0, right: int = 0) -> torch.Tensor:
        padded = (pad(x[list(rows)], left=left, right=right) for x in (log_probs_BT, mask_BT))
        scores_B = sequence_scores(*padded, is_mean=loss.is_mean)
        if loss.is_paired:
            return loss.fn(scores_B[::2], scores_B[1::2], **settings)
        return loss.fn(scores_B, desirable_B[list(rows)], baseline_B[list(rows)], **settings)

    def gradient(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        [found] = torch.autograd.grad(sum(part.sum() for part in parts), log_probs_BT)
        return found

    whole = losses(range(B))
    parts = [losses(range(6, 12), 2, 1), losses(range(6), 0, 3)]
    torch.testing.assert_close(torch.cat(parts[::-1]), whole, **CLOSE)
    torch.testing.assert_close(gradient(parts), gradient([losses(range(B))]), **CLOSE)
