import pytest

from hybridrl.config import from_dict, load_config
from hybridrl.config.introspection import keys
from hybridrl.config.reference import PROGRAMS
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.unknown_keys import DEFAULTS, REMOVED
from hybridrl.errors import ConfigError


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_in_no_schema_and_says_the_way_out(key):
    assert not any(name == key or name.startswith(f"{key}.") for schema in PROGRAMS.values() for name in keys(schema))
    assert REMOVED[key].startswith("was removed: ") and "; " in REMOVED[key]


@pytest.mark.parametrize("word", ["trainer.old=2", "trainer.old.depth=2"])
def test_a_command_line_with_a_removed_setting_is_refused_with_the_way_out(monkeypatch, word):
    monkeypatch.setitem(REMOVED, "trainer.old", "was removed: every run does so; leave it out")
    with pytest.raises(ConfigError) as refused:
        load_config(PPOConfig, [word], program="main_ppo", config_name="ppo_trainer")
    assert str(refused.value) == f"{word.partition('=')[0]}: was removed: every run does so; leave it out"


@pytest.mark.parametrize(("key", "value"), DEFAULTS.items())
def test_saved_settings_of_an_earlier_version_are_read_unless_they_ask_for_what_is_gone(key, value):
    section, name = key.split(".")
    assert from_dict(PPOConfig, {section: {name: value}}) == PPOConfig()
    with pytest.raises(ConfigError, match=f"{key}: was removed"):
        from_dict(PPOConfig, {section: {name: True}})


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate=1e-5", "actor_rollout_ref.actor.optim.lr"),
        ("num_generations=8", "actor_rollout_ref.rollout.n"),
        ("save_steps=5", "trainer.save_freq"),
    ],
)
def test_a_name_of_another_library_is_answered_with_the_key_here(word, key):
    with pytest.raises(ConfigError, match=f"there is no such key; here it is {key}"):
        load_config(PPOConfig, [word], program="test", config_name="ppo_trainer")


def test_null_for_a_list_says_the_way_out():
    with pytest.raises(ConfigError, match=r"data.val_files=null: must be .*; leave the setting out for none"):
        load_config(PPOConfig, ["data.val_files=null"], program="test", config_name="ppo_trainer")
