"""Entries of `meta_info`, which the driver sends to workers beside the rows.

One frozen record per kind of call, under one key.

    meta_info["generation_request"]   GenerationRequest   read by workers and agent loops that generate
    meta_info["update_plan"]          UpdatePlan          read by the dispatch of updates, and by workers that train

`CHOSEN_GROUPS` comes back: after a short round, the places of the prompts whose responses the batch has.

A batch without the record may have its fields as plain keys instead, for instance `meta_info["validate"]` as in verl.
Fields that are absent have their defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, Self

from hybridrl.errors import DataError

CHOSEN_GROUPS = "chosen_groups"


@dataclass(frozen=True)
class Record:
    """A record in `meta_info`. Subclasses have its key, and check their fields."""

    KEY: ClassVar[str]

    @classmethod
    def of(cls, meta_info: Mapping[str, Any]) -> Self:
        """Return the record of a batch: its own entry, or one made of plain keys.

        Raises:
            DataError: The entry is no such record, a field has a wrong value, or the batch has both spellings.
        """
        plain = {field.name: meta_info[field.name] for field in fields(cls) if field.name in meta_info}
        if cls.KEY not in meta_info:
            return cls(**plain)
        record = meta_info[cls.KEY]
        if not isinstance(record, cls):
            raise DataError(f"meta_info[{cls.KEY!r}]={record!r}: must be a {cls.__name__}; set it to {cls.__name__}()")
        if plain:
            raise DataError(
                f"meta_info has {cls.KEY!r} and also the plain keys {sorted(plain)}, which say the same; "
                f"remove the plain keys, or {cls.KEY!r}"
            )
        return record

    def put_into(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return `meta_info` with this record in place of an earlier one and of plain keys."""
        replaced = {self.KEY, *(field.name for field in fields(self))}
        return {key: value for key, value in meta_info.items() if key not in replaced} | {self.KEY: self}

    def _check_flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise DataError(f"meta_info {self.KEY}.{name}={value!r}: must be a bool; set {name} to True or False")

    def _check_integer(self, name: str, *, minimum: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or (minimum is not None and value < minimum):
            kind = "an integer" if minimum is None else f"an integer of at least {minimum}"
            raise DataError(f"meta_info {self.KEY}.{name}={value!r}: must be {kind}; set {name} to one")


@dataclass(frozen=True)
class GenerationRequest(Record):
    """How to generate the responses of one call.

    Attributes:
        seed: Seed of the call's random numbers, for rows without a seed in the column `seeds`.
        validate: Whether to sample with the settings of validation.
        greedy: Whether to generate one greedy response per prompt, otherwise with the settings of training.
    """

    KEY = "generation_request"

    seed: int = 0
    validate: bool = False
    greedy: bool = False

    def __post_init__(self) -> None:
        self._check_integer("seed")
        self._check_flag("validate")
        self._check_flag("greedy")


@dataclass(frozen=True)
class UpdatePlan(Record):
    """How to cut a batch into mini-batches and ranks.

    Attributes:
        mini_batch_size: Rows of one optimizer step, or episodes where the rows have the column `EPISODE`. None: the
            whole batch.
        shuffle_seed: Seed to shuffle the rows before cutting. None: in order.
        balance: Whether to distribute the tokens of a mini-batch evenly over ranks. False: rows in order.
        share_prefixes: Whether rows with common first tokens should be on one rank, which computes those once.
        num_mini_batches: Optimizer steps of the whole batch. The dispatch sets it; the rows have a column for it then.
    """

    KEY = "update_plan"
    EPISODE: ClassVar[str] = "episode"  # column: rows with the same number are in one optimizer step

    mini_batch_size: int | None = None
    shuffle_seed: int | None = None
    balance: bool = False
    share_prefixes: bool = False
    num_mini_batches: int | None = None

    def __post_init__(self) -> None:
        self._check_flag("balance")
        self._check_flag("share_prefixes")
        for name, minimum in (("mini_batch_size", 1), ("shuffle_seed", 0), ("num_mini_batches", 0)):
            if getattr(self, name) is not None:
                self._check_integer(name, minimum=minimum)
