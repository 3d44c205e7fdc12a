"""A tiny model that reads pictures, and rows for it. Not a test file."""

from pathlib import Path

from examples.vision.build_model import build_model
from examples.vision.make_data import make_rows
from hybridrl.trainer.data.row_files import prompt_table, write_table


def save_model_and_rows(path: Path) -> Path:
    """Write `model` and `train.parquet`, whose fourth row has no picture; return the directory."""
    build_model(path / "model", family="qwen2_5_vl")
    rows = make_rows(12, seed=1, kinds=("colour", "count"))
    del rows[3]["images"]
    rows[3]["prompt"] = [{"role": "user", "content": "Which colour ?"}]
    write_table(prompt_table(rows), str(path / "train.parquet"))
    return path
