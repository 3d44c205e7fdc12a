"""`hybridrl data inspect FILE`: rows, columns and lengths of a file, and what a program would refuse, in one screen."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import reward_score
from hybridrl.config import model_folder
from hybridrl.config.schema.data import ImageDataConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.driver.terminal import show
from hybridrl.errors import DataError
from hybridrl.trainer import data
from hybridrl.trainer.data.chat_template import check_messages, render
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import as_messages
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.supervised.preference_data import is_blank
from hybridrl.workers.images import load_processor

MAX_REASONS, MAX_SHOWN, WIDTH = 5, 12, 64
LONGEST = ("half", 50), ("95 %", 95), ("longest", 100)  # percentiles of lengths


@dataclass(frozen=True)
class TrainingProgram:
    """A program, and what it reads in the columns of a row."""

    name: str
    needs: tuple[str, ...]
    meanings: Mapping[str, str]


IMAGES = dict.fromkeys(("images", "image"), "the k-th is the k-th <image> of the text")
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


def program_of(columns: Mapping[str, Any], named: Mapping[str, str]) -> TrainingProgram | None:
    """Return the program whose columns are there, under the user's names (see `own_names`); None if none is."""
    own = {name: key for key, name in named.items()}
    there = {own.get(name, name) for name in columns}
    return next((program for program in PROGRAMS if there >= {*program.needs}), None)


def own_names(words: Iterable[str]) -> dict[str, str]:
    """Return column -> the user's name for it, of settings such as data.prompt_key=question."""
    found = (re.fullmatch(r"\+*data\.(\w+)_key=(.+)", word) for word in words)
    return {match[1]: match[2] for match in found if match}


def inspect_file(arguments: argparse.Namespace) -> int:
    """Print what is in the file, and return 1 if a program would refuse it."""
    rows, named = ParquetRows(arguments.file), own_names(arguments.settings)
    columns = rows.columns()
    if absent := [f"data.{key}_key={name}" for key, name in named.items() if name not in columns]:
        raise DataError(f"{arguments.file} has no such column ({', '.join(absent)}); it has {', '.join(columns)}")
    program = program_of(columns, named)
    show("\n".join(_summary(arguments.file, rows, columns, program, named)) + "\n")
    if program is None:
        known = "; ".join(f"{', '.join(known.needs)} ({known.name})" for known in PROGRAMS)
        show(
            f"refused: no program reads these columns; needed are {known}. Name yours in the same command: "
            "data.prompt_key=COLUMN data.ground_truth_key=COLUMN\n"
        )
        return 1
    problems = [*_problems(rows, columns, program, named), *_write_images(rows, named)]
    if arguments.model is not None and not problems:
        problems = _write_lengths(rows, program, arguments.model, named)
    show("".join(f"refused: {problem}\n" for problem in problems) or "nothing would be refused\n")
    show("".join(f"note: {note}\n" for note in _notes(rows, columns, program, named)))
    return 1 if problems else 0


def _summary(
    file: str, rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram | None, named: Mapping[str, str]
) -> Iterator[str]:
    yield f"{file}: {len(rows)} rows, " + (f"for {program.name}" if program else "for no program")
    yield f"  {'column':16}{'filled':>8}  {'type':{WIDTH}} meaning"
    meanings = {} if program is None else dict(program.meanings) | IMAGES
    meanings |= {name: meanings.get(key, f"data.{key}_key") for key, name in named.items()}
    for name, (kind, filled) in [*columns.items()][:MAX_SHOWN]:
        shown = kind if len(kind) <= WIDTH else f"{kind[: WIDTH - 3]}..."
        yield f"  {name:16}{filled:>8}  {shown:{WIDTH}} {meanings.get(name, 'ignored')}"
    if len(columns) > MAX_SHOWN:
        yield f"  and {len(columns) - MAX_SHOWN} more"


def _problems(
    rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram, named: Mapping[str, str]
) -> list[str]:
    """Return what is refused without a tokenizer: wrong types, and rows that are none."""
    if not len(rows):
        return ["the file has no rows"]
    found = []
    if program.name == "main_ppo":
        found += [_refusal(rows.require_mappings, name) for name in ("reward_model", "extra_info")]
        found += [_refusal(rows.require_texts, name) for name in ("data_source", "ability")]
        if "ground_truth" not in named and (missing := _num_without_truth(rows, columns)) not in (0, len(rows)):
            found.append(f"{missing} of {len(rows)} rows have no reward_model.ground_truth; fill it, or remove them")
    found = [text for text in found if text]
    for key in program.needs:
        if key != "label":
            found += _row_problems(rows, named.get(key, key), check_response if key in RESPONSES else CHECKS[key])
    return found


def _write_images(rows: ParquetRows, named: Mapping[str, str]) -> Iterator[str]:
    """Decode every image, print their number and sizes, and yield what is refused."""
    refusals = Refusals()
    if not (column := refusals.value(data.find_column, rows, named.get("image", "images"))):
        yield from refusals.lines()
        return
    limit = ImageDataConfig().max_images_per_prompt
    numbers, sizes = list[int](), list[tuple[int, int]]()
    for row in range(len(rows)):
        _, images = refusals.value(data.read_images, rows, row, column, max_images=limit) or ([], [])
        numbers.append(len(images))
        sizes += [image.size for image in images]
    sizes.sort(key=lambda size: size[0] * size[1])
    found = [(name, sizes[(len(sizes) - 1) * percentile // 100]) for name, percentile in LONGEST] if sizes else []
    shown = [f"{name} {width}x{height}" for name, (width, height) in found]
    filled = sum(number > 0 for number in numbers)
    most = max(numbers, default=0)
    show(f"images: {sum(numbers)} in {filled} of {len(rows)} rows, at most {most} in one; pixels: {', '.join(shown)}\n")
    yield from refusals.lines()


def _num_without_truth(rows: ParquetRows, columns: Mapping[str, Any]) -> int:
    """Return how many rows have no ground truth, and are not scored by a reward model."""
    if "reward_model" not in columns:
        return 0
    models = (value for _, values in rows.values("reward_model", batch=1000, limit=len(rows)) for value in values)
    return sum(
        value is None or (value.get("ground_truth") is None and value.get("style") != "model")
        for value in models
        if value is None or isinstance(value, dict)
    )


def check_response(response: Any, location: str) -> None:
    """Raise DataError for a response of white space only, which preferences refuse."""
    if is_blank(response):
        raise DataError(f"{location}: the response is blank; remove the row, or set data.truncation=filter")


RESPONSES = ("chosen", "rejected", "completion")
CHECKS: Mapping[str, Callable[[Any, str], Any]] = {"messages": check_messages, "prompt": as_messages}


def _row_problems(rows: ParquetRows, key: str, check: Callable[[Any, str], Any]) -> Iterator[str]:
    """Yield the first row that is refused for each reason, and how many are."""
    refusals = Refusals()
    for start, values in rows.values(key, batch=1000, limit=len(rows)):
        for row, value in enumerate(values, start):
            refusals.value(check, value, rows.location(row))
    yield from refusals.lines()


class Refusals:
    """What was refused, by reason: the first row, and how many."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def value(self, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what a function returns; None if it refuses its arguments."""
        try:
            return read(*arguments, **options)
        except DataError as error:
            reason = str(error).partition(": ")[2].partition(", found")[0]
            self._counts[reason] += 1
            self._first.setdefault(reason, str(error))
            return None

    def lines(self) -> Iterator[str]:
        """Yield the first row that is refused for each reason, and how many are."""
        for reason, count in self._counts.most_common(MAX_REASONS):
            yield f"{self._first[reason]} ({count} rows)"


def _refusal(check: Callable[..., Any], *arguments: Any) -> str:
    """Return why a check refuses its arguments, "" if it does not."""
    try:
        check(*arguments)
    except DataError as error:
        return str(error)
    return ""


def _write_lengths(rows: ParquetRows, program: TrainingProgram, model: str, named: Mapping[str, str]) -> list[str]:
    """Print the lengths in tokens of the first column that the program needs, and return what is refused."""
    folder = model_folder(model, key="--model")
    tokenizer = load_tokenizer(folder, key="--model")
    key = program.needs[0]
    try:
        processor = load_processor(ModelConfig(path=folder), tokenizer, ImageDataConfig())
        images = data.ImageColumn(rows, named.get("image", "images"), processor)
        found = row_tokens(rows, named.get(key, key), tokenizer, is_prompt=key == "prompt", images=images)
        lengths = [len(tokens) + images.more_tokens(row) for row, tokens in enumerate(found)]
    except DataError as error:
        return [str(error)]
    shown = ", ".join(f"{name} {np.percentile(lengths, percentile):.0f}" for name, percentile in LONGEST)
    limit = "data.max_prompt_length" if key == "prompt" else "data.max_length"
    show(f"tokens of {key}: {shown}; {limit}={max(lengths)} keeps all rows\n")
    if own := [images.more_tokens(row) for row in images.rows_with_images()]:
        shown = ", ".join(f"{name} {np.percentile(own, percentile):.0f}" for name, percentile in LONGEST)
        show(f"  of these of the images of a row: {shown}\n")
    return []


def row_tokens(
    rows: ParquetRows,
    key: str,
    tokenizer: Any,
    *,
    is_prompt: bool,
    limit: int = sys.maxsize,
    images: data.ImageColumn | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens of each row's prompt or conversation; an image is one text.

    Raises:
        DataError: A row is no prompt, or the chat template rejects it.
    """
    for start, values in rows.values(key, batch=1000, limit=min(limit, len(rows))):
        locate = lambda i, start=start: rows.location(start + i)  # noqa: E731
        messages = [as_messages(value, locate(i)) for i, value in enumerate(values)]
        if images is not None:
            messages = [images.messages(start + i, message) for i, message in enumerate(messages)]
        if not getattr(tokenizer, "chat_template", None) and all(isinstance(value, str) for value in values):
            yield from tokenizer(values)["input_ids"]
            continue
        rendered = render(tokenizer, messages, locate, add_generation_prompt=is_prompt)
        yield from rendered["input_ids"]


def _notes(
    rows: ParquetRows, columns: Mapping[str, Any], program: TrainingProgram, named: Mapping[str, str]
) -> Iterator[str]:
    """Yield what is not refused, and may surprise."""
    if program.name != "main_ppo":
        return
    own = "set custom_reward_function.path to a function of your own"
    sources = {} if "data_source" not in columns else rows.first_rows("data_source")
    if not sources:
        yield f"no row has a data_source; {own}"
    for source in [name for name in sources if not reward_score.has_score_function(str(name))][:MAX_REASONS]:
        yield f"data_source {source!r} has no score function; {own}"
    if "ground_truth" in named:
        return
    if "reward_model" not in columns:
        yield "there is no reward_model, so the reward function gets no ground truth (data.ground_truth_key=COLUMN)"
