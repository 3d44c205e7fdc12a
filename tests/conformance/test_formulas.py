"""Formulas give the numbers that verl's, TRL's and OpenRLHF's own code gives for the same tensors, to 1e-6.

`data/*_formulas.json` name the releases. `benchmarks/other_numbers.py` wrote them. Where a formula differs on purpose,
docs/algorithms.md says so, and the cases avoid the difference.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.algos import agg_loss, clipped_value_loss, get_adv_estimator, get_policy_loss, kl_penalty, loss_counts
from hybridrl.algos.distillation import forward_kl, reverse_kl
from hybridrl.algos.kl import AdaptiveKLController
from hybridrl.algos.policy_losses.covariance import select_at_random, select_by_rank
from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, bradley_terry
from tests.support.algos.samples import logits, pairs, samples

DATA = Path(__file__).parent / "data"
STORED = [
    (path.name.removesuffix("_formulas.json"), case)
    for path in sorted(DATA.glob("*_formulas.json"))
    for case in json.loads(path.read_text())["cases"]
]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Results = dict[str, Any]


def batch(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return samples(inputs["seed"], holes=inputs.get("holes", False))


def reduce(losses_BT: torch.Tensor, mask_BT: torch.Tensor, mode: str) -> torch.Tensor:
    num_tokens, num_seqs = loss_counts(mask_BT)
    return agg_loss(losses_BT, mask_BT, mode, num_tokens=num_tokens, num_seqs=num_seqs)


def estimator(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    s, settings = batch(inputs), dict(settings)
    is_weights_BT = s["is_weights"] if settings.pop("is_weights", False) else None
    advantages_BT, returns_BT = get_adv_estimator(name)(
        s["rewards"],
        s["mask"],
        values_BT=s["values"],
        group_B=s["group"],
        baseline_B=s["baseline"],
        components_BK=s["components"],
        old_log_probs_BT=s["old"],
        sum_pi_squared_BT=s["sum_pi_squared"],
        is_weights_BT=is_weights_BT,
        **settings,
    )
    return {"advantages": advantages_BT, "returns": returns_BT}


def estimator_of_rows(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    """Return the advantage of each row's first token, with TRL's constant beside the standard deviation."""
    std_eps = settings.pop("std_eps", None)
    first_B = estimator(name, settings, inputs)["advantages"][:, 0]
    if std_eps is not None:  # TRL adds 1e-4 to the standard deviation, verl and we 1e-6
        scores = batch(inputs)["rewards"].sum(1).view(-1, 3)
        std_B = scores.std(1, keepdim=True).expand_as(scores).flatten()
        first_B = first_B * (std_B + 1e-6) / (std_B + std_eps)
    return {"advantages": first_B}


def selection(name: str, settings: dict[str, Any], s: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of a loss of selected tokens."""
    if name == "kl_cov":
        selected_BT = select_by_rank(s["old"], s["advantages"], s["mask"], ratio=settings.pop("kl_cov_ratio"))
    elif name == "clip_cov":
        low, high, ratio = (settings.pop(f"clip_cov_{key}") for key in ("lb", "ub", "ratio"))
        keys_BT = torch.arange(s["mask"].numel()).view_as(s["mask"])
        selected_BT = select_at_random(
            s["old"], s["advantages"], s["mask"], ratio=ratio, low=low, high=high, keys_BT=keys_BT
        )
    else:
        return {}
    assert selected_BT.any()
    return {"cov_selected_BT": selected_BT}


def policy_loss(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    s, settings = batch(inputs), dict(settings)
    modes = (settings.pop("mode"),) if "mode" in settings else MODES
    if name in ("gspo", "sapo", "geo_mean"):
        modes = ("seq-mean-token-mean",)
    length = settings.pop("max_len", None)
    assert length in (None, s["mask"].shape[1])
    new_BT = (s["old"] + inputs["shift"] if "shift" in inputs else s["new"]).clone().requires_grad_()
    advantages_BT = s[inputs.get("advantages", "advantages")]
    selected = selection(name, settings, s)
    parts = get_policy_loss(name)(new_BT, s["old"], advantages_BT, s["mask"], **settings, **selected)
    weights_BT = s["is_weights"] if inputs.get("weighted") else torch.ones_like(new_BT)  # as in workers/losses.py
    losses = [reduce(parts.losses_BT * weights_BT, s["mask"], mode) for mode in modes]
    losses[0].backward()
    means = {"approx_kl": parts.approx_kl_BT, "clipped": parts.clipped_BT.double()}
    values = [loss.item() for loss in losses]
    return {"losses": values, "loss": values[0], "gradient": new_BT.grad} | {
        key: reduce(values_BT, s["mask"], "token-mean") for key, values_BT in means.items()
    }


def aggregation(mode: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    s = batch(inputs)
    return {"loss": reduce(s["new"], s["mask"], mode)}


def kl(kind: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    s = batch(inputs)
    new_BT = s["new"].clone().requires_grad_()
    values_BT = kl_penalty(new_BT, s["ref"], kind)
    values_BT.sum().backward()
    return {"values": values_BT, "gradient": new_BT.grad}


def kl_controller(kind: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    controller, found = AdaptiveKLController(**settings), []
    for current in inputs["kl"]:
        controller.update(current, 64)
        found.append(controller.value)
    return {"values": found}


def value_loss(kind: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    s = batch(inputs)
    values_BT = s["values"].clone().requires_grad_()
    losses_BT, clipped_BT = clipped_value_loss(values_BT, s["new"], s["rewards"], **settings)
    loss = reduce(losses_BT, s["mask"], "token-mean")
    loss.backward()
    share = reduce(clipped_BT.double(), s["mask"], "token-mean")
    return {"loss": loss, "clipped": share, "gradient": values_BT.grad}


def preference(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    p, ending = pairs(inputs["seed"]), "_mean" if inputs["is_mean"] else ""
    assert PREFERENCE_LOSSES[name].is_mean == inputs["is_mean"]
    chosen_N, rejected_N = (p[f"{side}{ending}"].clone().requires_grad_() for side in ("chosen", "rejected"))
    losses_N = PREFERENCE_LOSSES[name].fn(chosen_N, rejected_N, **settings)
    losses_N.sum().backward()
    return {"losses": losses_N, "gradient": torch.cat([chosen_N.grad, rejected_N.grad])}


def mean_preference(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    p = pairs(inputs["seed"])
    return {"loss": PREFERENCE_LOSSES[name].fn(p["chosen"], p["rejected"], **settings).mean()}


def unpaired_preference(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    p = pairs(inputs["seed"])
    scores_B = torch.cat([p["chosen"], p["rejected"]]).requires_grad_()
    desirable_B = torch.arange(len(scores_B)) < len(p["chosen"])
    losses_B = PREFERENCE_LOSSES[name].fn(
        scores_B, desirable_B, torch.full_like(scores_B, inputs["baseline"]), **settings
    )
    losses_B.sum().backward()
    return {"losses": losses_B, "gradient": scores_B.grad}


def reward_loss(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    p = pairs(inputs["seed"])
    return {"loss": bradley_terry(p["chosen"], p["rejected"], p["chosen"].abs()).mean()}


def divergence(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> Results:
    student_CV, teacher_CV = logits(inputs["seed"])
    student_CV.requires_grad_()
    values_C = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}[name](
        student_CV.log_softmax(-1), teacher_CV.log_softmax(-1)
    )
    values_C.sum().backward()
    return {"values": values_C, "gradient": student_CV.grad}


OURS: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], Results]] = {
    "estimator": estimator,
    "estimator of rows": estimator_of_rows,
    "policy loss": policy_loss,
    "policy loss of a mode": policy_loss,
    "aggregation": aggregation,
    "kl": kl,
    "kl controller": kl_controller,
    "value loss": value_loss,
    "preference": preference,
    "mean preference": mean_preference,
    "unpaired preference": unpaired_preference,
    "reward loss": reward_loss,
    "divergence": divergence,
}


def named(value: tuple[str, dict[str, Any]]) -> str:
    source, case = value
    return f"{source}: {case['theirs']}, {case['settings']}"


@pytest.mark.parametrize("stored", STORED, ids=named)
def test_a_formula_gives_the_numbers_of(stored):
    _, case = stored
    found = OURS[case["kind"]](case["name"], dict(case["settings"]), case["inputs"])
    for key, expected in case["results"].items():
        ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (found[key], expected))
        torch.testing.assert_close(
            ours.detach(), theirs, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_the_stored_numbers_are_of_these_releases_and_of_every_formula_that_verl_has():
    origins = [json.loads(path.read_text())["origin"] for path in sorted(DATA.glob("*_formulas.json"))]
    assert [origin.split(" (")[0] for origin in origins] == ["openrlhf 0.11.2", "trl 1.16.0", "verl 0.9.1"]
    names = {kind: {c["name"] for source, c in STORED if source == "verl" and c["kind"] == kind} for kind in OURS}
    assert names["estimator"] >= {"gae", "grpo", "rloo", "opo", "remax", "gpg", "gdpo", "grpo_passk"}
    assert len(names["estimator"]) == 14 and len(names["policy loss"]) == 11 and len(names["aggregation"]) == 5
