"""A server of the package openenv with one environment: it repeats a word, and says how many letters it has.

python openenv_server.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    word: str


class Letters(Observation):
    text: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="1", step_count=0)

    def reset(self, seed=None, episode_id=None, longest=9, **kwargs):
        self.longest = longest
        return Letters(text=f"seed {seed}", done=False, reward=0.0)

    def step(self, action, **kwargs):
        if action.word == "crash":
            raise RuntimeError("of the server")
        is_done = len(action.word) >= self.longest
        return Letters(text=f"{action.word} {len(action.word)}", done=is_done, reward=float(len(action.word)))

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    uvicorn.run(create_app(Counting, Word, Letters, max_concurrent_envs=4), host="127.0.0.1", port=int(sys.argv[1]))
