"""README.md and docs/commands.md: settings, commands and files exist; the sample reward function cannot be gamed."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.cli.arguments import command_parser
from hybridrl.config.load import preset_titles
from tests.support.end_to_end.runs import write_prompts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
BASH = "".join(re.findall(r"```bash\n(.*?)```", TEXT + COMMANDS, re.DOTALL)).replace("\\\n", " ")
TRAININGS = [shlex.split(line) for line in BASH.splitlines() if line.startswith("python -m hybridrl.main_ppo")]


def test_the_commands_of_the_page_are_those_of_the_program():
    subcommands = set(re.findall(r"`hybridrl ([a-z-]+)", COMMANDS))
    (shown,) = re.findall(r"\{([\w,-]+)\}", "".join(command_parser().format_usage().split()))
    assert subcommands == set(shown.split(","))


def test_the_readme_is_short_and_has_one_table():
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert len(TEXT.splitlines()) <= 150 and len(rows) <= 2 + 15


@pytest.mark.parametrize("words", TRAININGS, ids=["on this machine", "on GPUs"])
def test_a_training_command_resolves(words, capsys):
    assert main_ppo.main([*words[3:], "--cfg", "job"]) == 0
    assert "adv_estimator: grpo" in capsys.readouterr().out


def test_every_setting_in_the_text_exists(capsys):
    sections = "trainer|reward_model|custom_reward_function|actor_rollout_ref|critic|algorithm"
    settings = set(re.findall(rf"`((?:{sections})(?:\.\w+)+)[`=]", TEXT + COMMANDS))
    main_ppo.main(["--help"])
    known = capsys.readouterr().out
    assert len(settings) > 8 and [name for name in settings if f"\n  {name}=" not in known] == []


def test_every_preset_in_the_text_exists():
    (row,) = re.findall(r"start from a preset \|(.*)\|", COMMANDS)
    assert set(re.findall(r"`(?:--config-name )?(\w+)`", row)) <= preset_titles("ppo_trainer").keys()


def test_every_file_in_the_text_exists():
    named = re.findall(r"`((?:benchmarks|examples|docs|hybridrl|tests)/[\w/.]+)`", TEXT + COMMANDS)
    assert len(named) > 15 and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.timeout(180)
def test_the_run_from_python_works_as_written(tmp_path, tiny_qwen2, monkeypatch):
    (block,) = re.findall(r"```python\n(from hybridrl import GRPOTrainer\n.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_qwen2, "outputs/quickstart/sft/global_step_500/huggingface")
    Path("outputs/quickstart/data").mkdir()
    write_prompts(Path("outputs/quickstart/data/train.parquet"), 4)
    exec(block.replace('steps": 20', 'steps": 2'), {"__name__": "__main__"})
    assert Path("my-model-from-python/model.safetensors").exists()


def test_the_sample_reward_compares_whole_answers():
    (source,) = re.findall(r"```python\n# my_reward.py\n(.*?)```", TEXT, re.DOTALL)
    space = {}
    exec(source, space)  # the page's own code, as a reader would run it
    score = {
        text: space["compute_score"]("sums", text, "4")
        for text in ("<<6-2=4>> #### 4", "<<4+2=6>> #### 6", "<<4+2=6>>", "#### 44")
    }
    assert list(score.values()) == [1.0, 0.0, 0.0, 0.0]
