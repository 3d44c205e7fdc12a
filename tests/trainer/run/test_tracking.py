"""Tracking: what each logger writes, and what a resumed run does with it."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest

from hybridrl.config.introspection import flatten
from hybridrl.config.plugs import TRACKERS
from hybridrl.errors import ConfigError
from hybridrl.trainer.run.tracking import JsonlTracker, Tracking, read_metrics

CONFIG = {"trainer": {"seed": 1, "logger": ["jsonl"]}, "data": {}, "lr": 3e-4}


def _open(directory, loggers=("jsonl",), **kwargs):
    return Tracking("project", "experiment", list(loggers), directory, CONFIG, **kwargs)


def _steps(directory):
    return [entry["step"] for entry in read_metrics(directory / "metrics.jsonl")]


def test_jsonl_has_a_line_per_step_as_soon_as_it_is_logged(tmp_path):
    with _open(tmp_path / "new" / "run") as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
        text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
        assert json.loads(text) == {"step": 1, "critic/score/mean": 0.5}


def test_a_full_disk_costs_no_step_and_is_reported_once(tmp_path, full_disk, caplog):
    with _open(tmp_path) as tracking:
        tracking.log({"x": 1}, 1)
        with full_disk():
            tracking.log({"x": 2}, 2)
            tracking.log({"x": 3}, 3)
        tracking.log({"x": 4}, 4)
    assert _steps(tmp_path) == [1, 2, 3, 4]
    assert [m for m in caplog.messages if "training continues" in m] == [
        "step 2: JsonlTracker could not write its metrics: [Errno 27] File too large; training continues"
    ]


def test_a_record_that_is_not_text_is_read_as_far_as_it_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "x": 1.0}\n\xff\xfe\n[1]\n{"x": 3.0}\n{"step": "1"}\n{"step": null}\n{"step": 2, "x": 2.0}\n'
    )
    with _open(tmp_path, start_step=2) as tracking:
        tracking.log({"x": 3.0}, 3)
    assert _steps(tmp_path) == [1, 2, 3]


def test_values_that_are_not_finite_are_written(tmp_path):
    with _open(tmp_path) as tracking:
        tracking.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    (entry,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(entry["a"]) and entry["b"] == math.inf and entry["c"] == -math.inf


def test_a_resumed_run_drops_what_a_killed_one_logged_after_its_last_commit(tmp_path):
    with _open(tmp_path) as tracking:
        for step in range(6):
            tracking.log({"x": step}, step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "x": ')  # killed while writing
    with _open(tmp_path, start_step=3) as tracking:
        tracking.log({"x": 40.0}, 4)
    assert _steps(tmp_path) == [0, 1, 2, 3, 4]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["x"] == 40.0
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "config.json"}


def test_a_new_run_replaces_the_record_of_an_older_one_with_a_warning(tmp_path, caplog):
    for said in ([], [f"{tmp_path}/metrics.jsonl of an earlier run without a checkpoint is replaced"]):
        with _open(tmp_path) as tracking:
            tracking.log({"x": 0}, 0)
            tracking.log({"x": 1}, 1)
        assert caplog.messages == said
    assert _steps(tmp_path) == [0, 1]


def test_tensorboard_hides_the_values_of_the_killed_process(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with _open(tmp_path, ["tensorboard"]) as tracking:
        for step in (1, 2, 3):
            tracking.log({"critic/score/mean": step / 10}, step)
    with _open(tmp_path, ["tensorboard"], start_step=1) as tracking:
        tracking.log({"critic/score/mean": 0.9}, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("critic/score/mean")] == [(1, 0.1), (2, 0.9)]


def test_the_console_shows_the_step(tmp_path, capsys):
    with _open(tmp_path, ["console"], total_steps=3) as tracking:
        tracking.log({"critic/score/mean": 0.25}, 1)
    assert capsys.readouterr().out.startswith("step 1/3  reward 0.250")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_logger_is_rejected_with_the_nearest_name_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"'tensorbord' .*'tensorboard'\? Known: console, jsonl, mlflow, t"):
        _open(tmp_path / "run", ["jsonl", "tensorbord"])
    assert not (tmp_path / "run").exists()


def test_a_logger_of_the_users_is_named_by_its_import_path(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, run):\n        self.file = open(run.directory / 'mine.txt', 'w')\n"
        "    def log(self, metrics, step):\n        print(step, metrics['loss'], file=self.file)\n"
        "    def close(self):\n        self.file.close()\n"
    )
    with _open(tmp_path / "run", ["jsonl", f"{tmp_path / 'mine.py'}:Mine"]) as tracking:
        tracking.log({"loss": 0.5}, 1)
        tracking.log({"loss": 0.25}, 2)
    assert (tmp_path / "run" / "mine.txt").read_text() == "1 0.5\n2 0.25\n"
    with pytest.raises(ConfigError, match="^trainer.logger=.*mine.py:Mien: .*'Mien'; did you mean Mine"):
        _open(tmp_path / "other", [f"{tmp_path / 'mine.py'}:Mien"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_rejected_with_the_extra_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module that cannot be imported
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{name}\]'"):
        _open(tmp_path / "run", [name])
    assert not (tmp_path / "run").exists()


class _Failing(JsonlTracker):
    def close(self):
        super().close()
        raise OSError("disk full")


def test_every_logger_is_closed_even_if_one_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "failing", _Failing)
    closed = []
    monkeypatch.setattr(JsonlTracker, "close", lambda self: closed.append(type(self).__name__))
    with pytest.raises(OSError, match="disk full"), _open(tmp_path, ["jsonl", "failing"]):
        pass
    assert sorted(closed) == ["JsonlTracker", "_Failing"]


def test_a_logger_that_cannot_start_closes_the_others(tmp_path, monkeypatch):
    def refuse(run):
        raise OSError("no connection")

    closed = []
    monkeypatch.setitem(TRACKERS, "refusing", refuse)
    monkeypatch.setattr(JsonlTracker, "close", lambda self: closed.append(self))
    with pytest.raises(OSError, match="no connection"):
        _open(tmp_path, ["jsonl", "refusing"])
    assert len(closed) == 1


def test_closing_twice_is_closing_once(tmp_path):
    tracking = _open(tmp_path)
    tracking.close()
    tracking.close()


def test_settings_are_flattened_to_dotted_keys():
    assert dict(flatten(CONFIG)) == {"trainer.seed": 1, "trainer.logger": ["jsonl"], "data": {}, "lr": 3e-4}


def test_back_ends_are_imported_only_when_used():
    heavy = {"wandb", "mlflow", "tensorboard", "torch", "matplotlib"}
    program = f"import sys, hybridrl.trainer.run.tracking; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra wandb)")
def test_wandb_works_offline_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with _open(tmp_path, ["wandb"]) as tracking:
        tracking.log({"critic/score/mean": 0.5, "bad": math.nan}, 1)
    run_id = (tmp_path / "wandb_run_id").read_text()
    with _open(tmp_path, ["wandb"], start_step=1) as tracking:
        tracking.log({"critic/score/mean": 0.6}, 2)
    assert (tmp_path / "wandb_run_id").read_text() == run_id
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*/run-{run_id}*.wandb"))) >= 1


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed (extra mlflow)")
def test_mlflow_writes_a_local_store_and_resumes_in_its_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    with _open(tmp_path, ["mlflow"]) as tracking:
        tracking.log({"val-core/openai/gsm8k/acc/mean@1": 0.5, "bad": math.nan}, 1)
    with _open(tmp_path, ["mlflow"], start_step=1) as tracking:
        tracking.log({"val-core/openai/gsm8k/acc/mean@1": 0.6}, 2)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    points = client.get_metric_history(run.info.run_id, "val-core/openai/gsm8k/acc/mean_at_1")
    assert [(point.step, point.value) for point in points] == [(1, 0.5), (2, 0.6)]
    assert (
        run.data.params["trainer.seed"] == "1" and run.info.status == "FINISHED" and run.info.run_name == "experiment"
    )


def test_tensorboard_loses_nothing_to_a_full_disk_and_prints_no_traceback(tmp_path, full_disk, caplog, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with _open(tmp_path, ["tensorboard"]) as tracking:
        tracking.log({"x": 1.0}, 1)
        with full_disk():
            tracking.log({"x": 2.0}, 2)
            tracking.log({"x": 3.0}, 3)
        tracking.log({"x": 4.0}, 4)
    with full_disk(), _open(tmp_path, ["tensorboard"], start_step=4) as tracking:
        tracking.log({"x": 5.0}, 5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [message.partition(":")[0] for message in caplog.messages if "training continues" in message] == [
        "step 2",
        "step 5",
    ]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_tensorboard_shows_the_settings_as_a_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _open(tmp_path, ["tensorboard"]).close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = events.Tensors("config/text_summary")
    assert json.loads(event.tensor_proto.string_val[0].decode().strip("`").removeprefix("json")) == CONFIG
    assert events.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"
