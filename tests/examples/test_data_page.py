"""docs/data.md: its blocks run as written, one after the other, and its columns are those that are read."""

import re
import shutil
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py): [^\n]*\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.timeout(180)
def test_the_written_data_train_in_a_run_from_python(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_qwen2, "model")
    Path("my_reward.py").write_text("def compute_score(**row):\n    return float(row['ground_truth'] in '58')\n")
    assert BLOCKS.keys() == {"write_data.py", "ten_lines.py", "run.py"}
    names: dict = {}
    exec(BLOCKS["write_data.py"], names)  # the page's own code, as a reader would run it
    Path("sums.parquet").rename("train.parquet")
    exec(BLOCKS["run.py"], names)
    assert names["code"] == 0 and Path("run/metrics.jsonl").read_text().count("critic/score/mean") == 1


@pytest.mark.timeout(180)
def test_ten_lines_train_and_save_a_model(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_qwen2, "model")
    names: dict = {"__name__": "__main__"}
    exec(BLOCKS["ten_lines.py"], names)
    assert [row["step"] for row in names["metrics"]] == [1, 2] and Path("new-model/model.safetensors").exists()
