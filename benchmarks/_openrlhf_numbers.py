"""Cases of OpenRLHF for `other_numbers.py`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from _other_formulas import CLIP, Case, case, definitions

from tests.support.algos.samples import pairs, samples


def openrlhf_cases(folder: Path) -> Iterator[Case]:
    models = folder / "openrlhf" / "models"
    masked_mean = definitions(models / "utils.py", ["masked_mean"]).masked_mean
    aggregate = definitions(models / "loss.py", ["aggregate_loss"], masked_mean=masked_mean).aggregate_loss
    losses = definitions(
        models / "loss.py",
        ["PolicyLoss", "ValueLoss", "PairWiseLoss", "DPOLoss"],
        masked_mean=masked_mean,
        aggregate_loss=aggregate,
    )
    s = samples(8, holes=True)
    for kind, name, dual, per_token in (
        ("ppo", "vanilla", None, True),
        ("ppo", "vanilla", 3.0, True),
        ("ppo", "vanilla", 3.0, False),
        ("gspo", "gspo", None, False),
    ):
        new = s["new"].clone().requires_grad_()
        loss_fn = losses.PolicyLoss(0.2, 0.3, dual_clip=dual, token_level_loss=per_token, policy_loss_type=kind)
        inputs = {"seed": 8, "holes": True, "advantages": "row_advantages"}
        loss = loss_fn(new, s["old"], s["row_advantages"], s["mask"])[0]
        loss.backward()
        settings = CLIP | {"clip_c": dual or 1e9, "mode": "token-mean" if per_token else "seq-mean-token-mean"}
        theirs = f"PolicyLoss, {kind}, dual_clip={dual}"
        yield case(theirs, "policy loss of a mode", name, settings, inputs, loss=loss, gradient=new.grad)
    values = s["values"].clone().requires_grad_()
    loss = losses.ValueLoss(0.5)(values, s["new"], s["rewards"], s["mask"])
    loss.backward()
    results = {"loss": loss, "gradient": values.grad}
    yield case("ValueLoss", "value loss", "clipped", {"cliprange": 0.5}, {"seed": 8, "holes": True}, **results)
    p = pairs(9)
    zeros = torch.zeros(5, dtype=torch.float64)
    for name, ipo in (("dpo", False), ("ipo", True)):
        loss = losses.DPOLoss(0.1, ipo=ipo)(p["chosen"], p["rejected"], zeros, zeros)[0]
        yield case(f"DPOLoss, ipo={ipo}", "mean preference", name, {"beta": 0.1}, {"seed": 9}, loss=loss)
    loss = losses.PairWiseLoss()(p["chosen"], p["rejected"], p["chosen"].abs())
    yield case("PairWiseLoss", "reward loss", "bradley_terry", {}, {"seed": 9}, loss=loss)
    maker = folder / "openrlhf" / "trainer" / "ppo_utils" / "experience_maker.py"
    names = ["RemoteExperienceMaker.get_advantages_and_returns", "RemoteExperienceMaker.get_cumulative_returns"]
    returns = definitions(maker, names)
    s = samples(8)
    _, found = returns.get_advantages_and_returns(None, s["values"], s["rewards"], s["mask"], 0.9, 0.8)
    settings = {"gamma": 0.9, "lam": 0.8}
    yield case("get_advantages_and_returns", "estimator", "gae", settings, {"seed": 8}, returns=found * s["mask"])
    found = returns.get_cumulative_returns(None, s["rewards"], s["mask"], 0.9)
    inputs = {"seed": 8}
    yield case(
        "get_cumulative_returns", "estimator", "reinforce_plus_plus", {"gamma": 0.9}, inputs, returns=found * s["mask"]
    )
