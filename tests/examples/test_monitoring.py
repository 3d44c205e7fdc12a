"""docs/monitoring.md: its metrics are logged under these names, its settings exist, and its links resolve."""

import re
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.introspection import keys
from tests.support.end_to_end.runs import train

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
NAMES = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]
RUN = {  # logs what a run without failures can log
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__filter_groups__enable": True,
    "algorithm__rollout_correction__rollout_is": "token",
    "algorithm__rollout_correction__rollout_rs": "[token_k1]",
    "algorithm__rollout_correction__rollout_rs_threshold": "[0.5_2.0]",
    "actor_rollout_ref__actor__use_kl_loss": True,
    "trainer__lag": 1,
    "trainer__total_training_steps": 1,
    "trainer__test_freq": 1,
    "trainer__save_freq": -1,
}
UNLOGGED = {  # in this run; the module that logs it elsewhere
    "rollout/num_turns/mean": "serving/agent_loop/manager.py",
    "rollout/replicas_lost": "serving/agent_loop/manager.py",
    "rollout/requests_retried": "serving/agent_loop/manager.py",
    "failover/recoveries": "trainer/recovery/step_retry.py",
    "failover/seconds": "trainer/recovery/step_retry.py",
    "checkpoint/num_failed": "trainer/checkpoint/saver.py",
    "training/ranks/ROLE": "trainer/recovery/elastic.py",
    "actor/shared_prefix_ratio": "workers/engine_worker.py",
    **dict.fromkeys(
        [f"actor/routing/{name}" for name in ("differ", "missing", "shared_differ", "load_max")],
        "workers/engine/routing/replay.py",
    ),
    "perf/mfu/rollout": "trainer/run/metrics.py",  # not where a step drops responses
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory, tiny_qwen2) -> set[str]:
    """The names of all metrics of a run with scores of 0 and 1, which have a pass@k."""
    folder = tmp_path_factory.mktemp("monitoring")
    reward = folder / "has_digit.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(any(c.isdigit() for c in solution_str))\n"
    )
    rows = train(folder, tiny_qwen2, custom_reward_function__path=reward, **RUN)
    return {name for row in rows for name in row}


def test_a_run_logs_every_metric_of_the_page(logged):
    missing = [name for name in NAMES if name not in UNLOGGED and not any(map(pattern(name).fullmatch, logged))]
    assert len(NAMES) > 50 and missing == []


def pattern(name: str) -> re.Pattern:
    """Return what a name of the page stands for: a data source may have slashes, other placeholders are one word."""
    parts = re.split(r"\{(.*?)\}", name)
    wild = {"data_source": ".+", "n": r"\d+", "k": r"\d+"}
    return re.compile("".join(wild.get(part, r"\w+") if i % 2 else re.escape(part) for i, part in enumerate(parts)))


@pytest.mark.parametrize(("name", "module"), UNLOGGED.items())
def test_a_metric_of_failures_or_conversations_stands_in_its_module(name, module):
    logged = re.sub("^actor/|ROLE$|^perf/mfu/", "", name)  # the module adds the role, or the group
    assert name in NAMES and logged in (ROOT / "hybridrl" / module).read_text(encoding="utf-8")


def test_every_setting_of_the_page_exists():
    known = keys(PPOConfig)
    sections = "actor|rollout|algorithm|critic|data|reward_model|trainer"
    named = set(re.findall(rf"`((?:{sections})(?:\.\w+)+)[`=]", TEXT))
    full = {re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", name) for name in named}
    assert len(full) > 30 and sorted(full - known.keys()) == []


def test_every_row_has_four_cells_and_every_file_exists():
    assert {line.count("|") for line in TEXT.splitlines() if line.startswith("|")} == {5}
    files = re.findall(r"\]\((?!https:)([^)#]+)\)", TEXT)
    assert len(files) > 5 and [name for name in files if not (ROOT / "docs" / name).exists()] == []
