"""The command line: accepted and refused arguments, and the messages."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from hybridrl.config import PPOConfig, SFTConfig, load_config
from hybridrl.config import load as load_module
from hybridrl.config.plugs import REWARD_MANAGERS
from hybridrl.errors import ConfigError

FREQUENT = (Path(__file__).parent / "frequent_overrides.txt").read_text().split()


def load(*argv, schema=PPOConfig, config_name="ppo_trainer"):
    return load_config(schema, list(argv), program="python -m hybridrl.main_ppo", config_name=config_name)


def refusal(*argv, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **kwargs)
    return str(caught.value)


@pytest.fixture
def conf(tmp_path):
    folder = tmp_path / "my conf"
    folder.mkdir()
    (folder / "my_run.yaml").write_text(
        "defaults: [grpo_trainer, _self_]\ndata: {train_files: x.parquet}\ntrainer: {total_epochs: 7}\n"
    )
    (folder / "bare.yaml").write_text("trainer: {total_training_steps: 7, seed: '${trainer.total_training_steps}'}\n")
    return str(folder)


def test_without_overrides_the_config_is_the_schema():
    assert load() == PPOConfig()
    assert load(schema=SFTConfig, config_name="sft_trainer") == SFTConfig()


@pytest.mark.parametrize("preset", ["ppo_trainer", "grpo_trainer", "local_debug"])
@pytest.mark.parametrize(
    "words",
    [
        [],
        [f"++{word}" for word in FREQUENT],
        ["++data.train_files=[a,b]", "++data.train_files=c", "++trainer.seed=${trainer.total_training_steps}"],
        ["++algorithm.filter_groups={enable: true}", "++algorithm.filter_groups.metric=acc"],
        ["++custom_reward_function.kwargs.deep.er=1", "++custom_reward_function.kwargs={other: [1, {two: 3}]}"],
        ["++trainer.project_name='a ${data.train_files}'", "++data.train_files=null"],
    ],
)
def test_overrides_of_a_preset_are_applied_as_hydra_applies_them(preset, words):
    composed = load_module._compose_by_hydra(PPOConfig, words, name=preset, folder=load_module.PRESETS)
    fast = load_module._compose(PPOConfig, words, name=preset, folder=load_module.PRESETS)
    assert fast == OmegaConf.to_container(composed, resolve=True)
    assert load_module._compose(PPOConfig, [], name=preset, folder=load_module.PRESETS) == OmegaConf.to_container(
        load_module._compose_by_hydra(PPOConfig, [], name=preset, folder=load_module.PRESETS), resolve=True
    )  # nothing of the overrides is kept for the next config


@pytest.mark.parametrize(
    "word, value",
    [
        ("algorithm.lam=1", 1.0),
        ("algorithm.lam=9.5e-1", 0.95),
        ("actor_rollout_ref.actor.grad_clip=inf", float("inf")),
        ("data.train_batch_size=1e3", 1000),
        ("data.val_batch_size=null", None),
        ("data.val_batch_size=5", 5),
        ("data.train_files=a.parquet", ["a.parquet"]),
        ("data.train_files=['a.parquet', 'b.parquet']", ["a.parquet", "b.parquet"]),
        ("trainer.experiment_name=12", "12"),
        ('trainer.save_freq="5"', 5),
        ("actor_rollout_ref.actor.optim.lr='1e-3'", 1e-3),
        ("trainer.val_only=True", True),
        ("critic.enable=null", None),
        ("actor_rollout_ref.actor.optim.betas=[0,0.95]", (0.0, 0.95)),
        ("+custom_reward_function.kwargs.foo=1", {"foo": 1}),
        ("custom_reward_function.kwargs.foo={a:[1,x]}", {"foo": {"a": [1, "x"]}}),
        ("++algorithm.gamma=0.5", 0.5),
    ],
)
def test_a_value_becomes_its_keys_type(word, value):
    key = word.partition("=")[0].lstrip("+").removesuffix(".foo")
    found = load(word)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "word, expected",
    [
        ("data.train_batch_size=many", "data.train_batch_size=many: must be a whole number"),
        ("data.train_batch_size=1.5", "must be a whole number"),
        ('data.train_batch_size="1.5"', "must be a whole number"),
        ('data.train_batch_size="many"', "must be a whole number"),
        ("data.train_batch_size=true", "must be a whole number"),
        ("data.train_batch_size=0", "must be >= 1"),
        ("data.train_batch_size=null", "must be a whole number, not null"),
        ("data.val_batch_size=None", "write null for no value"),
        ("data.shuffle=1", "must be true or false"),
        ("data.shuffle=yes", "must be true or false"),
        ("data.train_files=[a,3.5]", "must be text"),
        ("data.train_files=", "is empty (an unset shell variable?)"),
        ("algorithm.gamma=nan", "must be a number"),
        ("trainer.num_threads=1000000", "must be >= 1 and <= 1024"),
        ("trainer.nnodes=1000000000", "must be >= 1 and <= 10000"),
        ("trainer.n_gpus_per_node=1000000", "must be >= 1 and <= 1000"),
        ("trainer.seed=1180591620717411303424", "must be >= 0 and <= 4e+09"),
        ("actor_rollout_ref.actor.optim.lr=inf", "must be > 0 and <= 1000"),
        ("actor_rollout_ref.rollout.n=1000000000", "must be >= 1 and <= 100000"),
        ("algorithm.gamma=1.01", "must be >= 0 and <= 1"),
        (
            "trainer.logger=[console,wand]",
            "trainer.logger=[console,wand]: 'wand' is not a known logger; did you mean 'wandb'? Known: console, jsonl, "
            "mlflow, tensorboard, wandb. Give one of these, or an import path such as my_package.module:Name",
        ),
        ("actor_rollout_ref.actor.strategy=fdsp", "did you mean 'fsdp'? Known: fsdp, fsdp2, megatron"),
        ("actor_rollout_ref.actor.optim.betas=0.9", "must be a list of 2 values"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1]", "must be >= 0 and < 1"),
        ("data.apply_chat_template_kwargs=3", "must be a mapping"),
        ("trainer=3", "this is a group of settings; set one of its keys, such as trainer.project_name"),
        ("data.train_batch_sise=8", "did you mean data.train_batch_size?"),
        ("train_batch_size=8", "did you mean data.train_batch_size?"),
        ("actor_rollout_ref.actor.temperature=1", "actor_rollout_ref.rollout.temperature"),
        ("trainer.logger.console=1", "trainer.logger is one value (list[str]) and has no keys below it"),
        ("xyzzy=1", "there is no such key; --help lists all keys"),
        ("~xyzzy", "there is no such key"),
        ("actor_rollout_ref.rollout.do_sample=false", "actor_rollout_ref.rollout.val_kwargs.do_sample"),
        ("data.tokenizer=x", "the directory of actor_rollout_ref.model.path"),
        ("hydra.run.dir=out", "trainer.default_local_dir"),
        ("trainer.seed=1,2", "one command is one run"),
        ("trainer.seed", "cannot be read as key=value"),
        ("--trainer.seed=1", "write a setting without dashes: trainer.seed=1"),
        ("--multirun", "one command is one run"),
        ("--cfg=hydra", "--cfg"),
        ("--config-name=grpo", "known are distill_trainer, dpo_trainer, evaluation, generation, grpo_trainer"),
        ("--config-path=nowhere", "there is no such directory"),
        ("trainer.experiment_name=${nope.x}", "'nope.x' not found"),
        ("--help=xyzzy", "no key has this in its name"),
    ],
)
def test_invalid_arguments_are_refused_with_a_fix(word, expected):
    message = refusal(word)
    assert expected in message
    assert "\n" not in message


def test_a_plug_may_be_a_name_that_a_plugin_registers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hybridrl.config.plugs import REWARD_MANAGERS\n\n\n"
        "@REWARD_MANAGERS.register('half')\nclass Half:\n    pass\n"
    )
    try:
        config = load(f"algorithm.path={tmp_path / 'mine.py'}", "reward_model.reward_manager=half")
        assert config.reward_model.reward_manager == "half" and REWARD_MANAGERS.lookup("half").__name__ == "Half"
    finally:
        REWARD_MANAGERS.pop("half", None)
    missing = refusal(f"algorithm.path={tmp_path / 'nine.py'}", "reward_model.reward_manager=half")
    assert "nine.py" in missing and "'half' is not a known reward manager" in missing


def test_a_plug_may_be_an_import_path():
    assert load("trainer.logger=[console,my_package.logs:Mine]").trainer.logger == ["console", "my_package.logs:Mine"]


def test_all_problems_of_a_command_are_reported_together_and_once(conf):
    (lines := refusal("data.bogus=1", "trainer.total_epochs=0", "hydra.job.name=x", "algorithm.gamma=2").splitlines())
    assert lines[0] == "4 problems in the configuration:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "data.bogus",
        "hydra.job.name",
        "algorithm.gamma=2",
        "trainer.total_epochs=0",
    ]


def test_interpolation_sees_other_keys_and_the_environment(monkeypatch):
    monkeypatch.setenv("WHO", "me")
    config = load("trainer.experiment_name=${trainer.project_name}-${oc.env:WHO}", "trainer.project_name=maths")
    assert config.trainer.experiment_name == "maths-me"


def test_a_preset_changes_the_defaults_and_the_command_line_changes_the_preset():
    preset = load("--config-name", "grpo_trainer")
    assert preset.algorithm.adv_estimator == "grpo" and preset.actor_rollout_ref.rollout.n == 8
    changed = load(
        "--config-name", "grpo_trainer", "actor_rollout_ref.rollout.n=4", "~actor_rollout_ref.actor.use_kl_loss"
    )
    assert changed.actor_rollout_ref.rollout.n == 4
    assert changed.actor_rollout_ref.actor.use_kl_loss is PPOConfig().actor_rollout_ref.actor.use_kl_loss is False


def test_a_preset_of_another_program_is_refused_unless_it_is_the_users_own_file(tmp_path):
    assert refusal("--config-name", "sft_trainer").startswith(
        "--config-name sft_trainer: is a preset of another program; "
    )
    (tmp_path / "sft_trainer.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seed: 3}\n")
    assert load("--config-path", str(tmp_path), "--config-name", "sft_trainer").trainer.seed == 3


def test_a_users_yaml_extends_a_preset(conf):
    config = load("--config-path", conf, "--config-name", "my_run", "trainer.seed=5")
    assert (config.data.train_files, config.trainer.total_epochs, config.trainer.seed) == (["x.parquet"], 7, 5)
    assert config.algorithm.adv_estimator == "grpo"


def test_a_users_yaml_without_a_preset_extends_the_schema(conf):
    config = load("--config-dir", conf, "--config-name", "bare.yaml", "trainer.nnodes=2")
    assert (config.trainer.seed, config.trainer.nnodes, config.trainer.total_epochs) == (7, 2, 1)


def test_an_unknown_key_in_a_yaml_is_refused_like_one_on_the_command_line(conf, tmp_path):
    (tmp_path / "typo.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nodes: 3}\n")
    assert (
        refusal("--config-path", str(tmp_path), "--config-name", "typo")
        == "trainer.nodes: there is no such key; did you mean trainer.nnodes?"
    )


def test_a_users_group_of_yaml_files_can_be_chosen_from(conf, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("# @package actor_rollout_ref.model\npath: my/small\n")
    assert load("--config-path", str(tmp_path), "+model=small").actor_rollout_ref.model.path == "my/small"


@pytest.mark.parametrize(
    "text, expected",
    [
        (b"data: [\n", "line 2"),
        (b"defaults: [nope, _self_]\n", "nope"),
        ("# Größe\ndata: {}\n".encode("latin-1"), "broken.yaml is not text in UTF-8"),
    ],
)
def test_a_broken_yaml_is_one_readable_line(tmp_path, text, expected):
    (tmp_path / "broken.yaml").write_bytes(text)
    message = refusal("--config-path", str(tmp_path), "--config-name", "broken")
    assert expected in message and "\n" not in message


def test_cfg_job_prints_the_resulting_config(capsys):
    assert load("--cfg", "job", "trainer.experiment_name=${trainer.project_name}", "algorithm.gamma=1") is None
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["experiment_name"] == "hybridrl"
    assert printed["algorithm"]["gamma"] == 1.0


def test_cfg_job_refuses_an_invalid_config():
    assert "must be >= 1" in refusal("--cfg", "job", "trainer.nnodes=0")
