"""Arguments for vLLM's engine: which are passed on, which are refused, and in which words."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.rollout import HFRollout, RolloutSetup, VLLMRollout, make_rollout
from hybridrl.workers.rollout.vllm.engine_arguments import engine_arguments

ROLLOUT = "actor_rollout_ref.rollout"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed")


def settings_of(*words: str) -> RolloutConfig:
    config = load_config(PPOConfig, words, program="p", config_name="ppo_trainer")
    return config.actor_rollout_ref.rollout


@pytest.mark.parametrize(
    "words",
    [
        (f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32", f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.level=0"),
        (f"{ROLLOUT}.engine_kwargs.block_size=32", f"{ROLLOUT}.engine_kwargs.compilation_config.level=0"),
        (f"{ROLLOUT}.engine_kwargs={{block_size:32,compilation_config:{{level:0}}}}",),
    ],
    ids=["verl's form", "by key", "as a mapping"],
)
def test_arguments_are_passed_on_in_every_form(words):
    settings = settings_of(*words)
    assert engine_arguments(settings.engine_kwargs) == {"block_size": 32, "compilation_config": {"level": 0}}
    assert not [text for text in VLLMRollout.setting_problems(settings, max_length=8) if "engine_kwargs" in text]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "vllm.max_num_seqs=3",
            f"{ROLLOUT}.engine_kwargs.max_num_seqs=3: vLLM gets max_num_seqs from {ROLLOUT}.max_num",
        ),
        ("seed=3", f"{ROLLOUT}.engine_kwargs.seed=3: vLLM gets seed from trainer.seed; set that instead"),
        ("model=x", f"{ROLLOUT}.engine_kwargs.model=x: vLLM gets model from actor_rollout_ref.model.path; set"),
        (
            "quantization=fp8",
            f"{ROLLOUT}.engine_kwargs.quantization=fp8: hybridrl sets quantization itself: the engine holds exactly",
        ),
        (
            "worker_extension_cls=x",
            f"{ROLLOUT}.engine_kwargs.worker_extension_cls=x: hybridrl sets worker_extension_cls itself: it loads",
        ),
    ],
)
def test_arguments_that_hybridrl_sets_are_refused_by_name(word, message):
    settings = settings_of(f"+{ROLLOUT}.engine_kwargs.{word}")
    assert any(text.startswith(message) for text in VLLMRollout.setting_problems(settings, max_length=8))


def test_a_rollout_without_such_arguments_refuses_them():
    settings = settings_of(f"{ROLLOUT}.name=hf", f"{ROLLOUT}.engine_kwargs.block_size=32")
    (problem,) = HFRollout.setting_problems(settings, max_length=8)
    assert problem.startswith(f"{ROLLOUT}.engine_kwargs={{block_size:32}}: has no effect with {ROLLOUT}.name=hf")


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(240)
def test_vllm_gets_the_arguments_and_an_unknown_one_is_refused_with_the_nearest(tiny_qwen2):
    config = RolloutConfig(dtype="float32", max_num_seqs=4, kv_cache_memory_mb=4)
    setup = RolloutSetup(str(tiny_qwen2), config, (5,), 0, 16, 8)
    with pytest.raises(ConfigError, match=r"engine_kwargs.block_sise=32: vLLM's engine has no such .*mean block_size"):
        make_rollout("vllm", replace(setup, config=replace(config, engine_kwargs={"block_sise": 32})))
    started = make_rollout("vllm", replace(setup, config=replace(config, engine_kwargs={"vllm": {"block_size": 32}})))
    assert started.engine.vllm_config.cache_config.block_size == 32
