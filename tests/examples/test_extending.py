"""docs/extending.md: every block is a complete short file, and works from outside the package by its import path."""

import csv
import re
import sys
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hybridrl.algos.policy_losses.policy_loss import POLICY_LOSSES
from hybridrl.import_path import load_object
from hybridrl.single_controller.worker import Worker
from hybridrl.testing import check_rollout, check_transport
from hybridrl.workers.rollout.base import rollout_class
from tests.support.end_to_end.runs import metrics, settings, train

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = {
    found.group(1): found.group(0)
    for found in (
        re.match(r"# (\w+\.py): .*", block, re.DOTALL) for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    )
    if found
}
CLASSES = {
    "my_rollout.py": "ToyRollout",
    "my_transport.py": "ToyTransport",
    "my_engine.py": "CautiousEngine",
    "my_rewards.py": "BriefAnswers",
    "my_logger.py": "CsvLogger",
    "my_role.py": "JudgedTrainer",
    "my_formulas.py": "PolicyLoss",
    "my_dataset.py": "Sums",
}
MAX_LINES = 60
SHORT = {"trainer__save_freq": -1, "trainer__val_before_train": "false", "trainer__test_freq": -1}


@pytest.fixture(autouse=True)
def own_formulas_end_with_their_test():
    registered = [(registry, dict(registry)) for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)]
    yield
    for registry, entries in registered:
        registry.clear()
        registry.update(entries)


@pytest.fixture
def path(tmp_path):
    """Return a function that writes a block to its file and returns the import path of its class."""

    def write(name: str) -> str:
        (tmp_path / name).write_text(BLOCKS[name], encoding="utf-8")
        return f"{tmp_path / name}:{CLASSES[name]}"

    return write


def test_every_part_of_the_page_has_one_short_complete_file(path):
    assert BLOCKS.keys() == CLASSES.keys()
    for name, block in BLOCKS.items():
        assert len(block.splitlines()) <= MAX_LINES, name
        assert isinstance(load_object(*path(name).rsplit(":", 1)), type)


def test_the_rollout_keeps_its_contract(path):
    assert "greedy tokens are those of the plain model" in check_rollout(rollout_class(path("my_rollout.py")))


def test_the_transport_keeps_its_contract(path):
    assert "stored versions arrive as they were sent" in check_transport(path("my_transport.py"))


def test_the_rollout_takes_part_in_a_run(tmp_path, path, tiny_qwen2):
    changes = {"actor_rollout_ref__rollout__name": path("my_rollout.py")}
    rows = train(tmp_path, tiny_qwen2, **changes, **SHORT)
    assert len([row for row in rows if "actor/grad_norm" in row]) == 2


@pytest.mark.slow
def test_the_transport_takes_part_in_a_run(tmp_path, path, tiny_qwen2, ray_cluster):
    sync = "actor_rollout_ref__rollout__weight_sync__"
    changes = {
        "trainer__backend": "ray",
        "actor_rollout_ref__rollout__n_gpus_per_node": 1,
        f"{sync}transport": path("my_transport.py"),
        f"{sync}directory": tmp_path / "weights",
    }
    rows = train(tmp_path, tiny_qwen2, **changes, **SHORT)
    assert len([row for row in rows if "actor/grad_norm" in row]) == 2
    assert {file.name for file in (tmp_path / "weights").iterdir()} >= {"version_1.pt", "version_2.pt"}


def test_engine_reward_manager_and_logger_take_part_in_a_run(tmp_path, path, tiny_qwen2):
    changes = {
        "actor_rollout_ref__actor__strategy": path("my_engine.py"),
        "reward_model__reward_manager": path("my_rewards.py"),
        "trainer__logger": f"[jsonl,{path('my_logger.py')}]",
    }
    rows = [row for row in train(tmp_path, tiny_qwen2, **changes, **SHORT) if "actor/grad_norm" in row]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    assert [float(row["actor/grad_norm"]) for row in logged] == [row["actor/grad_norm"] for row in rows]
    assert len(rows) == 2 and all(row["critic/score/min"] < 0.05 for row in rows)


def test_formulas_and_dataset_take_part_in_a_run(tmp_path, path, tiny_qwen2):
    path("my_dataset.py")
    changes = {
        "algorithm__path": f"[{path('my_formulas.py').partition(':')[0]}]",
        "algorithm__adv_estimator": "group_median",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "plain_ratio",
        "data__custom_cls__path": tmp_path / "my_dataset.py",
        "data__custom_cls__name": "Sums",
        "trainer__rollout_data_dir": tmp_path / "samples",
    }
    rows = [row for row in train(tmp_path, tiny_qwen2, **changes, **SHORT) if "actor/grad_norm" in row]
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 and row["actor/pg_clipfrac"] == 0 for row in rows)
    assert "What is " in (tmp_path / "samples" / "1.jsonl").read_text()


def test_the_role_takes_part_in_a_run(tmp_path, path, tiny_qwen2):
    trainer = load_object(*path("my_role.py").rsplit(":", 1))
    program = sys.modules[trainer.__module__]
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **SHORT), trainer_cls=trainer, workers=program.workers) == 0
    assert all(0 <= row["judge/brevity"] < 1 for row in metrics(tmp_path / "run") if row["step"])


def test_a_role_whose_worker_has_no_init_model_is_refused_before_a_process_starts(tmp_path, path, tiny_qwen2, capsys):
    trainer = load_object(*path("my_role.py").rsplit(":", 1))
    program = sys.modules[trainer.__module__]

    class Unready(Worker): ...

    def workers(config):
        return main_ppo.worker_classes(config) | {program.OwnRole.Judge: Unready}

    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **SHORT), workers=workers) == 2
    assert "role_worker_mapping['judge']: Unready registers no init_model" in capsys.readouterr().err
