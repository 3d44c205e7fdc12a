"""HH-RLHF, conversations with a preferred and a rejected answer, to parquet.

    python -m data_preprocess.full_hh_rlhf --split sft|rm|kto|rl --local_dir ~/data/full_hh_rlhf [--data_source SOURCE]

writes all rows of the source to a directory named after the split:

    sft   train.parquet                 `messages` for main_sft, and `prompt`, `response`: each answer of each pair
    rm    train.parquet, test.parquet   `prompt`, `chosen`, `rejected`: the first three quarters, the rest
    kto   train.parquet, test.parquet   `prompt`, `completion`, `label`: each answer of each pair, true if preferred
    rl    train.parquet                 prompts for reinforcement learning, to be scored by a reward model

SOURCE is a file, a directory or a Hugging Face name. Two forms are read: the pairs of Dahoas/full-hh-rlhf with a
`prompt` column, and Anthropic's original pairs, where `chosen` and `rejected` are whole conversations. An original pair
that differs before its last answer has no common prompt and is left out.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data_preprocess.command import make_parser, rl_row, run_command, write_parquet
from data_preprocess.raw import RawDataError, RawRow, read_splits

DATA_SOURCE = "Dahoas/full-hh-rlhf"
ANSWER = "\n\nAssistant:"
TRAIN_SHARE = 0.75


@dataclass(frozen=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str


def to_pair(raw: RawRow) -> Pair | None:
    """Return one pair, or None if its two conversations differ before the answer."""
    chosen, rejected = raw["chosen"], raw["rejected"]
    if "prompt" in raw.columns:
        return Pair(raw["prompt"], chosen, rejected)
    prompt, marker, preferred = chosen.rpartition(ANSWER)
    other, _, dispreferred = rejected.rpartition(ANSWER)
    if not marker:
        raise RawDataError(
            f"{raw.location}: column 'chosen' has no {ANSWER.strip()!r}, and there is no column 'prompt'"
        )
    return Pair(prompt + marker, preferred, dispreferred) if prompt == other else None


def sft_rows(pairs: list[Pair]) -> list[dict]:
    return [sft_row(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]


def sft_row(prompt: str, answer: str) -> dict:
    """Return a row whose conversation starts like the prompts of the rl split.

    So one model can train on both.
    """
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]
    return {"messages": messages, "prompt": prompt, "response": answer}


def rm_rows(pairs: list[Pair]) -> list[dict]:
    return [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]


def kto_rows(pairs: list[Pair]) -> list[dict]:
    return [
        {"prompt": pair.prompt, "completion": answer, "label": label}
        for pair in pairs
        for answer, label in ((pair.chosen, True), (pair.rejected, False))
    ]


def rl_rows(pairs: list[Pair]) -> list[dict]:
    return [
        rl_row(
            data_source=DATA_SOURCE,
            question=pair.prompt,
            ability="alignment",
            reward_model={"style": "model", "ground_truth": pair.chosen},
            extra_info={"split": "train", "index": index, "answer": pair.chosen, "question": pair.prompt},
        )
        for index, pair in enumerate(pairs)
    ]


def read_pairs(source: str) -> list[Pair]:
    raw_rows: Iterable[RawRow] = [row for rows in read_splits(source, stem="hh_rlhf").values() for row in rows]
    pairs = [to_pair(row) for row in raw_rows]
    kept = [pair for pair in pairs if pair is not None]
    print(f"{len(kept)} of {len(pairs)} pairs have a common prompt")
    if not kept:
        raise RawDataError(f"{source} has no pair with a common prompt")
    return kept


def write_split(args: argparse.Namespace) -> None:
    pairs = read_pairs(args.data_source)
    directory = Path(args.local_dir).expanduser() / args.split
    if args.split == "sft":
        write_parquet(sft_rows(pairs), directory / "train.parquet")
    elif args.split == "rl":
        write_parquet(rl_rows(pairs), directory / "train.parquet")
    else:
        num_train, rows = max(1, int(TRAIN_SHARE * len(pairs))), kto_rows if args.split == "kto" else rm_rows
        write_parquet(rows(pairs[:num_train]), directory / "train.parquet")
        write_parquet(rows(pairs[num_train:]), directory / "test.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, default_dir="~/data/full_hh_rlhf", default_source=DATA_SOURCE)
    parser.add_argument("--split", choices=("sft", "rm", "kto", "rl"), required=True, help="what the rows are for")
    args = parser.parse_args(argv)
    return run_command(lambda: write_split(args))


if __name__ == "__main__":
    sys.exit(main())
