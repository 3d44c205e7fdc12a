"""Cases of TRL for `other_numbers.py`."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _other_formulas import CLIP, Case, case, definitions, statement

from tests.support.algos.samples import GROUP_SIZE, logits, pairs, samples

TRL_GRPO: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    # their loss_type, their importance_sampling_level, our loss, our aggregation, our settings
    ("grpo", "token", "vanilla", "seq-mean-token-mean", {"clip_c": 1e9}),
    ("grpo, delta", "token", "vanilla", "seq-mean-token-mean", {"clip_c": 1.5}),
    ("bnpo", "token", "vanilla", "token-mean", {"clip_c": 1e9}),
    ("dapo", "token", "vanilla", "token-mean", {"clip_c": 1e9}),
    ("dr_grpo", "token", "vanilla", "seq-mean-token-sum-norm", {"clip_c": 1e9}),
    ("grpo", "sequence", "gspo", "seq-mean-token-mean", {"clip_low": 3e-2, "clip_high": 4e-2}),
    ("cispo", "token", "cispo", "token-mean", {"clip_low": 1.0}),
    ("sapo", "token", "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
)


def trl_cases(folder: Path) -> Iterator[Case]:
    trainers, experimental = folder / "trl" / "trainer", folder / "trl" / "experimental"
    grpo = definitions(trainers / "grpo_trainer.py", ["GRPOTrainer._compute_loss"], nanmin=torch.min, nanmax=torch.max)
    for row in TRL_GRPO:
        yield trl_grpo(grpo._compute_loss, *row)
    yield from trl_estimators(trainers)
    yield from trl_preferences(trainers, experimental)
    jsd = definitions(experimental / "gkd" / "gkd_trainer.py", ["GKDTrainer.generalized_jsd_loss"]).generalized_jsd_loss
    for name, beta in (("forward_kl", 0), ("reverse_kl", 1)):
        student, teacher = logits(4)
        student.requires_grad_()
        values = jsd(student, teacher, beta=beta, reduction="none").sum(-1)
        values.sum().backward()
        theirs = f"GKDTrainer.generalized_jsd_loss, beta={beta}"
        yield case(theirs, "divergence", name, {}, {"seed": 4}, values=values, gradient=student.grad)


def trl_grpo(compute_loss: Any, loss_type: str, level: str, name: str, mode: str, own: dict[str, Any]) -> Case:
    settings = CLIP | own
    s = samples(5)
    new = s["new"].clone().requires_grad_()
    kind, _, delta = loss_type.partition(", ")
    trainer = trl_trainer(new, kind, level, settings, delta=settings["clip_c"] if delta else None)
    ids, length = s["mask"].long(), s["mask"].shape[1]
    batch = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": s["mask"],
        "advantages": s["row_advantages"][:, 0],
        "old_per_token_logps": s["old"],
        "num_items_in_batch": s["mask"].sum(),
    }
    loss = compute_loss(trainer, None, batch)
    loss.backward()
    inputs = {"seed": 5, "advantages": "row_advantages"}
    theirs = f"GRPOTrainer, loss_type={kind}, importance_sampling_level={level}" + (", delta" if delta else "")
    settings = settings | {"mode": mode} | ({"max_len": length} if "norm" in mode else {})
    return case(theirs, "policy loss of a mode", name, settings, inputs, loss=loss, gradient=new.grad)


def trl_trainer(new: torch.Tensor, kind: str, level: str, settings: dict[str, Any], *, delta: float | None) -> Any:
    """Return what `_compute_loss` reads of its trainer."""
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    metrics = {"train": {key: [] for key in TRL_METRICS}}
    high = settings["clip_high"] + (1 if kind == "cispo" else 0)  # TRL's bound of cispo is that of the ratio itself
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        _entropy_bonus_enabled=False,
        _metrics=metrics,
        accelerator=accelerator,
        args=SimpleNamespace(
            delta=delta,
            steps_per_generation=1,
            sapo_temperature_pos=settings.get("tau_pos"),
            sapo_temperature_neg=settings.get("tau_neg"),
            use_bias_correction_kl=False,
        ),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=high,
        epsilon_low=settings["clip_low"],
        importance_sampling_level=level,
        loss_type=kind,
        max_completion_length=new.shape[1],
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )


TRL_METRICS = (
    *("kl", "entropy", "cispo_clip_ratio"),
    *(
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "clip_ratio/low_min",
        "clip_ratio/high_max",
    ),
)


def trl_estimators(trainers: Path) -> Iterator[Case]:
    s = samples(6)
    scores = s["rewards"].sum(1)
    nanstd = definitions(trainers / "utils.py", ["nanstd"]).nanstd
    scale = {"group": "grpo", "none": "grpo"}
    for scale_rewards, name in scale.items():
        names = statement(
            trainers / "grpo_trainer.py",
            'if self.multi_objective_aggregation == "sum_then_normalize"',
            self=SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize",
                reward_weights=torch.ones(1, dtype=torch.float64),
                scale_rewards=scale_rewards,
            ),
            rewards_per_func=scores[:, None],
            unscorable_mask=torch.zeros(len(scores), dtype=torch.bool),
            num_generations=GROUP_SIZE,
            device="cpu",
            nanstd=nanstd,
        )
        theirs, settings = f"GRPOTrainer, scale_rewards={scale_rewards}", {"norm_by_std": scale_rewards == "group"}
        if scale_rewards == "group":
            settings["std_eps"] = 1e-4
        yield case(theirs, "estimator of rows", name, settings, {"seed": 6}, advantages=names["advantages"])
    names = statement(
        trainers / "rloo_trainer.py",
        "if num_generations > 1:\n            baselines",
        num_generations=GROUP_SIZE,
        rewards=scores,
        grouped_rewards=scores.view(-1, GROUP_SIZE),
        grouped_sum=scores.view(-1, GROUP_SIZE).sum(1, keepdim=True),
        scorable_counts=GROUP_SIZE,
    )
    yield case("RLOOTrainer", "estimator of rows", "rloo", {}, {"seed": 6}, advantages=names["advantages"])


def trl_preferences(trainers: Path, experimental: Path) -> Iterator[Case]:
    p = pairs(7)
    for name, loss_type, own in (
        ("dpo", "sigmoid", {"beta": 0.1}),
        ("ipo", "ipo", {"beta": 0.1}),
    ):
        yield _pair_case(
            f"DPOTrainer, loss_type={loss_type}", name, own, p, lambda c, r, t=loss_type: trl_dpo(trainers, t, c, r, p)
        )
    cpo = definitions(experimental / "cpo" / "cpo_trainer.py", ["CPOTrainer.cpo_loss"]).cpo_loss
    settings = {"beta": 2.0, "simpo_gamma": 0.5}
    trainer = SimpleNamespace(
        alpha=0.0, loss_type="simpo", label_smoothing=0.0, accelerator=SimpleNamespace(device="cpu"), **settings
    )
    yield _pair_case("CPOTrainer.cpo_loss, simpo", "simpo", settings, p, lambda c, r: cpo(trainer, c, r)[0])
    smooth = SimpleNamespace(**vars(trainer) | {"loss_type": "sigmoid", "label_smoothing": 0.1, "beta": 0.1})
    yield _pair_case(
        "CPOTrainer.cpo_loss, sigmoid",
        "dpo",
        {"beta": 0.1, "label_smoothing": 0.1},
        p,
        lambda c, r: cpo(smooth, c, r)[0],
    )
    orpo = definitions(experimental / "orpo" / "orpo_trainer.py", ["log1mexp", "ORPOTrainer.odds_ratio_loss"])
    odds = definitions(
        experimental / "orpo" / "orpo_trainer.py", ["ORPOTrainer.odds_ratio_loss"], log1mexp=orpo.log1mexp
    ).odds_ratio_loss
    own = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    yield _pair_case("ORPOTrainer.odds_ratio_loss", "orpo", {"beta": 0.1}, p, lambda c, r: -c - odds(own, c, r)[0])
    yield trl_kto(trainers)
    yield trl_reward(trainers)


def _pair_case(theirs: str, name: str, settings: dict[str, Any], p: dict[str, torch.Tensor], fn: Any) -> Case:
    """Return a case of a paired loss; `fn` gets the scores that ours compares."""
    is_mean = name in ("ipo", "orpo", "simpo")
    chosen, rejected = (
        p[f"{side}_mean" if is_mean else side].clone().requires_grad_() for side in ("chosen", "rejected")
    )
    losses = fn(chosen, rejected)
    losses.sum().backward()
    inputs = {"seed": 7, "is_mean": is_mean}
    return case(
        theirs,
        "preference",
        name,
        settings,
        inputs,
        losses=losses,
        gradient=[*chosen.grad.tolist(), *rejected.grad.tolist()],
    )


def trl_dpo(trainers: Path, loss_type: str, chosen: torch.Tensor, rejected: torch.Tensor, p: dict) -> torch.Tensor:
    """Return the losses of the branch of `DPOTrainer._compute_loss`; for IPO it divides sums by lengths itself."""
    lengths = torch.cat([p["chosen_lengths"], p["rejected_lengths"]])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if loss_type == "ipo":
        chosen, rejected = chosen * p["chosen_lengths"], rejected * p["rejected_lengths"]
    names = statement(
        trainers / "dpo_trainer.py",
        'if loss_type == "sigmoid":',
        self=SimpleNamespace(beta=0.1, label_smoothing=0.0),
        loss_type=loss_type,
        delta_score=chosen - rejected,
        chosen_scores=chosen,
        rejected_scores=rejected,
        completion_mask=mask,
    )
    return names["per_sequence_loss"]


def trl_kto(trainers: Path) -> Case:
    p = pairs(7)
    settings = {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    zeros = torch.zeros(5, dtype=torch.float64)
    chosen, rejected = (p[side].clone().requires_grad_() for side in ("chosen", "rejected"))
    names: dict[str, Any] = {
        "self": SimpleNamespace(loss_type="kto", **settings),
        "kl": torch.tensor(0.7, dtype=torch.float64),
        "chosen_logps": chosen,
        "rejected_logps": rejected,
        "ref_chosen_logps": zeros,
        "ref_rejected_logps": zeros,
    }
    path = trainers / "kto_trainer.py"
    for beginning in ("if chosen_logps.shape[0] != 0", "if rejected_logps.shape[0] != 0", "losses = torch.cat("):
        names |= statement(path, beginning, **names)
    names["losses"].sum().backward()
    gradient = [*chosen.grad.tolist(), *rejected.grad.tolist()]
    inputs = {"seed": 7, "baseline": 0.7}
    return case("KTOTrainer", "unpaired preference", "kto", settings, inputs, losses=names["losses"], gradient=gradient)


def trl_reward(trainers: Path) -> Case:
    p = pairs(7)
    names = statement(
        trainers / "reward_trainer.py",
        'if "margin" in inputs:',
        inputs={"margin": p["chosen"].abs()},
        rewards_chosen=p["chosen"],
        rewards_rejected=p["rejected"],
    )
    return case("RewardTrainer, margin", "reward loss", "bradley_terry", {}, {"seed": 7}, loss=names["loss"])
