"""Make data/train.parquet and data/test.parquet: sums of two numbers. Put your own rows here."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def row(index, a, b):
    """Return one row; `reward_model.ground_truth` reaches the reward function."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index},
    }


def main(folder="data"):
    """Write both files; no sum is in both."""
    rows = [row(index, index // 10, index % 10) for index in range(100)]
    splits = {
        "test": [each for each in rows if each["extra_info"]["index"] % 10 == 7],
        "train": [each for each in rows if each["extra_info"]["index"] % 10 != 7],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, chosen in splits.items():
        pq.write_table(pa.Table.from_pylist(chosen), Path(folder) / f"{name}.parquet", write_page_checksum=True)


if __name__ == "__main__":
    main()
