"""Episodes that wait for a program outside: offered by an agent loop, claimed and ended through the endpoint.

    offered = queue.offer(session, row)     the agent loop, for each row
    claimed = queue.claim()                 the endpoint, for a program that asks for work
    queue.end(name, EndOfEpisode(1.0))      the endpoint, when the program is done
    queue.withdraw(offered)                 the agent loop: from now on the program is too late

Agent loops and endpoint may run on different event loops, so both sides are futures of threads.
"""

import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.sessions.session import Session


def row_as_json(row: dict[str, Any]) -> str:
    """Return a row's columns as JSON: numpy's arrays as lists, what JSON does not have as text."""
    return json.dumps(row, ensure_ascii=False, default=lambda value: getattr(value, "tolist", value.__str__)())


@dataclass(frozen=True)
class EndOfEpisode:
    """What a program says at the end.

    Attributes:
        reward: Of the episode; None: the run's reward function scores it.
        error: Why the program failed; None: it did not.
    """

    reward: float | None = None
    error: str | None = None


@dataclass(eq=False)
class OfferedEpisode:
    """One row that a program may work on.

    Attributes:
        session: For the program alone.
        row: Columns of the row.
        claimed, ended: Done once a program has begun, and has ended.
    """

    session: Session
    row: dict[str, Any]
    claimed: Future[None] = field(default_factory=Future)
    ended: Future[EndOfEpisode] = field(default_factory=Future)


class EpisodeQueue:
    """Episodes of one endpoint, the oldest offer first. Called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: dict[str, OfferedEpisode] = {}
        self._claimed: dict[str, OfferedEpisode] = {}

    def offer(self, session: Session, row: dict[str, Any]) -> OfferedEpisode:
        """Return an episode that the next program may claim."""
        episode = OfferedEpisode(session, row)
        with self._lock:
            self._offered[session.name] = episode
        return episode

    def claim(self) -> OfferedEpisode | None:
        """Return the oldest offer, which nobody else gets; None if there is none."""
        with self._lock:
            for name, episode in list(self._offered.items()):
                del self._offered[name]
                if episode.claimed.set_running_or_notify_cancel():
                    self._claimed[name] = episode
                    episode.claimed.set_result(None)
                    return episode
        return None

    def end(self, name: str, end: EndOfEpisode) -> None:
        """End a claimed episode. Raises KeyError if there is none of this name, for instance after its deadline."""
        with self._lock:
            episode = self._claimed.pop(name)
            if not episode.ended.set_running_or_notify_cancel():
                raise KeyError(name)
            episode.ended.set_result(end)

    def withdraw(self, episode: OfferedEpisode) -> None:
        """Forget an episode, whatever its state."""
        with self._lock:
            self._offered.pop(episode.session.name, None)
            self._claimed.pop(episode.session.name, None)
