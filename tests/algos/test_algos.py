"""The registries of formulas: built-in names are declared by address, so that a run loads only those that it names."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.algos import advantages, policy_losses
from hybridrl.algos.advantages import ADVANTAGE_ESTIMATORS, register_adv_est
from hybridrl.algos.policy_losses import POLICY_LOSSES
from hybridrl.errors import ConfigError


@pytest.mark.parametrize(
    ("package", "registry"), [(advantages, ADVANTAGE_ESTIMATORS), (policy_losses, POLICY_LOSSES)], ids=lambda one: ""
)
def test_every_built_in_name_is_declared_and_what_is_declared_exists(package, registry):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)  # whatever registers itself there
    own = {name for name, entry in registry.items() if getattr(entry, "fn", entry).__module__.startswith("hybridrl.")}
    assert own == set(registry.builtins)


def test_looking_a_name_up_loads_its_module_alone():
    code = (
        "import sys; from hybridrl.algos import get_adv_estimator, get_policy_loss\n"
        "get_adv_estimator('rloo'), get_policy_loss('gspo')\n"
        "print(*(name for name in sys.modules if name.startswith('hybridrl.algos.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    loaded = {name.removeprefix("hybridrl.algos.") for name in done.stdout.split()}
    assert {"advantages.groups", "policy_losses.clipped"} <= loaded
    assert not loaded & {"advantages.temporal", "policy_losses.weighted", "distillation", "rollout_correction.weights"}


def test_a_name_of_ours_is_refused_to_a_user_also_before_it_is_loaded():
    with pytest.raises(ConfigError, match="the name 'gae' is taken by hybridrl.algos.advantages.temporal[.:]gae"):
        register_adv_est("gae")(lambda rewards, mask: None)


def test_the_tables_of_the_page_have_every_estimator_and_every_loss():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()

    def first_cells(heading):
        section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
        return {
            name for row in re.findall(r"^\|([^|]*)\|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }

    assert first_cells("Estimators") - {"algorithm"} == set(ADVANTAGE_ESTIMATORS)
    assert first_cells("Policy losses") - {"loss_mode"} == set(POLICY_LOSSES)
