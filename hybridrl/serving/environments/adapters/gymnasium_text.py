"""`gymnasium`: an environment of the package `gymnasium` (1.1 or later) as one of texts.

    class_name: gymnasium
    config:
      id: FrozenLake-v1              # or package.module:Game-v0, which imports the module first
      kwargs: {is_slippery: false}   # of gymnasium.make
      actions: [left, down, right, up]

A row's `seed` and `options` in `extra_info.interaction_kwargs` go to `reset`.
"""

from typing import Any


class GymnasiumText:
    """One environment of `gymnasium.make`.

    Args:
        id: Of the registered environment.
        kwargs: Of `gymnasium.make`.
        actions: Words for the numbers of a discrete action space, in order. Without them actions are numbers.
        invalid_reward: Reward of a text that is no action; the environment does not see it.
        show: "observation", or "render": the text of `render_mode=ansi`.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        invalid_reward: float = 0.0,
        show: str = "observation",
    ):
        import gymnasium

        if show not in ("observation", "render"):
            raise ValueError(f"show={show!r}: must be observation or render")
        given = dict(kwargs or {}) | ({"render_mode": "ansi"} if show == "render" else {})
        self._env: Any = gymnasium.make(id, **given)
        self._show, self._invalid_reward = show, invalid_reward
        space: Any = self._env.action_space
        self._is_text = isinstance(space, gymnasium.spaces.Text)
        self._num_actions = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
        self._first = int(space.start) if self._num_actions else 0
        self._words = [word.lower() for word in actions or ()]
        if not self._is_text and not self._num_actions:
            raise TypeError(f"{id} has the action space {space}; it must be Text or Discrete")
        if self._words and len(self._words) != self._num_actions:
            raise ValueError(f"{id} has {self._num_actions} actions; `actions` has {len(self._words)} words")

    def reset(self, row: dict[str, Any]) -> str:
        kwargs = row["kwargs"]
        observation, _ = self._env.reset(seed=kwargs.get("seed", row["seed"]), options=kwargs.get("options"))
        return self._text(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        chosen = self._parse(action)
        if chosen is None:
            words = ", ".join(self._words) or f"a number from {self._first} to {self._first + self._num_actions - 1}"
            return f"This is no action. Answer with one of: {words}", self._invalid_reward, False
        observation, reward, is_terminated, is_truncated, _ = self._env.step(chosen)
        return self._text(observation), float(reward), bool(is_terminated or is_truncated)

    def _parse(self, action: str) -> Any:
        """Return the action in a text; None if it is none."""
        if self._is_text:
            return action
        word = action.strip().lower()
        if word in self._words:
            return self._first + self._words.index(word)
        is_number = word.isdecimal() and not self._words
        number = int(word[:9]) if is_number else -1
        return number if self._first <= number < self._first + self._num_actions else None

    def _text(self, observation: Any) -> str:
        return str(self._env.render() if self._show == "render" else observation)
