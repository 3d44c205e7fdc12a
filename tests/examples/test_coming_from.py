"""docs/coming_from.md: the names that it gives exist."""

import importlib
import re
from pathlib import Path

import pytest

import hybridrl.sdk
from hybridrl import main_ppo
from hybridrl.algos import get_adv_estimator
from hybridrl.config.verl.table import rows_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")]


def named(pattern, text=TEXT):
    return sorted(set(re.findall(pattern, text)))


def test_every_setting_exists_here_or_is_one_of_verls_that_are_taken_over(capsys):
    settings = named(
        r"`((?:trainer|reward_model|custom_reward_function|actor_rollout_ref|critic|algorithm|data)(?:\.\w+)+)"
    )
    main_ppo.main(["--help"])
    known = capsys.readouterr().out
    absent = [name for name in settings if f"\n  {name}=" not in known]
    assert len(settings) > 20 and [name for name in absent if not rows_of(name)] == []


def test_every_module_of_the_library_exists():
    modules = named(r"`(hybridrl(?:\.\w+)+)`")
    assert len(modules) > 5
    for name in modules:
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute) or importlib.import_module(name), name


@pytest.mark.parametrize("row", [row for row in ROWS if row[0].startswith("`dlrover")], ids=lambda row: row[0][:50])
def test_the_sdk_has_dlrovers_names(row):
    names = named(r"`(\w+)`", row[0])
    assert names and [name for name in names if not hasattr(hybridrl.sdk, name)] == []


def test_every_estimator_exists():
    for name in ("gae", "reinforce_plus_plus", "rloo", "grpo"):
        assert name in TEXT and get_adv_estimator(name).name == name


def test_every_example_exists():
    files = named(r"`(examples/\w+)`") + [
        name.replace(".", "/") + ".py" for name in named(r"`python -m (examples[\w.]+)`")
    ]
    assert len(files) > 4 and [name for name in files if not (ROOT / name).exists()] == []


def test_the_start_for_users_of_trl_works_as_written(tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(from hybridrl import GRPOTrainer\n.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(block, space)  # the page's own code, as a reader would run it; training is tested with a model
    assert space["trainer"].config.data.train_batch_size == 2 and space["reward"]("5 ", "5") == 1
