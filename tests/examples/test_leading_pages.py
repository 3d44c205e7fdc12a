"""The pages that lead to others (index, start, concepts, operating): their commands, settings and code are real."""

import re
import shlex
from pathlib import Path

import pytest

from hybridrl import cli, main_ppo

DOCS = Path(__file__).parents[2] / "docs"
START = (DOCS / "start.md").read_text(encoding="utf-8")
LEADING = ("index", "start", "concepts", "operating")
TEXT = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in LEADING)


def test_the_run_from_python_on_the_start_page_can_be_set_up(tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", START, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(block, space)  # the page's own code; with a model it would train
    assert space["trainer"].config.data.train_batch_size == 2 and space["reward"]("5 ", "5") == 1


def test_the_training_command_on_the_start_page_resolves(capsys):
    (command,) = re.findall(r"^python -m hybridrl.main_ppo (--config-name.*?[^\\])\n", START, re.MULTILINE | re.DOTALL)
    assert main_ppo.main([*shlex.split(command.replace("\\\n", " ")), "--cfg", "job"]) == 0
    assert "adv_estimator: grpo" in capsys.readouterr().out


def test_every_setting_on_these_pages_exists(capsys):
    sections = "trainer|reward_model|custom_reward_function|actor_rollout_ref|critic|algorithm|data"
    settings = set(re.findall(rf"`((?:{sections})(?:\.\w+)+)(?:=[\w.]+)?`", TEXT)) - {"trainer.train"}
    main_ppo.main(["--help"])
    known = capsys.readouterr().out
    assert len(settings) > 10 and [name for name in settings if f"\n  {name}=" not in known] == []


@pytest.mark.parametrize("words", sorted(set(re.findall(r"(?:^|`)hybridrl ((?:job )?[a-z]+)", TEXT, re.MULTILINE))))
def test_every_command_on_these_pages_exists(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out
