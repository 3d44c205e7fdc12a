"""`hybridrl replay` of a run of somebody else."""

import os
import py_compile

import pytest
import yaml

from hybridrl import main_ppo
from hybridrl.cli.replay import for_one_process, settings_of_run
from hybridrl.config import PPOConfig, from_dict
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.protocol import DataProto
from hybridrl.trainer.checkpoint.store import write_run_state
from hybridrl.trainer.step_record.files import StageOutput, StepRecord, read_record, record_store, write_stages


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.path",
        "actor_rollout_ref.model.external_lib",
        "custom_reward_function.path",
        "data.custom_cls.path",
        "data.sampler.class_path",
        "actor_rollout_ref.rollout.agent.path",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    ],
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_no_module_and_no_compiled_file_of_a_foreign_run_is_imported_unless_it_is_trusted(
    tmp_path, monkeypatch, key, is_compiled
):
    (tmp_path / "foreign").mkdir()
    source = tmp_path / "foreign" / "module.py"
    source.write_text("raise SystemExit('it has run')")
    compiled = py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    monkeypatch.syspath_prepend(tmp_path)
    value = compiled if is_compiled else "foreign.module"
    settings = [value] if key.endswith(("external_lib", "algorithm.path")) else value
    for name in reversed(key.split(".")):
        settings = {name: settings}
    (tmp_path / "config.yaml").write_text(yaml.dump(settings))
    with pytest.raises(ConfigError, match=f"names Python code \\({key}="):
        settings_of_run(StepRecord(str(tmp_path), {}, []), [], trust=False)


def test_roles_with_devices_of_their_own_are_repeated_in_the_one_process(tmp_path):
    teachers = {"teacher_model": {"model_path": "teacher"}}
    settings = {
        "actor_rollout_ref": {"model": {"path": "student"}, "rollout": {"n_gpus_per_node": 2, "nnodes": 2}},
        "distillation": {"enabled": True, "n_gpus_per_node": 2, "nnodes": 2, "teacher_models": teachers},
        "trainer": {"n_gpus_per_node": 4, "nnodes": 2, "eval_n_gpus": 1, "test_freq": 1},
    }
    config = for_one_process(from_dict(PPOConfig, settings), directory=str(tmp_path))
    pools = main_ppo.resource_pools(config, main_ppo.worker_classes(config))
    assert pools.resource_pool_spec == {"global_pool": [1]}
    assert main_ppo.Role.TeacherModel in pools.mapping


def one_stage(**changes) -> list[dict]:
    return [{"name": "gen", "file": "00_gen.batch", "columns": []} | changes]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": {"actor": 10**9}},
        {"ranks": {"actor": -1}},
        {"ranks": {}},
        {"why": ["nonfinite", 1]},
        {"metrics": None},
        {"stages": 5},
        {"stages": one_stage(columns=["x"])},
        {"stages": one_stage(file="pipe")},
        {"stages": one_stage(file="../../../../../../etc/passwd")},
        {"stages": one_stage(file=None)},
    ],
    ids=str,
)
def test_a_kept_step_of_somebody_else_is_read_or_refused_in_one_line(tmp_path, changes):
    def write(directory):
        stages = write_stages(os.path.join(directory, "stages"), [StageOutput("gen", DataProto())])
        state = {"global_steps": 3, "why": ["3"], "ranks": {"actor": 1}, "metrics": {}, "states": {}, "stages": stages}
        write_run_state(directory, state | changes, config_yaml="{}")
        open(os.path.join(directory, ".metadata"), "x").close()  # of an engine

    store = record_store(str(tmp_path))
    os.mkfifo(os.path.join(store.commit(3, write), "stages", "pipe"))
    with pytest.raises(CheckpointError, match=r"trainer.json is damaged \(\w+: .*\); restore it"):
        read_record(str(tmp_path), 3)
