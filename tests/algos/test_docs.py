"""docs/algorithms.md names what is registered, and nothing else."""

import re
from pathlib import Path

from hybridrl.algos import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def first_cells(heading):
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\|([^|]*)\|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_the_tables_have_every_estimator_and_every_loss():
    assert first_cells("Estimators") - {"algorithm"} == set(ADVANTAGE_ESTIMATORS)
    assert first_cells("Policy losses") - {"loss_mode"} == set(POLICY_LOSSES)
