"""GSM8K's solutions as conversations, for supervised fine-tuning before reinforcement learning.

    python -m examples.gsm8k_smollm.make_sft_data --data outputs/gsm8k_smollm/data

reads `train.parquet` (from `data_preprocess.gsm8k`) and writes `sft_train.parquet` and `sft_val.parquet` beside it. The
calculator marks (`<<3*4=12>>`) are left out: no calculator reads them here, and they make an answer a third longer.
"""

import argparse
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq

from data_preprocess.command import run_command, write_parquet
from data_preprocess.raw import RawDataError

NUM_VAL = 128
CALCULATOR = re.compile(r"<<[^>]*>>")


def to_conversation(row: dict) -> dict:
    """Return question and solution as the messages of one row."""
    solution = CALCULATOR.sub("", row["extra_info"]["answer"])
    return {"messages": [*row["prompt"], {"role": "assistant", "content": solution}]}


def write_all(directory: Path) -> None:
    source = directory / "train.parquet"
    if not source.is_file():
        raise RawDataError(f"no {source}; make it with: python -m data_preprocess.gsm8k --local_dir {directory}")
    rows = [to_conversation(row) for row in pq.read_table(source, columns=["prompt", "extra_info"]).to_pylist()]
    write_parquet(rows[:NUM_VAL], directory / "sft_val.parquet")
    write_parquet(rows[NUM_VAL:], directory / "sft_train.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with train.parquet")
    args = parser.parse_args(argv)
    return run_command(lambda: write_all(args.data))


if __name__ == "__main__":
    sys.exit(main())
