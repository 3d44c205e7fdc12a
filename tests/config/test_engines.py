"""Settings of training engines: sections of the built-in ones, and `engine_config` of the user's."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from hybridrl.config import PPOConfig, check_config, from_dict
from hybridrl.config.checks.engines import supervised_engine_problems
from hybridrl.config.engines import SECTIONS, critic_engine_settings, engine_settings, single_process_layout
from hybridrl.config.plugs import ENGINES, REWARD_MANAGERS, TRACKERS
from hybridrl.config.schema.sft import SFTConfig
from hybridrl.errors import ConfigError
from tests.config.checks.test_rules import NAMES, ROLLOUTS

ENGINE = """
from dataclasses import dataclass

from hybridrl.config.fields import setting
from hybridrl.config.schema.engine import EngineSettings


@dataclass(frozen=True)
class Settings(EngineSettings):
    shards: int = setting(1, "Processes that share a model.", ge=1)
    label: str = "plain"

    @property
    def model_parallel_size(self):
        return self.shards

    def single_process(self):
        return Settings(label=self.label)


class Mine:
    Config = Settings
"""


@pytest.fixture
def mine(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(ENGINE)
    return f"{tmp_path / 'mine.py'}:Mine"


def config_of(strategy: str, **actor) -> PPOConfig:
    actor = {"strategy": strategy, **actor}
    return from_dict(PPOConfig, {"actor_rollout_ref": {"actor": actor}, "critic": {"strategy": strategy}})


def problems(config: PPOConfig) -> str:
    try:
        check_config(config, **NAMES, rollout=ROLLOUTS["vllm"], transport=None, with_inputs=False)
    except ConfigError as error:
        return str(error)
    return ""


def test_heads_that_processes_cannot_share_are_refused_before_a_model_loads(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 9}')
    config = config_of("fsdp", fsdp_config={"ulysses_sequence_parallel_size": 2})
    config = replace(config, trainer=replace(config.trainer, n_gpus_per_node=2))
    policy = replace(config.actor_rollout_ref, model=replace(config.actor_rollout_ref.model, path=str(tmp_path)))
    found = problems(replace(config, actor_rollout_ref=policy))
    assert f"ulysses_sequence_parallel_size=2: {tmp_path} has num_attention_heads=9, which 2 processes" in found
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    found = problems(replace(config, actor_rollout_ref=policy))
    assert f"ulysses_sequence_parallel_size=2: {tmp_path} reads images" in found


def test_token_budgets_are_those_of_one_of_the_processes_that_share_a_sequence():
    config = config_of("fsdp", fsdp_config={"ulysses_sequence_parallel_size": 2}, ppo_max_token_len_per_gpu=800)
    assert "ppo_max_token_len_per_gpu=800: one sequence may have" not in problems(config)
    assert "ppo_max_token_len_per_gpu=800: one sequence may have" in problems(
        config_of("fsdp", ppo_max_token_len_per_gpu=800)
    )


@pytest.mark.parametrize("registry", [ENGINES, REWARD_MANAGERS, TRACKERS], ids=lambda one: one.kind)
def test_every_built_in_address_is_that_of_a_class(registry):
    for name in registry.builtins:
        if name != "megatron" or find_spec("megatron"):
            assert isinstance(registry.lookup(name), type), name


def test_the_section_of_a_built_in_engine_is_what_its_class_declares():
    assert SECTIONS.keys() == ENGINES.builtins.keys()
    for name in SECTIONS:
        if name != "megatron" or find_spec("megatron"):
            assert type(engine_settings(config_of(name).actor_rollout_ref.actor)) is ENGINES.lookup(name).Config


def test_engine_config_is_checked_by_the_dataclass_of_the_engine(mine):
    config = config_of(mine, engine_config={"shards": 2})
    assert engine_settings(config.actor_rollout_ref.actor).shards == 2
    for values, words in (
        ({"shards": 0}, "actor_rollout_ref.actor.engine_config.shards=0: must be >= 1"),
        ({"label": 1.5}, "actor_rollout_ref.actor.engine_config.label=1.5: must be text"),
        ({"shard": 2}, "actor_rollout_ref.actor.engine_config.shard: there is no such key; did you mean shards?"),
    ):
        assert words in problems(config_of(mine, engine_config=values)), words


def test_engine_config_of_a_supervised_program_is_checked_too(mine):
    def found(**values):
        return "\n".join(supervised_engine_problems(from_dict(SFTConfig, values)))

    with pytest.raises(ConfigError, match=r"strategy=mine: 'mine' is not a known training engine.*model\.external_lib"):
        found(strategy="mine")
    assert "engine_config={shards:2}: has no effect with strategy=fsdp" in found(engine_config={"shards": 2})
    assert "engine_config.shard: there is no such key; did you mean shards?" in found(
        strategy=mine, engine_config={"shard": 2}
    )
    two = {"strategy": mine, "engine_config": {"shards": 2}}
    assert "shares a model between 2 processes, which does not divide the 1 processes" in found(**two)
    assert "model.lora_rank=8" in found(strategy=mine, model={"lora_rank": 8})
    assert not found(**two, trainer={"n_gpus_per_node": 2})


def test_the_critic_has_the_actors_engine_config_but_for_its_own(mine):
    config = config_of(mine, engine_config={"shards": 2, "label": "a"})
    config = replace(config, critic=replace(config.critic, engine_config={"label": "b"}))
    found = critic_engine_settings(config)
    assert (found.shards, found.label) == (2, "b")


def test_layouts_come_from_the_engines_settings(mine):
    config = config_of(mine, engine_config={"shards": 2, "label": "a"})
    assert engine_settings(config.actor_rollout_ref.actor).data_parallel_size(8) == 4
    alone = single_process_layout(config.actor_rollout_ref).actor
    assert alone.engine_config == {"shards": 1, "label": "a"}
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": False}
    policy = config_of("megatron", megatron=megatron).actor_rollout_ref
    assert engine_settings(policy.actor).data_parallel_size(8) == 2
    one = engine_settings(single_process_layout(policy).actor)
    assert one.data_parallel_size(1) == 1 and not one.use_distributed_optimizer


def test_what_an_engine_does_not_declare_is_refused(mine):
    config = config_of(mine, engine_config={"shards": 2})
    assert "shares a model between 2 processes, which does not divide the 1 processes" in problems(config)
    policy = config.actor_rollout_ref
    adapted = replace(config, actor_rollout_ref=replace(policy, model=replace(policy.model, lora_rank=4)))
    assert "model.lora_rank=4: actor_rollout_ref.actor.strategy=" in problems(adapted)
    shared = replace(config, actor_rollout_ref=replace(policy, actor=replace(policy.actor, use_prefix_grouper=True)))
    assert "actor.use_prefix_grouper=true: actor_rollout_ref.actor.strategy=" in problems(shared)
    offload = replace(config.critic, fsdp_config=replace(config.critic.fsdp_config, param_offload=True))
    assert "critic.fsdp_config.param_offload=true: the engine of" in problems(replace(config, critic=offload))


def test_settings_of_an_engine_that_is_not_used_are_refused(mine):
    assert "engine_config={shards:2}: has no effect with" in problems(config_of("fsdp", engine_config={"shards": 2}))
    assert "fsdp_config.dtype=float32: has no effect with" in problems(
        config_of(mine, fsdp_config={"dtype": "float32"})
    )


def test_an_engine_that_cannot_be_imported_is_refused_before_anything_starts(tmp_path):
    missing = tmp_path / "none.py"
    assert f"actor_rollout_ref.actor.strategy={missing}:Mine: no file {missing}" in problems(
        config_of(f"{missing}:Mine")
    )
