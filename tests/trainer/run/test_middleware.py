"""User middleware that changes the loop: it shows in the graph before anything runs."""

import pytest

from hybridrl.cli import job_graph
from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import ConfigError

CHANGES = """
from hybridrl.framework import stage

def clip(task, trainer):
    limit = trainer.config.actor_rollout_ref.actor.clip_ratio
    task.insert_after("adv", stage("clip", reads=("advantages",), writes=("advantages",))(lambda ctx: limit))

def misspelt(task, trainer):
    task.insert_after("advantage", lambda ctx: None)

def early(task, trainer):
    task.insert_after("adv", trainer.groups["actor"])

def unplaced(task, trainer):
    task.insert_after("adv", stage("judge", role="judge", reads=("advantages",))(lambda ctx: None))
"""


@pytest.fixture
def config_with(tmp_path):
    (tmp_path / "changes.py").write_text(CHANGES)

    def load(name: str) -> PPOConfig:
        words = [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.n=2",
            f"trainer.middleware=[{tmp_path / 'changes.py'}:{name}]",
        ]
        return load_config(PPOConfig, words, program="p", config_name="ppo_trainer")

    return load


def test_the_graph_has_the_stages_that_middleware_adds(config_with):
    graph = job_graph(config_with("clip"))
    names = [spec.name for spec in graph.stages]
    assert names[names.index("adv") + 1] == "clip"
    assert [edge.source for edge in graph.edges_into("update_actor") if "advantages" in edge.columns] == ["clip"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelt", "no stage is called 'advantage'.*did you mean 'adv'"),
        ("early", "trainer.groups exists only while the loop runs; use it inside a stage"),
        ("unplaced", "stage 'judge' runs in role 'judge', which has no placement"),
    ],
)
def test_middleware_that_cannot_work_is_rejected_before_anything_starts(config_with, name, message):
    with pytest.raises(ConfigError, match=message):
        job_graph(config_with(name))
