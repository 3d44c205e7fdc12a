"""The context: values that one step of the loop carries from stage to stage.

A `Task` makes one per step. It is not a store: whatever is not kept is dropped before the next step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KEPT = "_kept"  # attribute that is not a value of the step: the names that `keep` has got


@dataclass(init=False, repr=False, eq=False)
class Context:
    """Values of one step, by attribute or by item: `ctx.a` is `ctx["a"]`.

    Any stage may add values, and so may the constructor: `Context(a=1)`. A context is picklable when its values are. A
    subclass must be a dataclass that can be constructed without arguments, or `renew` fails. Its fields that last call
    `self.keep(...)` in `__post_init__`.
    """

    total_step: int = 0  # completed steps before this one
    finish: bool = False  # set by a stage if this step is the last; never kept

    def __init__(self, total_step: int = 0, finish: bool = False, **values: Any) -> None:
        self.__dict__.update(total_step=total_step, finish=finish, **values)

    @property
    def step_number(self) -> int:
        """The step's number in error messages."""
        return self.total_step

    def keep(self, *keys: str) -> None:
        """Carry `keys` into the context of every following step.

        A key may be set after it is kept.
        """
        self.__dict__.setdefault(KEPT, set()).update(keys)

    def renew(self) -> "Context":
        """Return the context of the next step.

        It has the same type, the kept values and the kept names; its `total_step` is one higher.
        """
        new = type(self)()
        old_values, values = self.__dict__, new.__dict__
        if kept := old_values.get(KEPT):
            new.keep(*kept)
            for key in kept:
                if key in old_values:
                    values[key] = old_values[key]
        values["total_step"] = old_values["total_step"] + 1
        return new

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self).get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, after setting a missing one to `default`."""
        return vars(self).setdefault(key, default)

    def has_attr(self, key: str) -> bool:
        return key in self

    def update(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any) -> None:
        """Set several values, as `dict.update` does."""
        for key, value in dict(values, **more).items():
            self[key] = value

    def pop(self, key: str, *default: Any) -> Any:
        """Remove `key` and return its value.

        Raises:
            KeyError: `key` is missing and no `default` is given.
        """
        return vars(self).pop(key, *default)

    def keys(self) -> list[str]:
        """Return the names of the values, so that `dict(ctx)` makes a copy."""
        return list(self)

    def values(self) -> list[Any]:
        """Return the values, in the order of `keys`."""
        return [self[key] for key in self]

    def items(self) -> list[tuple[str, Any]]:
        """Return pairs of name and value."""
        return [(key, self[key]) for key in self]

    def __len__(self) -> int:
        return sum(1 for _ in self)  # `list` would ask for the length again

    def __bool__(self) -> bool:
        return True  # also before the first value

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __delitem__(self, key: str) -> None:
        del vars(self)[key]

    def __contains__(self, key: str) -> bool:
        return key in vars(self)

    def __iter__(self) -> Iterator[str]:
        return (key for key in vars(self) if key != KEPT)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(total_step={self.total_step}, finish={self.finish}, holds {sorted(self)})"


@dataclass(repr=False, eq=False)
class RLContext(Context):
    """What both kinds of training share. DI-engine's names; this library's stages use `batch`, `metrics` and `timing`.

    Kept from step to step: `train_iter`, the last evaluation and `wandb_url`.
    """

    batch: Any = None  # rows of this step; every stage adds its columns
    metrics: dict[str, float] = field(default_factory=dict)  # name -> value, logged once when the step ends
    timing: dict[str, float] = field(default_factory=dict)  # stage name -> seconds in this step, written by StepTimer
    train_iter: int = 0  # optimizer steps so far
    train_data: Any = None  # what the learner trains on in this step
    train_output: Any = None  # what the learner returned
    eval_value: float = -math.inf  # result of an evaluation in this step
    eval_output: Any = field(default_factory=dict)  # what the evaluated policy returned
    last_eval_iter: int = -1  # train_iter at the last evaluation; -1 before the first
    last_eval_value: float = -math.inf  # result of the last evaluation
    info_for_logging: dict[str, Any] = field(default_factory=dict)  # more values for a logger
    wandb_url: str = ""

    def __post_init__(self) -> None:
        self.keep("train_iter", "last_eval_iter", "last_eval_value", "wandb_url")


@dataclass(repr=False, eq=False)
class OnlineRLContext(RLContext):
    """The context of training on data that the current policy generated.

    Kept as well: `env_step` and `env_episode`.
    """

    env_step: int = 0  # environment steps so far; for a language model, generated tokens
    env_episode: int = 0  # episodes so far; for a language model, responses
    collect_kwargs: dict[str, Any] = field(default_factory=dict)  # options of the policy while it collects
    obs: Any = None  # observations of the environments
    action: Any = None  # actions for them
    inference_output: Any = None  # what the policy returned for the observations
    trajectories: list | None = None  # collected transitions
    episodes: list | None = None  # collected episodes
    trajectory_end_idx: list[int] = field(default_factory=list)  # indices in `trajectories` where an episode ends

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep("env_step", "env_episode")


@dataclass(repr=False, eq=False)
class OfflineRLContext(RLContext):
    """The context of training on a fixed data set.

    Kept as well: `train_epoch` and `trained_env_step`.
    """

    train_epoch: int = 0  # passes over the data so far
    trained_env_step: int = 0  # samples of the data trained on so far

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep("train_epoch", "trained_env_step")
