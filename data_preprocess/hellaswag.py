"""HellaSwag, sentences to complete with one of four endings, to parquet.

    python -m data_preprocess.hellaswag --local_dir ~/data/hellaswag [--data_source FILE|DIRECTORY|NAME]

writes `train.parquet`, `validation.parquet` and `test.parquet` (the splits that the source has). The endings are in
`reward_model.choices`, the number of the right one in `reward_model.ground_truth`. Rows without an answer (the public
test split) are left out.
"""

import re
import sys

from data_preprocess.command import convert, rl_row
from data_preprocess.raw import RawDataError, RawRow

DATA_SOURCE = "Rowan/hellaswag"


def plain_text(text: str) -> str:
    """Return the text without WikiHow's bracketed marks; a title becomes its own sentence."""
    text = re.sub(r"\[[^\]]*\]", "", text.replace(" [title]", ". "))
    return re.sub(r" +", " ", text).strip()


def to_row(raw: RawRow, *, split: str, index: int) -> dict | None:
    if str(raw["label"]).strip() == "":
        return None
    context_b = raw["ctx_b"]
    context = plain_text(f"{raw['activity_label']}: {raw['ctx_a']} {context_b[:1].upper()}{context_b[1:]}")
    choices = [plain_text(ending) for ending in raw["endings"]]
    right = right_choice(raw, len(choices))
    return rl_row(
        data_source=DATA_SOURCE,
        question=context,
        ability="nlp",
        reward_model={"style": "model", "eval": "multiple_choice", "ground_truth": right, "choices": choices},
        extra_info={"split": split, "index": index, "answer": choices[right], "question": context},
    )


def right_choice(raw: RawRow, num_choices: int) -> int:
    label = str(raw["label"])
    if not label.isdecimal() or int(label) >= num_choices:
        raise RawDataError(
            f"{raw.location}: column 'label' is {label!r}, not the number of one of {num_choices} endings"
        )
    return int(label)


def main(argv: list[str] | None = None) -> int:
    return convert(argv, to_row, description=__doc__, stem="hellaswag", hub_name=DATA_SOURCE)


if __name__ == "__main__":
    sys.exit(main())
