"""The samples of a run, paged from disk.

A run writes one file of JSON lines per step. Of a file that was read, an index of 24 bytes per sample stays in memory:
where its line begins, its score, and which prompt it is. A query goes through the steps one after the other, and ends
when its page is full or its time is spent; the answer says where to go on. So no query reads a whole run, and a second
one over the same steps reads only the lines that it returns.
"""

import hashlib
import math
import re
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridrl.view.readers.storage import Folder, LineTail, parsed

STEP_FILE = re.compile(r"(\d{1,15})(?:\.(\d{1,9}))?\.jsonl")  # step, and generation batch with filter_groups
MAX_PAGE = 100
QUERY_BUDGET_S = 1.0
NAMES_PERIOD_S = 1.0  # between two listings of the directory
TOKENS = "tokens"  # directory with the tokens of some samples
Place = tuple[int, int, int]  # step, generation batch, row in its file


@dataclass(frozen=True)
class SampleQuery:
    """Which samples are wanted.

    Attributes:
        text: Part of the prompt or the answer, in any case of letters; empty: any.
        prompt: The prompt's id, as an earlier answer has it; empty: any.
        lowest: Least score.
        highest: Largest score.
        first: First step.
        last: Last step.
        ascending: Whether to begin with the first step.
    """

    text: str = ""
    prompt: str = ""
    lowest: float = -math.inf
    highest: float = math.inf
    first: int = 0
    last: int = 10**15
    ascending: bool = False


class StepIndex:
    """Where the samples of one file are."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.stat = folder.stat(name)
        self.offsets, self.scores, self.prompts = array("Q"), array("d"), array("Q")
        for offset, line in LineTail(folder, name).lines():
            if (record := parsed(line)) is not None:
                self.offsets.append(offset)
                self.scores.append(_score(record))
                self.prompts.append(prompt_number(record))

    def rows(self, query: SampleQuery) -> Iterator[int]:
        """Yield the rows with a fitting prompt and score.

        A sample without a score fits if no score is asked for.
        """
        wanted = int(query.prompt, 16) if query.prompt else None
        any_score = query.lowest == -math.inf and query.highest == math.inf
        for row, (score, prompt) in enumerate(zip(self.scores, self.prompts, strict=True)):
            if (any_score or query.lowest <= score <= query.highest) and wanted in (None, prompt):
                yield row


class SampleStore:
    """The samples in one directory."""

    def __init__(self, folder: Folder) -> None:
        self.url, self._folder = folder.url, folder
        self._indexes: dict[str, StepIndex] = {}
        self._files: dict[tuple[int, int], str] = {}
        self._listed_at = -math.inf

    def files(self) -> dict[tuple[int, int], str]:
        """Return (step, generation batch) -> file name, by step."""
        now = time.monotonic()
        if now - self._listed_at > NAMES_PERIOD_S:
            self._listed_at = now
            found = ((match, name) for name in self._folder.names() if (match := STEP_FILE.fullmatch(name)))
            self._files = dict(sorted(((int(match[1]), int(match[2] or 0)), name) for match, name in found))
        return self._files

    def steps(self) -> list[int]:
        """Return the steps that have samples."""
        return list(dict.fromkeys(step for step, _ in self.files()))

    def page(self, query: SampleQuery, *, after: Place | None = None, limit: int = 20) -> dict[str, Any]:
        """Return the next samples that fit.

        Args:
            query: Which.
            after: Where an earlier answer ended.
            limit: Most samples, at most `MAX_PAGE`.

        Returns:
            samples: The records, each with its place and its prompt's id.
            next: Where to go on; null at the end.
            step: The step that was looked at last.
        """
        until = time.monotonic() + QUERY_BUDGET_S
        found: list[dict[str, Any]] = []
        place = after
        for place, record in self._matches(query, after):
            if record is not None:
                found.append(record | {"place": place})
            if len(found) == min(limit, MAX_PAGE) or time.monotonic() > until:
                return {"samples": found, "next": place, "step": place[0]}
        return {"samples": found, "next": None, "step": None if place is None else place[0]}

    def _matches(self, query: SampleQuery, after: Place | None) -> Iterator[tuple[Place, dict[str, Any] | None]]:
        """Yield the samples that fit, in order, and None after each file, so that the caller can stop there."""
        for step, part in sorted(self.files(), reverse=not query.ascending):
            if not query.first <= step <= query.last or not _comes_after((step, part), after, query.ascending):
                continue
            name = self.files()[step, part]
            index = self._index(name)
            begin = after[2] + 1 if after is not None and after[:2] == (step, part) else 0
            for row in index.rows(query):
                if row >= begin:
                    record = self._record(name, index, row)
                    yield (step, part, row), record if _has_text(record, query.text) else None
            yield (step, part, len(index.offsets)), None

    def _index(self, name: str) -> StepIndex:
        """Return the index of a file; a new one if the file was replaced, as by a resumed run."""
        known = self._indexes.get(name)
        if known is None or known.stat != self._folder.stat(name):
            known = self._indexes[name] = StepIndex(self._folder, name)
        return known

    def _record(self, name: str, index: StepIndex, row: int) -> dict[str, Any]:
        end = index.offsets[row + 1] if row + 1 < len(index.offsets) else None
        line = self._folder.read(name, index.offsets[row], end).split(b"\n", 1)[0]
        return (parsed(line) or {}) | {"prompt_id": f"{index.prompts[row]:016x}"}

    def tokens(self, step: int, sample_id: str) -> dict[str, Any] | None:
        """Return the tokens of a sample with their records; None if the run has none."""
        for _, line in LineTail(self._folder.below(TOKENS), f"{step}.jsonl").lines():
            record = parsed(line)
            if record is not None and record.get("id") == sample_id:
                return record
        return None


def prompt_number(record: dict[str, Any]) -> int:
    """Return a number of 64 bits for the prompt of a sample: equal for equal texts."""
    text = str(record.get("input", "")).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _score(record: dict[str, Any]) -> float:
    score = record.get("score")
    return float(score) if isinstance(score, int | float) else math.nan


def _has_text(record: dict[str, Any], text: str) -> bool:
    wanted = text.casefold()
    return any(wanted in str(record.get(name, "")).casefold() for name in ("input", "output"))


def _comes_after(file: tuple[int, int], after: Place | None, ascending: bool) -> bool:
    """Return whether a file is not wholly before the place where an earlier answer ended."""
    if after is None:
        return True
    return file >= after[:2] if ascending else file <= after[:2]
