"""`TextEnvironment`: what a user writes, and the names of such classes. Loads nothing but the standard library.

    # my_env.py                                   actor_rollout_ref.rollout.agent.path=my_env.py
    from hybridrl.serving.environments import TextEnvironment, register_environment

    @register_environment("guess")
    class Guess(TextEnvironment):
        def reset(self, row):
            self.number = row["kwargs"]["number"]
            return "I think of a number from 1 to 9. Which one?"

        def step(self, action):
            return "No. Try again.", 0.0, False

The driver notes only where a registered class is. A process of its own loads the file again and makes the object.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from hybridrl.import_path import file_of_module

Class = TypeVar("Class", bound=type)
Messages = list[dict[str, Any]]

ADDRESSES: dict[str, str] = {}  # name -> `path/to/file.py:Name` or `package.module:Name`


class Answer(NamedTuple):
    """What an environment returns for an action.

    Attributes:
        observation: Text of the next turn of the user, or a list of texts and images. Not used if `is_done`.
        reward: Of this action.
        is_done: The episode has ended.
    """

    observation: Any
    reward: float
    is_done: bool


class TextEnvironment:
    """An environment of texts. One object plays one episode at a time, and many one after the other.

    A class with these methods need not inherit from this one. Each of them may be `async`.

    Args:
        config: The environment's `config` in `rollout.multi_turn.interaction_config_path`.
    """

    def __init__(self, **config: Any):
        self.config = config

    def reset(self, row: dict[str, Any]) -> str | Messages | None:
        """Begin an episode and return what the policy sees after the row's prompt.

        Args:
            row: The columns of the data. `row["kwargs"]` has `extra_info.interaction_kwargs`, and `row["seed"]` an
                integer that all samples of a prompt share.

        Returns:
            A text, or a list of texts and images of Pillow, which becomes a turn of the user; whole messages; or None:
            the row's prompt says it all.

        Raises:
            ValueError: The row is wrong. Its sample is left out.
        """
        raise NotImplementedError

    def step(self, action: str) -> Answer | tuple[str, float, bool]:
        """Return observation, reward and whether the episode has ended.

        Args:
            action: The policy's turn, without special tokens. A text that is no valid action gets an observation and a
                reward. An exception leaves the sample out.
        """
        raise NotImplementedError

    def finish(self) -> float | None:
        """Return the last reward of an episode that ends before `step` says so; None: there is none.

        Called when turns or tokens are used up, and before `close`.
        """
        return None

    def close(self) -> None:
        """End an episode, also one that was not finished. Called before the next `reset`."""


def register_environment(name: str) -> Callable[[Class], Class]:
    """Register a class under the name that a row's `extra_info.interaction_kwargs` has as `name`."""

    def register(cls: Class) -> Class:
        ADDRESSES[name] = f"{file_of_module(cls.__module__) or cls.__module__}:{cls.__qualname__}"
        return cls

    return register
