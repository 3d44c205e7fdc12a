"""The schemas of all programs: size, defaults, and conversion to and from dictionaries."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config import (
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    from_dict,
    load_config,
    to_dict,
    to_yaml,
)
from hybridrl.config.introspection import keys, sections

SCHEMAS = [PPOConfig, SFTConfig, DPOConfig, RMConfig, GenerationConfig, EvaluationConfig]
MAX_KEYS = 300  # 200, sampling, distillation, settings of single losses, free sections of other engines
# The keys that most of verl's launch scripts set, with their values.
FREQUENT = (Path(__file__).parent / "frequent_overrides.txt").read_text().split()


def test_the_ppo_schema_has_no_more_keys_than_it_had():
    assert len(keys(PPOConfig)) <= MAX_KEYS


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_and_section_has_a_sentence(schema):
    for section in sections(schema):
        assert section.help.endswith(".") or not section.name, section.name
        assert all(key.help.endswith(".") for key in section.keys), section.name


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_defaults_pass_their_own_checks_and_come_back_equal(schema):
    assert from_dict(schema, to_dict(schema())) == schema() == from_dict(schema, {})


def test_keys_of_verl_launch_scripts_are_accepted():
    config = load_config(PPOConfig, FREQUENT, program="p", config_name="ppo_trainer")
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.actor.entropy_coeff == 0.0
    assert config.data.train_files == ["a.parquet"]
    assert config.trainer.logger == ["console", "wandb"]


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().trainer.seed = 3


texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: text.lower() != "none"
)
numbers = st.floats(0, 1e6, allow_nan=False)
mappings = st.dictionaries(
    st.text("abc", min_size=1), st.one_of(texts, st.integers(), numbers, st.booleans(), st.none(), st.lists(texts))
)


@settings(max_examples=8, deadline=None)
@given(path=texts, files=st.lists(texts), coefficient=numbers, lr=st.floats(1e-12, 1e3), free=mappings)
def test_a_saved_yaml_loads_back_to_an_equal_config(tmp_path_factory, path, files, coefficient, lr, free):
    config = from_dict(
        PPOConfig,
        {
            "data": {"train_files": files, "apply_chat_template_kwargs": free},
            "actor_rollout_ref": {"model": {"path": path}, "actor": {"optim": {"lr": lr}}},
            "algorithm": {"kl_ctrl": {"kl_coef": coefficient}},
        },
    )
    folder = tmp_path_factory.mktemp("saved config")
    (folder / "saved.yaml").write_text(to_yaml(config))
    flags = ["--config-path", str(folder), "--config-name", "saved"]
    assert load_config(PPOConfig, flags, program="p", config_name="ppo_trainer") == config
