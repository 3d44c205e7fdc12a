"""`hybridrl replay` of a run of somebody else."""

import py_compile

import pytest
import yaml

from hybridrl.cli.replay import settings_of_run
from hybridrl.errors import ConfigError
from hybridrl.trainer.step_record.files import StepRecord


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
