"""Middleware: user functions that change the stages of the training loop (`trainer.middleware=[path.py:fn]`).

    def use(task, trainer):
        task.insert_after("adv", clip_advantages)       # or insert_before, replace, use_wrapper, on_exit

`BatchContext` is the loop's context, and `Column` a row of a trainer's table of its batch's columns. Used by the
trainers and by `hybridrl job graph`, in the driver.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridrl.config import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.framework.context import OnlineRLContext
from hybridrl.framework.stage import StageSpec, with_spec
from hybridrl.framework.tasks import Task
from hybridrl.import_path import load_object
from hybridrl.trainer.checkpoint.step_ledger import Outcomes

Middleware = Callable[[Task, Any], None]


def load_middleware(paths: Sequence[str]) -> list[Middleware]:
    """Return the functions named as `path.py:fn` or `package.module:fn`.

    Raises:
        ConfigError: A name cannot be loaded, or is no function.
    """
    return [_load(path) for path in paths]


def _load(path: str) -> Middleware:
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ConfigError(f"trainer.middleware={path}: write it as path.py:fn or package.module:fn")
    try:
        loaded = load_object(module, name)
    except ConfigError as error:
        raise ConfigError(f"trainer.middleware={path}: {error}") from error
    if not callable(loaded):
        raise ConfigError(f"trainer.middleware={path}: is {type(loaded).__name__}, not a function of (task, trainer)")
    return loaded


def apply_middleware(task: Task, trainer: Any) -> None:
    """Apply the trainer's middleware to its loop."""
    for change in trainer.middleware:
        change(task, trainer)


def preview_stages(specs: Iterable[StageSpec], config: PPOConfig) -> list[StageSpec]:
    """Return the specs of the loop's stages after `trainer.middleware` is applied; runs no stage."""
    task = Task()
    for spec in specs:
        task.use(with_spec(lambda ctx: None, spec))
    for change in load_middleware(config.trainer.middleware):
        change(task, TrainerStub(config))
    return task.stages


class TrainerStub:
    """Replaces the trainer when the loop is only inspected; has nothing but the settings."""

    def __init__(self, config: PPOConfig):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"trainer.middleware: trainer.{name} exists only while the loop runs; use it inside a stage")


Condition = Callable[[Any], bool]  # of a trainer's settings, for PPO of `StepSettings`


def always(settings: Any) -> bool:
    """Return True, whatever the settings are."""
    return True


@dataclass(frozen=True)
class Column:
    """A row of a trainer's table of columns.

    Attributes:
        dtype: Name of the torch dtype, or `object` for an array of Python objects.
        shape: Letters of its sizes, for instance `B R`. Equal letters are equal sizes.
        written_by: Names of the stages that write it.
        meaning: One phrase.
        when: Whether a run with these settings has it.
        only: Stage -> whether it reads or writes the column. Stages that are not named do so whenever it exists.
    """

    dtype: str
    shape: str
    written_by: tuple[str, ...]
    meaning: str
    when: Condition = always
    only: Mapping[str, Condition] = field(default_factory=dict)

    def is_used(self, stage: str, settings: Any) -> bool:
        """Return whether the stage of this name reads or writes the column, if it declares it at all."""
        return self.when(settings) and self.only.get(stage, always)(settings)


@dataclass(repr=False, eq=False)
class BatchContext(OnlineRLContext):
    """`OnlineRLContext` with what the trainers' stages carry. Columns are added or replaced, never changed in place.

    The trainers' stages set the attributes below. One that no stage has set yet does not exist.

    Attributes:
        started_at: When the step began, `time.perf_counter()`.
        prompt_rows: Rows of the dataset that the step trains on.
        greedy: Greedy responses to the step's prompts, None without them.
        gen_batch: Number of the generation batch within its step, counted from 1; set for all but the first.
        reward_extra: Columns that the reward function returns beside the scores. Empty after `filter_groups` and
            `select_samples`.
        own_log_probs: What the update of the actor returned, if its own log-probs are the old ones.
        group_outcomes: With `filter_groups` or tail batching: epoch -> what became of a prompt -> its rows.
        num_new: Samples of this step; those after them come from the replay buffer.
        updated: Whether the policy was updated.
        computed: Stage -> metrics of its calls, which say what engines that share prefixes computed.
    """

    first_step: int = 0  # the run's number of this loop's first step
    started_at: float = field(init=False)
    prompt_rows: Sequence[int] | np.ndarray = field(init=False)
    greedy: Any = field(init=False)
    gen_batch: int = field(init=False)
    reward_extra: dict[str, list] = field(init=False)
    group_outcomes: Outcomes = field(init=False)
    own_log_probs: Any = field(init=False)
    num_new: int = field(init=False)
    updated: bool = field(init=False)
    computed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep("first_step")

    @property
    def step_number(self) -> int:
        """The step's number in the run, which may have begun in an earlier process."""
        return self.first_step + self.total_step
