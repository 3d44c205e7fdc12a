"""`hybridrl replay RUN STEP`: repeat a kept step in one process on the CPU.

It prints what differs from the run.

The columns and the state come from `RUN/recorded` (`trainer.record_steps`). The model and the data come from where the
settings say; `key=value` changes a path.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

import hybridrl
from hybridrl import main_ppo, rewards
from hybridrl.config import PPOConfig, from_dict, suggest_key
from hybridrl.config.engines import single_process_layout
from hybridrl.config.introspection import keys
from hybridrl.config.plugs import PLUGINS, load_plugins
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.registry import is_import_path
from hybridrl.trainer.checkpoint.reading import read_settings
from hybridrl.trainer.checkpoint.store import CONFIG, WORKING_DIRECTORY
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.step_record.files import StepRecord, read_record
from hybridrl.trainer.step_record.ranks import RanksInTurn
from hybridrl.trainer.step_record.replay import StepReplay

ONE_PROCESS = dict(backend="local", master=False, device="cpu", nnodes=1, n_gpus_per_node=1, min_ranks=0)
NO_OUTPUT = dict(logger=["console"], rollout_data_dir=None, validation_data_dir=None, page_port=None, trace=False)
OF_CODE = (  # settings with a file or a module, whose name says nothing: `x.pyc` and `package` run, too
    *(*PLUGINS, "trust_remote_code", "custom_reward_function.path", "custom_cls.path", "class_path", "agent.path"),
    *("function_tool_path", "interaction_config_path"),
)
NO_FREQUENCY = dict(save_freq=-1, test_freq=-1, val_before_train=False, eval_n_gpus=0, overlap=False)


def replay(arguments: argparse.Namespace) -> None:
    """Run `hybridrl replay`.

    Raises:
        CheckpointError: The run has not kept this step.
        ConfigError: The settings name code that is not trusted, or the record has no such stage.
    """
    record = read_record(arguments.run, arguments.step)
    names = [output.name for output in record.outputs]
    if arguments.stage is not None and arguments.stage not in names:
        raise ConfigError(f"--stage {arguments.stage}: the step has {', '.join(names)}")
    ranks = max(record.state["ranks"].values())
    if arguments.rank is not None and not 0 <= arguments.rank < ranks:
        raise ConfigError(f"--rank {arguments.rank}: the run had ranks 0 to {ranks - 1}")
    settings = settings_of_run(record, arguments.settings, trust=arguments.trust_remote_code)
    stop_at = (arguments.rank or 0) if arguments.pdb else None
    why = ", ".join(record.state["why"])
    show(f"step {arguments.step} of {arguments.run}, kept for: {why}; {ranks} rank{'s' * (ranks > 1)} in turn\n")
    with tempfile.TemporaryDirectory(prefix="hybridrl-replay-") as folder:
        repeat = StepReplay(record, settings, only=arguments.stage, stop_at=stop_at)
        run_replay(repeat, for_one_process(settings, directory=folder))
    show("".join(f"{line}\n" for line in repeat.lines))


def run_replay(repeat: StepReplay, config: PPOConfig) -> None:
    """Start the run's trainer in this process, and repeat the step."""
    model = config.actor_rollout_ref.model
    assert model.path is not None  # a run has one
    tokenizer = load_tokenizer(
        model.path, key="actor_rollout_ref.model.path", trust_remote_code=model.trust_remote_code
    )
    workers = main_ppo.worker_classes(config)
    is_async = config.actor_rollout_ref.rollout.mode == "async"
    reward_fn = rewards.load_reward_manager(config, tokenizer)
    try:
        trainer = hybridrl.RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=workers,
            resource_pool_manager=main_ppo.resource_pools(config, workers),
            ray_worker_group_cls=RanksInTurn,
            reward_fn=reward_fn,
            agent_loops=hybridrl.AgentLoopManager(config, tokenizer) if is_async else None,
        )
        try:
            trainer.init_workers()
            repeat.prepare(trainer)
            repeat.run(trainer)
        finally:
            trainer.shutdown()
    finally:
        reward_fn.close()


def settings_of_run(record: StepRecord, changes: Sequence[str], *, trust: bool) -> PPOConfig:
    """Return the run's settings, and import the plug-ins that they name.

    Args:
        record: The kept step. Relative paths are those of the run's working directory, if that exists here.
        changes: Settings to change, key=value.
        trust: Run the code that the settings name.

    Raises:
        ConfigError: The settings name code, and `trust` is false; or a change is none of a setting.
    """
    raw = read_settings(record.path)
    for word in changes:
        _change(raw, word)
    code = sorted({f"{key}={value}" for key, value in _flat(raw) if _is_code(key, value)})
    if code and not trust:
        raise ConfigError(
            f"{record.path}: its {CONFIG} names Python code ({', '.join(code)}); read the code, and say "
            "--trust-remote-code to run it"
        )
    directory = record.state.get(WORKING_DIRECTORY, os.curdir)
    if os.path.isdir(directory):
        os.chdir(directory)
    config = from_dict(PPOConfig, raw)
    load_plugins(config)
    return config


def for_one_process(config: PPOConfig, *, directory: str) -> PPOConfig:
    """Return a run's settings for one process on the CPU, which writes to `directory`."""
    policy = single_process_layout(config.actor_rollout_ref)
    rollout = replace(policy.rollout, n_gpus_per_node=0, tensor_model_parallel_size=1, name="hf")
    changed: dict[str, Any] = dict(nonfinite="skip", resume_mode="disable", resume_from_path=None, record_steps=[])
    changed |= ONE_PROCESS | NO_OUTPUT | NO_FREQUENCY | {"default_local_dir": directory}
    return replace(
        config,
        trainer=replace(config.trainer, **changed),
        actor_rollout_ref=replace(policy, rollout=rollout),
        distillation=replace(config.distillation, n_gpus_per_node=0, nnodes=1),
    )


def _change(raw: dict[str, Any], word: str) -> None:
    key, equals, value = word.partition("=")
    if not equals or key not in keys(PPOConfig):
        raise ConfigError(suggest_key(key, keys(PPOConfig)) if equals else f"{word}: write it as key=value")
    *sections, name = key.split(".")
    section = raw
    for one in sections:
        section = section.setdefault(one, {})
    section[name] = yaml.safe_load(value)


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, list):
        for value in settings:
            yield from _flat(value, prefix)
    else:
        yield prefix, settings


def _is_code(key: str, value: Any) -> bool:
    """Return whether a setting makes the replay run Python code that is not this library's."""
    is_path = isinstance(value, str) and (value.endswith(".py") or ".py:" in value or is_import_path(value))
    return is_path or (key.endswith(OF_CODE) and bool(value))
