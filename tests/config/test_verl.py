"""Command lines of verl: the table of its keys, published commands, and the messages at the start."""

import json
import logging

import pytest

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, SFTConfig, load_config, take_over
from hybridrl.config.build import override_problem
from hybridrl.config.checks import rules
from hybridrl.config.introspection import keys
from hybridrl.config.unknown_keys import suggest_key
from hybridrl.config.verl.defaults import DEFAULTS, differing_defaults
from hybridrl.config.verl.row import RowKind, expanded, text_of
from hybridrl.config.verl.table import TABLE, rows_of
from hybridrl.errors import ConfigError
from tests.support.verl_commands import COMMANDS, command_words

KNOWN = keys(PPOConfig) | keys(SFTConfig)
RUN = 38


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    """The problems of every published command, none if `main_ppo` would start with it."""
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    (adapter / "adapter_model.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "LOGGER_PACKAGES", {})  # whether wandb is installed is not the question
        return {command["script"]: problems(command_words(command, ADAPTER=str(adapter))) for command in COMMANDS}


def problems(words: list[str]) -> list[str]:
    try:
        config = load_config(PPOConfig, words, program="p", config_name="ppo_trainer")
        main_ppo.validate_config(config, with_inputs=False)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        return [line.strip() for line in lines] or [head]
    return []


def test_published_commands_run_as_they_are(outcomes):
    needy = {script: found for script, found in outcomes.items() if found}
    runs = outcomes.keys() - needy.keys()
    assert len(runs) >= RUN, needy


def test_nearly_every_use_of_a_key_is_accepted():
    taken = [take_over(PPOConfig, words) for words in map(command_words, COMMANDS)]
    unknown = [
        word for found in taken for word in found.words if word[0] != "-" and override_problem(PPOConfig, key_of(word))
    ]
    assert unknown == []
    assert len([line for found in taken for line in found.refusals]) == 5  # those of VeOmni


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command["script"])
def test_a_command_is_refused_for_what_is_not_here_only(command, outcomes):
    found, expected = outcomes[command["script"]], command.get("refused", [])
    assert bool(found) == bool(expected), found
    assert all(any(line.startswith(key) for line in found) for key in expected), found


def test_a_row_stands_for_keys_that_do_not_exist_here_and_leads_to_keys_that_do():
    for row in TABLE:
        assert (row.kind is RowKind.RENAMED) == bool(row.to), row
        assert row.kind is RowKind.RENAMED or row.text, row
        assert all(target in KNOWN or "engine_kwargs" in target for target in row.to), row
        for key in expanded(row.keys):
            takes_value = row.when or row.convert or row.values
            assert key not in KNOWN or takes_value or _more_specific(key), f"{key} exists here: {row}"


def _more_specific(key: str) -> bool:
    """Return whether the key is a braces' alternative of a row for other roles; valid words never reach it."""
    return key in KNOWN and key.startswith("actor_rollout_ref.actor.fsdp_config")


def test_a_valid_command_line_is_never_changed():
    words = [f"{key}={text_of(spec.default)}" for key, spec in keys(PPOConfig).items() if spec.default not in ([], {})]
    taken = take_over(PPOConfig, words)
    assert taken.changes == [] and taken.words == words


@pytest.mark.parametrize(
    "words, ours",
    [
        ("model_engine=megatron", "actor_rollout_ref.actor.strategy=megatron critic.strategy=megatron"),
        ("critic.fsdp.param_offload=True", "critic.fsdp_config.param_offload=True"),
        ("reward.reward_manager.name=dapo", "reward_model.reward_manager=dapo"),
        ("+reward.reward_kwargs.overlong_buffer_cfg.len=4", "reward_model.overlong_buffer.len=4"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size=16 trainer.n_gpus_per_node=4 trainer.nnodes=2",
            "trainer.n_gpus_per_node=4 trainer.nnodes=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        ),
        ("trainer.logger=['console','rl_insight','file']", "trainer.logger=[console,jsonl]"),
        ("actor_rollout_ref.actor.clip_ratio_low=10", "actor_rollout_ref.actor.clip_ratio_low=1"),
        ("+custom_reward_function.reward_kwargs.a.b=1", "custom_reward_function.kwargs.a.b=1"),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
            "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        ),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 critic.ulysses_sequence_parallel_size=4",
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4",
        ),
        (
            "actor_rollout_ref.rollout.prompt_length=512 data.max_prompt_length=512",
            "data.max_prompt_length=512",
        ),
    ],
)
def test_a_key_with_another_name_is_taken_over(words, ours):
    taken = take_over(PPOConfig, words.split())
    assert taken.words == ours.split() and not taken.refusals


@pytest.mark.parametrize(
    "words, kind",
    [
        ("data.return_raw_chat=True", RowKind.DONE),
        ("actor_rollout_ref.hybrid_engine=True", RowKind.DONE),
        ("actor_rollout_ref.hybrid_engine=False", RowKind.REFUSED),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1", RowKind.DONE),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2", RowKind.NO_EFFECT),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size=1", RowKind.DONE),
        ("critic.ulysses_sequence_parallel_size=4", RowKind.NO_EFFECT),
        ("+ray_kwargs.ray_init.num_gpus=4", RowKind.ELSEWHERE),
        ("global_profiler.steps=[1,2]", RowKind.ELSEWHERE),
        ("actor_rollout_ref.rollout.max_model_len=2048", RowKind.DONE),
        ("actor_rollout_ref.rollout.max_model_len=100", RowKind.REFUSED),
        ("actor_rollout_ref.rollout.quantization=torchao", RowKind.REFUSED),
        ("actor_rollout_ref.rollout.calculate_log_probs=True trainer.use_v1=True", RowKind.DONE),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", RowKind.REFUSED),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.0", RowKind.DONE),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01", RowKind.REFUSED),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers=3", RowKind.REFUSED),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=3 trainer.n_gpus_per_node=2", RowKind.REFUSED),
        ("actor_rollout_ref.rollout.prompt_length=512 data.max_prompt_length=600", RowKind.REFUSED),
        ("actor_rollout_ref.actor.policy_loss.cppo.cppo_w_min=0.8", RowKind.REFUSED),
        ("distillation.teacher_backend=fsdp", RowKind.REFUSED),
        ("+distillation.teacher_fsdp_config.strategy=fsdp", RowKind.REFUSED),
        ("actor_rollout_ref.rollout.moe_load_balance_metrics_interval=5", RowKind.ELSEWHERE),
    ],
)
def test_the_value_decides_what_becomes_of_a_key(words, kind):
    [change] = take_over(PPOConfig, words.split()).changes
    assert change.kind is kind and change.reason


LOSS = "distillation.distillation_loss"


@pytest.mark.parametrize("mode, left_out", [("k1", 2), ("k3", 2), ("forward_kl_topk", 0)])
def test_what_a_distillation_loss_does_not_read_is_left_out(mode, left_out):
    words = [f"{LOSS}.loss_mode={mode}", f"{LOSS}.topk=64", f"{LOSS}.log_prob_min_clamp=-10.0"]
    taken = take_over(PPOConfig, [*words, "data.return_raw_chat=True"])
    assert [change.kind for change in taken.changes] == [RowKind.DONE] * (1 + left_out)
    assert taken.words == (words[:1] if left_out else words)
    assert take_over(PPOConfig, words).words == words, "a command line of ours stays as it is"


def test_verls_topk_is_a_default_of_losses_that_read_it():
    enabled = {"distillation.enabled": "true"}
    assert f"{LOSS}.topk" in differing_defaults({**enabled, f"{LOSS}.loss_mode": "forward_kl_topk"})
    assert f"{LOSS}.topk" not in differing_defaults({**enabled, f"{LOSS}.loss_mode": "k1"})
    assert f"{LOSS}.topk" not in differing_defaults(enabled)


def test_a_logger_that_verl_does_not_have_either_is_a_mistake():
    assert take_over(PPOConfig, ["trainer.logger=[console,wand]"]).changes == []


def test_refusals_name_key_value_and_reason():
    with pytest.raises(ConfigError) as caught:
        load_config(
            PPOConfig,
            ["actor_rollout_ref.actor.optim.optimizer=SGD", "trainer.v1.trainer_mode=separate_async", "xyzzy=1"],
            program="p",
            config_name="ppo_trainer",
        )
    assert "actor_rollout_ref.actor.optim.optimizer=SGD: the optimizer is AdamW; leave it out" in str(caught.value)
    assert "trainer.v1.trainer_mode=separate_async: generation runs ahead with trainer.lag" in str(caught.value)
    assert "xyzzy: there is no such key" in str(caught.value)


def test_a_run_says_in_a_line_per_kind_what_it_took_over(caplog):
    words = ["model_engine=megatron", "data.return_raw_chat=True", "actor_rollout_ref.actor.use_torch_compile=False"]
    with caplog.at_level(logging.INFO, "hybridrl.config"):
        load_config(PPOConfig, [*words, "critic.fsdp.param_offload=True"], program="p", config_name="ppo_trainer")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert any("model_engine=megatron -> actor_rollout_ref.actor.strategy=megatron" in line for line in lines)
    assert any(line.startswith("verl's defaults") and "trainer.total_epochs=30" in line for line in lines)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize(
    "key", ["distillation.n_gpus", "data.pad_mode", "algorithm.rollout_is", "reward.foo", "actor_rollout_ref.x.enable"]
)
def test_there_is_no_suggestion_that_is_not_nearly_certain(key):
    assert suggest_key(key, KNOWN).startswith(f"{key}: there is no such key; ")
    assert "did you mean" not in suggest_key(key, KNOWN)


def test_an_unknown_key_of_a_section_gets_the_keys_of_the_section():
    assert ".optim has betas, " in suggest_key("actor_rollout_ref.actor.optim.learning_rate", KNOWN)
    assert suggest_key("reward.foo", KNOWN).endswith("--help lists all keys")


def test_the_configurations_of_verl_are_settings_here():
    config = load_config(
        PPOConfig,
        ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"],
        program="p",
        config_name="ppo_trainer",
    )
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"


def test_defaults_that_matter_are_those_of_the_chosen_algorithm():
    assert DEFAULTS.keys() <= keys(PPOConfig).keys()
    assert all(text_of(keys(PPOConfig)[key].default) != value for key, (value, _) in DEFAULTS.items())
    without_critic = differing_defaults({"algorithm.adv_estimator": "grpo", "trainer.total_epochs": "3"})
    assert not any(key.startswith(("critic", "distillation", "trainer.total_epochs")) for key in without_critic)
    assert "critic.ppo_max_token_len_per_gpu" in differing_defaults({})
    key, tensor = (
        f"actor_rollout_ref.actor.megatron.{name}" for name in ("sequence_parallel", "tensor_model_parallel_size")
    )
    assert differing_defaults({tensor: "4"})[key] == "true"
    assert not any(key in differing_defaults(words) for words in ({}, {tensor: "1"}, {tensor: "4", key: "false"}))
    rollout = "actor_rollout_ref.rollout"
    assert differing_defaults({})[f"{rollout}.enforce_eager"] == "false"
    replayed = differing_defaults({f"{rollout}.enable_rollout_routing_replay": "True"})
    assert f"{rollout}.enforce_eager" not in replayed, "CUDA graphs are captured before experts are read"


def test_a_key_finds_the_rows_above_it():
    assert [key for key, _ in rows_of("ray_kwargs.ray_init.num_cpus")] == ["ray_kwargs"]


ACTOR_DTYPE = "actor_rollout_ref.actor.fsdp_config.dtype"


@pytest.mark.parametrize("key", [ACTOR_DTYPE, "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"])
def test_a_dtype_of_the_actor_is_taken_over_or_refused_and_never_without_effect(key):
    for text, dtype in [("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16"), ("fp32", "float32")]:
        [word] = take_over(PPOConfig, [f"{key}={text}"]).words
        assert word == f"{ACTOR_DTYPE}={dtype}"
    for misspelt in ("bf61", "torch.bf16", "float16"):
        with pytest.raises(ConfigError, match=rf"{ACTOR_DTYPE}={misspelt}: must be one of auto, float32, bfloat16"):
            load_config(PPOConfig, [f"{key}={misspelt}"], program="p", config_name="ppo_trainer")
