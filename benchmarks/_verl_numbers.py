"""Cases of verl for `other_numbers.py`."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _other_formulas import CLIP, Case, Settings, case, load_verl

from tests.support.algos.samples import samples

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def verl_cases(folder: Path) -> Iterator[Case]:
    verl = load_verl(folder)
    yield from verl_estimators(verl)
    yield from verl_losses(verl)
    for kind, seed in itertools.product(
        ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k3+"), (0,)
    ):
        s = samples(seed)
        new = s["new"].clone().requires_grad_()
        values = verl.kl_penalty(new, s["ref"], kind)
        values.sum().backward()
        yield case("core_algos.kl_penalty", "kl", kind, {}, {"seed": seed}, values=values, gradient=new.grad)
    s = samples(1, holes=True)
    for mode in MODES:
        loss = verl.agg_loss(s["new"], s["mask"], mode)
        yield case("core_algos.agg_loss", "aggregation", mode, {}, {"seed": 1, "holes": True}, loss=loss)
    values = s["values"].clone().requires_grad_()
    loss, share = verl.compute_value_loss(values, s["rewards"], s["new"], s["mask"], 0.5)
    loss.backward()
    results = {"loss": loss, "clipped": share, "gradient": values.grad}
    yield case(
        "core_algos.compute_value_loss",
        "value loss",
        "clipped",
        {"cliprange": 0.5},
        {"seed": 1, "holes": True},
        **results,
    )
    controller = verl.AdaptiveKLController(0.2, 0.1, 1000)
    found = [controller.update(kl, 64) or controller.value for kl in (0.3, 0.11, 0.05)]
    settings = {"init_kl_coef": 0.2, "target_kl": 0.1, "horizon": 1000}
    yield case(
        "core_algos.AdaptiveKLController",
        "kl controller",
        "adaptive",
        settings,
        {"kl": [0.3, 0.11, 0.05]},
        values=found,
    )


VERL_ESTIMATORS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("gae", {"gamma": 1.0, "lam": 1.0}, True),
    ("gae", {"gamma": 0.9, "lam": 0.8}, False),
    ("gae", {"gamma": 0.9, "lam": 0.8}, True),
    ("grpo", {}, True),
    ("grpo", {"norm_by_std": False}, False),
    ("grpo_vectorized", {}, True),
    ("rloo", {}, True),
    ("rloo_vectorized", {}, True),
    ("reinforce_plus_plus", {"gamma": 0.9}, True),
    ("reinforce_plus_plus_baseline", {}, True),
    ("opo", {}, True),
    ("grpo_passk", {}, True),
    ("grpo_passk", {"norm_by_std": False}, False),
    ("remax", {}, True),
    ("gpg", {}, True),
    ("gdpo", {"component_weights": [1.0, 0.5]}, False),
    ("optimal_token_baseline", {}, False),
    ("optimal_token_baseline", {"is_weights": True}, False),
    ("tir_optimal_token_baseline", {}, True),
    ("tir_optimal_token_baseline", {"is_weights": True}, True),
)


def verl_estimators(verl: SimpleNamespace) -> Iterator[Case]:
    for (name, settings, holes), seed in itertools.product(VERL_ESTIMATORS, (0,)):
        s = samples(seed, holes=holes)
        advantages, returns = verl.ADV_ESTIMATOR_REGISTRY[name](**verl_arguments(name, s, settings))
        results = {"advantages": advantages * s["mask"], "returns": returns * s["mask"]}
        if name == "gdpo":
            results.pop("returns")
        yield case(f"core_algos, {name}", "estimator", name, settings, {"seed": seed, "holes": holes}, **results)


def verl_arguments(name: str, s: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of verl's estimator for our settings."""
    by_std = settings.get("norm_by_std", True)
    config = Settings(gamma=settings.get("gamma", 1.0), norm_adv_by_std_in_grpo=by_std)
    given = {"token_level_rewards": s["rewards"], "response_mask": s["mask"]}
    if name == "gae":
        return given | {"values": s["values"], "gamma": settings["gamma"], "lam": settings["lam"]}
    given |= {"index": s["group"].numpy(), "config": config}
    if name.startswith("grpo") and name != "grpo_passk":
        given |= {"norm_adv_by_std_in_grpo": by_std}
    if name == "remax":
        given |= {"reward_baselines": s["baseline"]}
    if name.endswith("token_baseline"):
        weights = s["is_weights"] if settings.get("is_weights") else None
        given |= {"old_log_probs": s["old"], "sum_pi_squared": s["sum_pi_squared"], "rollout_is_weights": weights}
    if name == "gdpo":
        keys = [f"reward_{k}" for k in range(s["components"].shape[1])]
        config |= {"gdpo_reward_keys": keys, "gdpo_reward_weights": settings["component_weights"]}
        rewards = {key: column.numpy() for key, column in zip(keys, s["components"].T, strict=True)}
        batch = {"prompts": s["mask"][:, :0], "attention_mask": s["mask"].long()}
        given |= {"non_tensor_batch": rewards, "batch": batch}
    return given


VERL_LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {},
    "geo_mean": {},
    "cispo": {},
    "gpg": {},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "dro": {"dro_beta": 0.5},
    "dppo_tv": {},
    "dppo_kl": {},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
}


def verl_losses(verl: SimpleNamespace) -> Iterator[Case]:
    for name, settings in VERL_LOSSES.items():
        for weighted in (False, True):
            if weighted and name == "geo_mean":
                continue  # verl takes the weights' geometric mean, see docs/algorithms.md
            inputs = {"seed": 2, "holes": True, "weighted": weighted}
            if name == "geo_mean":
                inputs["advantages"] = "row_advantages"
            if name.endswith("_cov"):
                inputs["shift"] = 0.1  # covariances are then those before the update, by which ours selects
            yield case(
                f"core_algos, {name}",
                "policy loss",
                name,
                CLIP | settings,
                inputs,
                **verl_loss(verl, name, settings, inputs),
            )


def verl_loss(verl: SimpleNamespace, name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    s = samples(inputs["seed"], holes=inputs["holes"])
    clip_c = 20.0 if name.startswith("dppo") else CLIP["clip_c"]
    config = Settings(
        clip_ratio=0.2, clip_ratio_low=CLIP["clip_low"], clip_ratio_high=CLIP["clip_high"], clip_ratio_c=clip_c
    )
    config |= {"global_batch_info": {}, "policy_loss": Settings(settings)} | settings
    results: dict[str, Any] = {"losses": []}
    for mode in ("seq-mean-token-mean",) if name in ("gspo", "sapo", "geo_mean") else MODES:
        new = (s["old"] + inputs["shift"] if "shift" in inputs else s["new"]).clone().requires_grad_()
        weights = s["is_weights"] if inputs["weighted"] else None
        arguments = (s["old"], new, s[inputs.get("advantages", "advantages")], s["mask"], mode)
        loss, metrics = verl.POLICY_LOSS_REGISTRY[name](*arguments, config=config, rollout_is_weights=weights)
        loss.backward()
        results["losses"].append([mode, loss.item()])
        if "gradient" not in results:
            results["gradient"] = new.grad
    if name not in ("geo_mean", "kl_cov") and "actor/ppo_kl" in metrics:
        results["approx_kl"] = metrics["actor/ppo_kl"]
    if name not in ("geo_mean", "sapo", "clip_cov") and "actor/pg_clipfrac" in metrics:
        results["clipped"] = metrics["actor/pg_clipfrac"]
    results["losses"] = [loss for _, loss in results["losses"]]
    return results
