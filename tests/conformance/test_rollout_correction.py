"""The rollout correction gives the numbers that verl's own code gives for the same tensors.

`data/verl_rollout_correction.json` has seeds, settings and results, and says from which release they are. Where the two
differ on purpose, `OTHERWISE` says so.
"""

import json
from pathlib import Path

import pytest
import torch

from hybridrl.algos.rollout_correction import mismatch_stats
from hybridrl.config.schema.rollout_correction import RolloutCorrectionConfig, correction_plan
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.sampling.off_policy import apply_rollout_correction

STORED = json.loads((Path(__file__).parent / "data" / "verl_rollout_correction.json").read_text())
OTHERWISE = {"rollout_is_max": "rollout_is_raw_max", "rollout_is_min": "rollout_is_raw_min"}
"""At level sequence verl's extremes are those before the threshold, at level token those after it."""


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, 8, generator=generator).double() * 3 - 0.1
    rollout = old + torch.randn(6, 8, generator=generator).double() * 0.3
    lengths = torch.tensor([8, 7, 5, 3, 2, 1])
    return old, rollout, (torch.arange(8) < lengths[:, None]).double()


def config_of(settings: dict) -> RolloutCorrectionConfig:
    lists = {key: [settings[key]] for key in ("rollout_rs", "rollout_rs_threshold") if key in settings}
    return RolloutCorrectionConfig(**settings | lists)


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: ",".join(map(str, case["settings"].values())))
def test_weights_masks_and_metrics_are_verls(case):
    old, rollout, mask = inputs(case["seed"])
    columns = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}
    batch = DataProto.from_dict(tensors=columns)
    plan = correction_plan(config_of(case["settings"]))
    found = apply_rollout_correction(batch, plan)
    found |= {f"rollout_corr/{name}": value for name, value in mismatch_stats(old, rollout, mask).items()}
    if case["weights"] is not None:
        expected = torch.tensor(case["weights"], dtype=torch.float64)
        torch.testing.assert_close(batch.batch["rollout_is_weights"], expected, rtol=1e-6, atol=1e-7)
    kept = batch.batch["rollout_rs_mask"] if plan.rejections else mask
    assert ["".join(str(int(x)) for x in row) for row in kept.tolist()] == case["mask"]
    names = {name: OTHERWISE.get(name, name) if plan.rollout_is == "sequence" else name for name in case["metrics"]}
    ours = {name: found[f"rollout_corr/{names[name]}"] for name in case["metrics"]}
    assert ours == pytest.approx(case["metrics"], rel=1e-6, abs=1e-7)


def test_the_stored_numbers_cover_every_kind_of_correction():
    settings = [case["settings"] for case in STORED["cases"]]
    assert {s.get("rollout_is") for s in settings} == {None, "token", "sequence"}
    assert len({s["rollout_rs"] for s in settings if "rollout_rs" in s}) == 12
    assert "verl 0.9.1" in STORED["origin"]
