"""`SessionStore`: the sessions of an endpoint by name.

A session begins with its first request. Sessions of agent loops are opened and closed by the loop and have names that
the store makes; a late request of such an agent is refused. All others belong to clients: the store keeps the most
recently used ones.
"""

import re
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from hybridrl.serving.sessions.episodes import EpisodeQueue
from hybridrl.serving.sessions.session import EpisodeLimits, Session, SessionEnded

MAX_SESSIONS = 1024  # of clients
MAX_TOKENS = 4_000_000  # of all sessions of clients together; some 150 MB
EPISODE_PREFIX = "episode-"
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class SessionStore:
    """Sessions by name. Called in any thread."""

    def __init__(self) -> None:
        self._episodes: dict[str, Session] = {}
        self._of_clients: OrderedDict[str, Session] = OrderedDict()

    def open_episode(self, episode: EpisodeLimits) -> Session:
        """Return a new session of an agent loop."""
        session = Session(f"{EPISODE_PREFIX}{uuid.uuid4().hex}", episode)
        self._episodes[session.name] = session
        return session

    def find(self, name: str) -> Session:
        """Return the session of this name, a new one if there is none.

        Raises:
            ValueError: This is no name.
            SessionEnded: Its agent loop has closed it.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"session {name[:80]!r}: a name has 1 to 128 letters, digits, dots, hyphens, underscores")
        if name.startswith(EPISODE_PREFIX):
            if name not in self._episodes:
                raise SessionEnded(f"session {name!r} has ended")
            return self._episodes[name]
        session = self._of_clients.setdefault(name, Session(name))
        self._of_clients.move_to_end(name)
        self._drop_oldest()
        return session

    def close(self, name: str) -> None:
        """Forget a session. It takes no more requests. Does nothing for an unknown name."""
        session = self._episodes.pop(name, None) or self._of_clients.pop(name, None)
        if session is not None:
            session.is_closed = True

    def _drop_oldest(self) -> None:
        num_tokens = sum(session.num_tokens for session in self._of_clients.values())
        for name, session in list(self._of_clients.items())[:-1]:
            if len(self._of_clients) <= MAX_SESSIONS and num_tokens <= MAX_TOKENS:
                return
            if not session.num_open:
                num_tokens -= session.num_tokens
                self.close(name)


@dataclass(frozen=True)
class SessionHost:
    """Where agents of this machine find their sessions.

    Attributes:
        sessions: Of the endpoint.
        episodes: Of the endpoint, for programs that ask for work.
        url: Of the endpoint, without a path.
        api_key: That clients send.
        model: Name of the policy.
    """

    sessions: SessionStore
    episodes: EpisodeQueue
    url: str
    api_key: str
    model: str

    def url_of(self, session: str) -> str:
        """Return the base URL of OpenAI's API within a session."""
        return f"{self.url}/sessions/{session}/v1"
