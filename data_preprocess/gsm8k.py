"""GSM8K, grade-school word problems with one number as the answer, to parquet.

    python -m data_preprocess.gsm8k --local_dir ~/data/gsm8k [--data_source FILE|DIRECTORY|NAME]

writes `train.parquet` and `test.parquet` (the splits that the source has), scored by the number after `####`.
"""

import re
import sys

from data_preprocess.command import convert, rl_row
from data_preprocess.raw import RawDataError, RawRow

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def final_number(answer: str, location: str) -> str:
    """Return the number after the last `####`, without thousands separators."""
    found = re.findall(r"####\s*(-?[0-9.,]+)", answer)
    if not found:
        raise RawDataError(f"{location}: column 'answer' has no '#### number'")
    return found[-1].replace(",", "")


def to_row(raw: RawRow, *, split: str, index: int) -> dict:
    question, answer = raw["question"], raw["answer"]
    return rl_row(
        data_source=DATA_SOURCE,
        question=f"{question} {INSTRUCTION}",
        ability="math",
        reward_model={"style": "rule", "ground_truth": final_number(answer, raw.location)},
        extra_info={"split": split, "index": index, "answer": answer, "question": question},
    )


def main(argv: list[str] | None = None) -> int:
    return convert(argv, to_row, description=__doc__, stem="gsm8k", hub_name=DATA_SOURCE, hub_config="main")


if __name__ == "__main__":
    sys.exit(main())
