"""`--help` and docs/config.md."""

import subprocess
import sys
from pathlib import Path

from hybridrl.config import PPOConfig, SFTConfig, load_config
from hybridrl.config.introspection import keys
from hybridrl.config.load import PRESETS, preset_titles
from hybridrl.config.reference import PROGRAMS, markdown

ROOT = Path(__file__).parents[2]


def printed(capsys, *argv, schema=PPOConfig) -> str:
    assert load_config(schema, argv, program="python -m hybridrl.main_ppo", config_name="ppo_trainer") is None
    return capsys.readouterr().out


def test_help_shows_usage_presets_and_every_key(capsys):
    text = printed(capsys, "--help")
    assert text.startswith("usage: python -m hybridrl.main_ppo [key=value ...]")
    assert all(name in text for name in preset_titles("ppo_trainer")) and "sft_trainer" not in text
    assert [name for name in keys(PPOConfig) if f"\n  {name}=" not in text] == []


def test_help_shows_type_default_range_and_meaning(capsys):
    text = printed(capsys, "--help", "clip_ratio_low")
    assert text == (
        "actor_rollout_ref.actor: Training of the policy.\n"
        "  actor_rollout_ref.actor.clip_ratio_low=null\n"
        "      Lower clip range; null means clip_ratio. (float or null, >= 0, <= 1)\n"
    )


def test_help_for_a_word_shows_only_keys_with_it(capsys):
    text = printed(capsys, "--help", "trainer", schema=SFTConfig)
    shown = [line.partition("=")[0].strip() for line in text.splitlines() if line.startswith("  trainer.")]
    assert shown == [name for name in keys(SFTConfig) if "trainer" in name]
    assert "data.train_files" not in text and "usage" not in text


def test_every_preset_has_a_title_and_belongs_to_one_program():
    titles = {program: preset_titles(f"{program}_trainer") for program in ("ppo", "sft", "dpo", "rm", "distill")}
    titles |= {"generation": preset_titles("generation"), "eval": preset_titles("evaluation")}
    names = [name for of_one in titles.values() for name in of_one]
    assert sorted(names) == sorted(path.stem for path in PRESETS.glob("*.yaml"))
    for program, of_one in titles.items():
        assert all(title.startswith(f"main_{program}: ") and title.endswith(".") for title in of_one.values())


def test_docs_config_md_is_what_the_command_prints():
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.config"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == markdown(PROGRAMS)
    assert (ROOT / "docs" / "config.md").read_text() == done.stdout, "run: python -m hybridrl.config > docs/config.md"


def test_the_schema_is_read_without_hydra_torch_or_ray():
    code = "import sys, hybridrl.config; print([name for name in ('hydra', 'torch', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]"
