"""What one step of the loop carries from stage to stage. Not a store: everything not kept is gone in the next step."""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

HIDDEN = ("_kept", "_before")  # the context's own attributes
MISSING = object()


@dataclass(repr=False, eq=False)
class Context:
    """A step's values, by attribute or by item (`ctx.a` is `ctx["a"]`); any stage may add new ones.

    Picklable when its values are. A subclass that is a dataclass adds fields with defaults and keeps some of them by
    calling `self.keep(...)` in `__post_init__`; it must be constructible without arguments, or `renew` cannot make one.
    """

    total_step: int = 0  # steps completed before this one
    finish: bool = False  # set by a stage: this step is the last; never carried over

    def keep(self, *keys: str) -> None:
        """Carry `keys` into every later step's context, for ever. A key may be set after it is kept."""
        self.__dict__.setdefault("_kept", set()).update(keys)

    def renew(self) -> "Context":
        """Return the next step's context: same type, kept values and kept names carried over,
        `total_step` one higher.
        """
        new = type(self)()
        kept = self.__dict__.get("_kept", set())
        new.keep(*kept)
        for key in kept & vars(self).keys():
            new[key] = self[key]
        new.total_step = self.total_step + 1
        return new

    def fork(self) -> Self:
        """Return a copy for a stage that runs beside others, so that none of them sees another one's half-done work.

        Containers are copied (`copied`), everything else is shared. `join` brings together what the stages have done.
        """
        self.keep()  # so that both share one set of kept names
        child = copy.copy(self)
        vars(child).update({key: self.copied(value) for key, value in vars(self).items()})
        vars(child)["_before"] = {key: self.copied(value) for key, value in vars(child).items()}
        return child

    def join(self, child: "Context") -> None:
        """Take over what has changed in a fork.

        From then on the fork is this context: what still holds it sees what all have done.
        """
        before = vars(child).pop("_before")
        for key, value in vars(child).items():
            earlier = before.get(key, MISSING)
            if (
                key not in HIDDEN
                and not self.take_changes(vars(self).get(key), earlier, value)
                and value is not earlier
            ):
                self[key] = value
        for key in before.keys() - vars(child).keys():
            vars(self).pop(key, None)
        child.__dict__ = self.__dict__

    def copied(self, value: Any) -> Any:
        """Return the copy of a container whose entries several stages may set; anything else as it is."""
        return copy.copy(value) if isinstance(value, dict) else value

    def take_changes(self, mine: Any, before: Any, theirs: Any) -> bool:
        """Set or take out those entries of the container `mine` that differ between the copies `before` and `theirs`.

        False if they are no such containers, so that `theirs` as a whole takes the place of `mine`.
        """
        if not all(isinstance(value, dict) for value in (mine, before, theirs)):
            return False
        set_changed(mine, before, theirs)
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self).get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, after setting it to `default` where it was missing."""
        return vars(self).setdefault(key, default)

    def has_attr(self, key: str) -> bool:
        return key in self

    def update(self, values: Mapping[str, Any]) -> None:
        """Set every key of `values`."""
        for key in values.keys():
            self[key] = values[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Take `key` out and return its value; where it is missing `default`, or KeyError."""
        return vars(self).pop(key, *default)

    def keys(self) -> list[str]:
        """Return what the context holds; so `dict(ctx)` is a copy."""
        return list(self)

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __delitem__(self, key: str) -> None:
        del vars(self)[key]

    def __contains__(self, key: str) -> bool:
        return key in vars(self)

    def __iter__(self) -> Iterator[str]:
        return (key for key in vars(self) if key not in HIDDEN)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(total_step={self.total_step}, finish={self.finish}, holds {sorted(self)})"


def set_changed(mine: MutableMapping, before: Mapping, theirs: Mapping) -> None:
    """Set in `mine` the entries that are new or another object in `theirs` than in `before`, and take out those that
    are gone.
    """
    for key, value in theirs.items():
        if before.get(key, MISSING) is not value:
            mine[key] = value
    for key in [key for key in before.keys() if key not in theirs.keys() and key in mine.keys()]:
        del mine[key]


@dataclass(repr=False, eq=False)
class OnlineRLContext(Context):
    """The context of training on data that the policy has just made.

    The counters (`train_iter`, `env_step`, `env_episode`) and the last evaluation are kept from step to step.
    """

    batch: Any = None  # rows of this step; every stage adds its columns
    metrics: dict[str, float] = field(default_factory=dict)  # name -> value, logged once when the step ends
    timing: dict[str, float] = field(default_factory=dict)  # stage name -> seconds in this step, written by StepTimer
    train_iter: int = 0  # optimizer steps so far
    env_step: int = 0  # environment steps so far; for a language model, generated tokens
    env_episode: int = 0  # episodes so far; for a language model, responses
    last_eval_iter: int = -1  # train_iter at the last evaluation; -1 before the first
    last_eval_value: float | None = None  # result of the last evaluation

    def __post_init__(self) -> None:
        self.keep("train_iter", "env_step", "env_episode", "last_eval_iter", "last_eval_value")


@dataclass(repr=False, eq=False)
class OfflineRLContext(Context):
    """The context of training on data that was there before.

    `train_iter`, `train_epoch` and the last evaluation are kept.
    """

    batch: Any = None  # rows of this step; every stage adds its columns
    metrics: dict[str, float] = field(default_factory=dict)  # name -> value, logged once when the step ends
    timing: dict[str, float] = field(default_factory=dict)  # stage name -> seconds in this step, written by StepTimer
    train_iter: int = 0  # optimizer steps so far
    train_epoch: int = 0  # passes over the data so far
    last_eval_iter: int = -1  # train_iter at the last evaluation; -1 before the first
    last_eval_value: float | None = None  # result of the last evaluation

    def __post_init__(self) -> None:
        self.keep("train_iter", "train_epoch", "last_eval_iter", "last_eval_value")
