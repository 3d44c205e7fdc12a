"""Task directories of harbor as rows of a dataset."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from data_preprocess import harbor

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "support" / "serving" / "harbor_tasks"


def test_each_task_directory_is_a_row_that_names_it(tmp_path):
    command = [
        sys.executable,
        "-m",
        "data_preprocess.harbor",
        str(TASKS),
        str(tmp_path / "out.parquet"),
        "--name",
        "shell",
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=variables, timeout=60, check=True)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    named = [row["extra_info"]["interaction_kwargs"] for row in rows]
    assert named == [{"name": "shell", "task": task} for task in ("endless", "silent", "words")]
    assert {row["data_source"] for row in rows} == {"environment"}
    assert rows[2]["prompt"][0]["role"] == "system" and "the one word done" in rows[2]["prompt"][0]["content"]


def test_tasks_of_several_steps_are_left_out_and_a_broken_file_is_named(tmp_path, capsys):
    for name, text in {"b/one": "", "a/several": '[[steps]]\nname = "first"\n'}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text(text)
        (tmp_path / name / "instruction.md").write_text("Do it.")
    assert harbor.find_tasks(tmp_path) == (["b/one"], ["a/several"])
    (tmp_path / "b" / "one" / "task.toml").write_text("[[")
    assert harbor.main([str(tmp_path), str(tmp_path / "out.parquet")]) == 2
    assert str(tmp_path / "b" / "one" / "task.toml") in capsys.readouterr().err
    assert harbor.main([str(tmp_path / "a"), str(tmp_path / "out.parquet")]) == 2
    assert "no directory with a task.toml" in capsys.readouterr().err
