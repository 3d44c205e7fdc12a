"""Rewrite a command line of verl with our keys, by the rows of `table`.

`load_config` and `hybridrl import-verl` call it. A word whose key and value are valid here stays as it is, so the
command lines of this library never change. No word is dropped without a `Change` that says why.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridrl.config.build import InvalidValue, convert, parse_override
from hybridrl.config.introspection import keys, value_text
from hybridrl.config.plugs import TRACKERS
from hybridrl.config.verl.defaults import differing_defaults
from hybridrl.config.verl.row import Row, RowKind, text_of
from hybridrl.config.verl.table import rows_of

logger = logging.getLogger(__name__)

PRESET_WORDS = {
    "ppo_trainer": (),
    "ppo_megatron_trainer": ("actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"),
}
"""verl's own configurations, which its launch scripts name, as settings of ours."""
LOGGERS: Mapping[str, str | None] = {
    "file": "jsonl",
    **dict.fromkeys(("clearml", "rl_insight", "swanlab", "trackio", "vemlp_wandb")),
}
"""Loggers that only verl has, and ours instead, if there is one. Any other unknown name is a mistake."""
OFFLOAD = "actor_rollout_ref.actor.megatron.param_offload"
LOSS = "distillation.distillation_loss"
DISTRIBUTED = "actor_rollout_ref.actor.megatron.use_distributed_optimizer"
LINE_KEYS = 12  # keys that a line of the log names; import-verl shows all


@dataclass(frozen=True)
class Change:
    """What became of one word of a command line.

    Attributes:
        word: The word, as `key=value`.
        kind: What became of it.
        ours: The words that replace it.
        reason: Why, in half a sentence; empty for another name.
    """

    word: str
    kind: RowKind
    ours: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """Return the change as one line."""
        shown = f"{self.word} -> {' '.join(self.ours)}" if self.ours else self.word
        return f"{shown}: {self.reason}" if self.reason else shown


@dataclass(frozen=True)
class Takeover:
    """A rewritten command line and the changes that led to it."""

    words: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def defaults(self) -> dict[str, str]:
        """Defaults of verl that differ here and that the command line leaves to them."""
        parsed = [word.partition("=") for word in self.words]
        return differing_defaults({key.lstrip("+~"): value for key, _, value in parsed}) if self.changes else {}

    @property
    def refusals(self) -> list[str]:
        """The lines of words that cannot be taken over, as error messages."""
        return [f"{change.word}: {change.reason}" for change in self.changes if change.kind is RowKind.REFUSED]

    def log(self) -> None:
        """Log one line for each kind of change."""
        changes = sorted(self.changes, key=lambda change: change.kind)
        for kind, group in groupby(changes, key=lambda change: change.kind):
            found = list(group)
            shown = [str(change) if change.ours else change.word for change in found[:LINE_KEYS]]
            more = f" and {len(found) - LINE_KEYS} more" if len(found) > LINE_KEYS else ""
            level = logging.WARNING if kind is RowKind.NO_EFFECT else logging.INFO
            if kind is not RowKind.REFUSED:
                logger.log(level, "settings of verl that %s (%d): %s%s", kind, len(found), "; ".join(shown), more)
        if self.defaults:
            missing = ", ".join(f"{key}={value}" for key, value in self.defaults.items())
            logger.info("verl's defaults that differ here and are not set: %s", missing)


@dataclass(frozen=True)
class _Word:
    text: str
    key: str
    value: Any

    @property
    def shown(self) -> str:
        return self.text.lstrip("+")


def take_over(schema: type, words: Sequence[str]) -> Takeover:
    """Return the command line with verl's keys replaced by ours.

    Words that neither are valid here nor have a row stay, and `load_config` refuses them.

    Args:
        schema: Schema of the program.
        words: Overrides as on the command line.
    """
    parsed = [*{word.key or word.text: word for word in map(_parse, words)}.values()]  # the last word of a key counts
    given: dict[str, Any] = {}
    taken = Takeover()
    for _ in range(2):  # the second time, rows that compare with another key know the value it was given
        taken = _Pass(schema, given).run(parsed)
        given = {word.key: word.value for word in map(_parse, taken.words)}
    return _without_unread(_without_distributed_optimizer(taken, given), given) if taken.changes else taken


def _without_distributed_optimizer(taken: Takeover, given: Mapping[str, Any]) -> Takeover:
    """Return a command line of verl that offloads Megatron's parameters with the optimizer that this needs here."""
    if text_of(given.get(OFFLOAD)) != "true" or any(key.startswith(DISTRIBUTED) for key in given):
        return taken
    ours, reason = f"{DISTRIBUTED}=false", "parameters are offloaded without the distributed optimizer only"
    change = Change(f"{OFFLOAD}=True", RowKind.RENAMED, (ours,), reason)
    return Takeover([*taken.words, ours], [*taken.changes, change])


def _without_unread(taken: Takeover, given: Mapping[str, Any]) -> Takeover:
    """Return a command line of verl without what its distillation loss does not read in verl either."""
    mode = text_of(given.get(f"{LOSS}.loss_mode"))
    names = () if mode.startswith(("forward", "reverse")) else (f"{LOSS}.topk", f"{LOSS}.log_prob_min_clamp")
    unread = [word for word in taken.words if _parse(word).key in names]
    changes = [Change(word, RowKind.DONE, reason="a loss of sampled tokens does not read it") for word in unread]
    return Takeover([word for word in taken.words if word not in unread], [*taken.changes, *changes])


def preset_words(name: str | None, folder: str | None) -> Sequence[str] | None:
    """Return the settings that stand for verl's own configuration of this name; None if it is none of verl's.

    Args:
        name: Value of --config-name.
        folder: Value of --config-path. A directory that exists is the user's.
    """
    if folder is not None and Path(folder).is_dir():
        return None
    words = PRESET_WORDS.get((name or "ppo_trainer").removesuffix(".yaml"))
    return words if words or folder is not None else None


class _Pass:
    """One pass over the words. given: values of our keys, as far as they are known."""

    def __init__(self, schema: type, given: Mapping[str, Any]):
        self._known = keys(schema)
        self._given = given
        self._words: dict[str, str] = {}  # by key; a later word replaces an earlier one
        self._changes: list[Change] = []

    def run(self, words: Sequence[_Word]) -> Takeover:
        foreign = [word for word in words if not self._keep(word)]
        for word in foreign:
            row = next((row for key, row in rows_of(word.key) if self._covers(row, word, key=key)), None)
            if row is None:
                self._words[word.key] = word.text
            else:
                self._apply(row, word)
        return Takeover(list(self._words.values()), self._changes)

    def _keep(self, word: _Word) -> bool:
        """Keep the word if its key and value are valid here, and return whether they are."""
        spec = self._known.get(word.key)
        if spec is None:
            parents = (word.key[:dot] for dot, letter in enumerate(word.key) if letter == ".")
            valid = any(parent in self._known and self._known[parent].free for parent in parents)
        else:
            valid = _is_valid(word.value, spec)
        if valid or not word.key:
            self._words[word.key or word.text] = word.text
        return valid or not word.key

    def _covers(self, row: Row, word: _Word, *, key: str) -> bool:
        if row.kind is RowKind.RENAMED and not all(self._exists(name) for name in row.to):
            return False
        if row.when is not None and text_of(word.value) not in row.when:
            return False
        if row.same_as is not None and text_of(word.value) != text_of(self._value(row.same_as)):
            return False
        if row.convert == "covers_lengths":
            lengths = [self._value(f"data.max_{part}_length") for part in ("prompt", "response")]
            return all(isinstance(size, int) for size in (word.value, *lengths)) and word.value >= sum(lengths)
        if row.convert == "known_loggers":
            return all(name in {*LOGGERS, *TRACKERS.names()} or ":" in name for name in _texts(word.value))
        if row.convert == "at_most_one":
            return isinstance(word.value, int | float) and word.value > 1
        return bool(row.kind is not RowKind.RENAMED or row.to != (word.key,) or row.values or row.convert)

    def _exists(self, name: str) -> bool:
        return name in self._known or any(spec.free and name.startswith(f"{key}.") for key, spec in self._known.items())

    def _value(self, key: str) -> Any:
        if key in self._given:
            return self._given[key]
        return self._known[key].default if key in self._known else None

    def _apply(self, row: Row, word: _Word) -> None:
        if row.kind is not RowKind.RENAMED:
            self._changes.append(Change(word.shown, row.kind, reason=row.text))
            return
        try:
            value, reason = self._converted(row, word)
        except InvalidValue as refused:
            self._changes.append(Change(word.shown, RowKind.REFUSED, reason=str(refused)))
            return
        ours = tuple(f"{name}{self._below(row, word)}={value}" for name in row.to)
        for theirs in ours:
            name = theirs.partition("=")[0]
            present = self._words.get(name)
            if present is not None and text_of(_parse(present).value) != text_of(_parse(theirs).value):
                reason = f"contradicts {present}; leave out one of them"
                self._changes.append(Change(word.shown, RowKind.REFUSED, reason=reason))
                return
            self._words[name] = present or theirs
        self._changes.append(Change(word.shown, RowKind.RENAMED, ours, reason))

    def _below(self, row: Row, word: _Word) -> str:
        """Return the part of the word's key that is below the row's, with its dot."""
        key = next(key for key, found in rows_of(word.key) if found is row)
        return word.key[len(key) :]

    def _converted(self, row: Row, word: _Word) -> tuple[str, str]:
        """Return the value as our key takes it, as text, and a remark. Raises InvalidValue."""
        if row.convert == "per_process":
            return self._per_process(word), "divided by the number of processes"
        if row.convert == "at_most_one":
            return "1", "no ratio is below 0"
        if row.convert == "known_loggers":
            return self._loggers(word)
        if text_of(word.value) in row.values:
            return value_text(row.values[text_of(word.value)]), row.text
        return word.text.partition("=")[2], row.text

    def _per_process(self, word: _Word) -> str:
        if word.value is None:
            return "null"
        sizes = [self._value(f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node")]
        size = math.prod(size if isinstance(size, int) else 0 for size in sizes)
        if not isinstance(word.value, int) or size < 1 or word.value % size:
            raise InvalidValue(
                f"counts the rows of all processes, and {size} processes do not divide them; set {word.key}_per_gpu"
            )
        return str(word.value // size)

    def _loggers(self, word: _Word) -> tuple[str, str]:
        dropped = [name for name in _texts(word.value) if LOGGERS.get(name, name) is None]
        kept = [LOGGERS.get(name) or name for name in _texts(word.value) if name not in dropped]
        reason = f"{', '.join(dropped)}: no logger here; known are {', '.join(TRACKERS.names())}" if dropped else ""
        return value_text(kept or ["console", "jsonl"]), reason


def _texts(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def _is_valid(value: Any, spec: Any) -> bool:
    try:
        found = convert(value, spec)
    except InvalidValue:
        return False
    if spec.registry is None:
        return True
    return not any(spec.registry.problem(name) for name in (found if isinstance(found, list) else [found]))


def _parse(word: str) -> _Word:
    """Return key and value of an override, both empty for a word that sets nothing."""
    override = parse_override(word)
    if override is None or override.is_delete() or override.is_sweep_override():
        return _Word(word, "", None)
    return _Word(word, override.key_or_group, override.value())
