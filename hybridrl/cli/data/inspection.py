"""`hybridrl data inspect FILE`: rows, columns and lengths of a file, and what a program would refuse, in one screen."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import reward_score
from hybridrl.driver.terminal import show
from hybridrl.errors import DataError
from hybridrl.trainer.data.chat_template import check_messages, render
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import as_messages
from hybridrl.trainer.data.tokenizer import load_tokenizer

MAX_REASONS, MAX_SHOWN, WIDTH = 5, 12, 64
LONGEST = ("half", 50), ("95 %", 95), ("longest", 100)  # percentiles of lengths


@dataclass(frozen=True)
class TrainingProgram:
    """A program, and what it reads in the columns of a row."""

    name: str
    needs: tuple[str, ...]
    meanings: Mapping[str, str]


PROMPT = "prompt: a text, or messages with role and content"
PROGRAMS = (
    TrainingProgram("main_sft", ("messages",), {"messages": "conversation; the loss is on the assistant's tokens"}),
    TrainingProgram(
        "main_dpo or main_rm",
        ("prompt", "chosen", "rejected"),
        {"prompt": PROMPT, "chosen": "the preferred response", "rejected": "the other response"},
    ),
    TrainingProgram(
        "main_dpo loss.loss_type=kto",
        ("prompt", "completion", "label"),
        {"prompt": PROMPT, "completion": "a response", "label": "whether the response is desirable"},
    ),
    TrainingProgram(
        "main_ppo",
        ("prompt",),
        {
            "prompt": PROMPT,
            "data_source": "chooses the score function",
            "reward_model": "ground_truth goes to the reward function",
            "extra_info": "goes to the reward function; index names the row",
            "ability": "free",
            "agent_name": "agent loop of the row (rollout.mode=async)",
            "responses": "texts that main_eval scores",
        },
    ),
)


def program_of(columns: Mapping[str, Any]) -> TrainingProgram | None:
    """Return the program whose columns are there, None if none is."""
    return next((program for program in PROGRAMS if columns.keys() >= {*program.needs}), None)


def inspect_file(arguments: argparse.Namespace) -> int:
    """Print what is in the file, and return 1 if a program would refuse it."""
    rows = ParquetRows(arguments.file)
    columns = rows.columns()
    program = program_of(columns)
    show("\n".join(_summary(arguments.file, rows, columns, program)) + "\n")
    if program is None:
        known = "; ".join(f"{', '.join(known.needs)} ({known.name})" for known in PROGRAMS)
        show(f"refused: no program reads these columns; needed are {known}, or name yours with data.*_key\n")
        return 1
    problems = [*_problems(rows, columns, program)]
    if arguments.model is not None and not problems:
        problems = _write_lengths(rows, program, arguments.model)
    show("".join(f"refused: {problem}\n" for problem in problems) or "nothing would be refused\n")
    show("".join(f"note: {note}\n" for note in _notes(rows, columns, program)))
    return 1 if problems else 0


def _summary(
    file: str, rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram | None
) -> Iterator[str]:
    yield f"{file}: {len(rows)} rows, " + (f"for {program.name}" if program else "for no program")
    yield f"  {'column':16}{'filled':>8}  {'type':{WIDTH}} meaning"
    meanings = {} if program is None else program.meanings
    for name, (kind, filled) in [*columns.items()][:MAX_SHOWN]:
        shown = kind if len(kind) <= WIDTH else f"{kind[: WIDTH - 3]}..."
        yield f"  {name:16}{filled:>8}  {shown:{WIDTH}} {meanings.get(name, 'ignored')}"
    if len(columns) > MAX_SHOWN:
        yield f"  and {len(columns) - MAX_SHOWN} more"


def _problems(rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram) -> list[str]:
    """Return what is refused without a tokenizer: wrong types, and rows that are none."""
    if not len(rows):
        return ["the file has no rows"]
    found = []
    if program.name == "main_ppo":
        found += [_refusal(rows.require_mappings, name) for name in ("reward_model", "extra_info")]
        found += [_refusal(rows.require_texts, name) for name in ("data_source", "ability")]
    return [text for text in found if text] + [*_row_problems(rows, program.needs[0])]


def _row_problems(rows: ParquetRows, key: str) -> Iterator[str]:
    """Yield the first row that is refused for each reason, and how many are."""
    check: Callable[[Any, str], Any] = check_messages if key == "messages" else as_messages
    refusals: Counter[str] = Counter()
    first: dict[str, str] = {}
    for start, values in rows.values(key, batch=1000, limit=len(rows)):
        for row, value in enumerate(values, start):
            if text := _refusal(check, value, rows.location(row)):
                reason = text.partition(": ")[2].partition(", found")[0]
                refusals[reason] += 1
                first.setdefault(reason, text)
    for reason, count in refusals.most_common(MAX_REASONS):
        yield f"{first[reason]} ({count} rows)"


def _refusal(check: Callable[..., Any], *arguments: Any) -> str:
    """Return why a check refuses its arguments, "" if it does not."""
    try:
        check(*arguments)
    except DataError as error:
        return str(error)
    return ""


def _write_lengths(rows: ParquetRows, program: TrainingProgram, model: str) -> list[str]:
    """Print the lengths in tokens of the first column that the program needs, and return what is refused."""
    tokenizer = load_tokenizer(model, key="--model")
    key = program.needs[0]
    try:
        lengths = token_lengths(rows, key, tokenizer)
    except DataError as error:
        return [str(error)]
    shown = ", ".join(f"{name} {np.percentile(lengths, percentile):.0f}" for name, percentile in LONGEST)
    limit = "data.max_prompt_length" if key == "prompt" else "data.max_length"
    show(f"tokens of {key}: {shown}; {limit}={max(lengths)} keeps all rows\n")
    return []


def token_lengths(rows: ParquetRows, key: str, tokenizer: Any, *, limit: int = sys.maxsize) -> list[int]:
    """Return the tokens of each row's prompt or conversation, of the first `limit` rows.

    Raises:
        DataError: A row is no prompt, or the chat template rejects it.
    """
    lengths: list[int] = []
    for start, values in rows.values(key, batch=1000, limit=min(limit, len(rows))):
        if not getattr(tokenizer, "chat_template", None) and all(isinstance(value, str) and value for value in values):
            lengths += map(len, tokenizer(values)["input_ids"])
            continue
        locate = lambda i, start=start: rows.location(start + i)  # noqa: E731
        messages = [as_messages(value, locate(i)) for i, value in enumerate(values)]
        rendered = render(tokenizer, messages, locate, add_generation_prompt=key == "prompt")
        lengths += map(len, rendered["input_ids"])
    return lengths


def _notes(rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram) -> Iterator[str]:
    """Yield what is not refused, and may surprise."""
    if program.name != "main_ppo":
        return
    own = "set custom_reward_function.path to a function of your own"
    sources = {} if "data_source" not in columns else rows.first_rows("data_source")
    if not sources:
        yield f"no row has a data_source; {own}"
    for source in [name for name in sources if not reward_score.has_score_function(str(name))][:MAX_REASONS]:
        yield f"data_source {source!r} has no score function; {own}"
    if "reward_model" not in columns:
        yield "there is no reward_model, so the reward function gets no ground truth"
    elif missing := sum(
        not (value or {}).get("ground_truth") and (value or {}).get("ground_truth") != 0
        for _, values in rows.values("reward_model", batch=1000, limit=len(rows))
        for value in values
        if value is None or isinstance(value, dict)
    ):
        yield f"{missing} of {len(rows)} rows have no reward_model.ground_truth"
