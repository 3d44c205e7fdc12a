"""Environments for tests. Their processes load this file; `fault` in a row says what goes wrong in which method."""

import json
import os
import signal
import time
import urllib.request
from typing import Any

from hybridrl.serving.environments import Answer, TextEnvironment


class Guess(TextEnvironment):
    """A number to guess; each wrong guess costs 0.25."""

    def __init__(self, low: str = "higher", **config: Any):
        super().__init__(**config)
        self.low, self.num_episodes = low, 0

    def reset(self, row: dict[str, Any]) -> str | None:
        kwargs = row["kwargs"]
        self.number, self.fault, self.num_episodes = kwargs["number"], kwargs.get("fault"), self.num_episodes + 1
        if self.fault == "row":
            raise LookupError("no such number")
        return kwargs.get("opening", "Which number?") or None

    def step(self, action: str) -> Any:
        if self.fault is not None:
            return misbehave(self.fault)
        if action == str(self.number):
            return Answer("", 1.0, True)
        return f"{self.low} {self.num_episodes}", -0.25, False


class JudgedGuess(Guess):
    """Gives its reward at the end: what is known of the number then."""

    def step(self, action):
        super().step(action)
        return "noted", 0.0, action == str(self.number)

    def finish(self):
        return float("nan") if self.number < 0 else 0.125 * self.number


class AsyncGuess(Guess):
    async def reset(self, row):
        return super().reset(row)

    async def step(self, action):
        return super().step(action)


class Unmakeable:
    def __init__(self):
        raise FileNotFoundError("no such level")


class Polite:
    """verl's form of an environment. The messages of the conversation go into its answers."""

    def __init__(self, config):
        self.config, self.ended = config, []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.wanted = kwargs["wanted"]
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        is_right = messages[-1]["content"] == self.wanted
        return is_right, f"{kwargs['name']} {len(messages)} {self.config['greeting']}", float(is_right), {}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        self.ended.append(instance_id)


class OwnClient:
    """Plays by itself, as a client of the endpoint."""

    def play(self, task):
        body = {"model": task["model"], "messages": [{"role": "user", "content": task["kwargs"]["question"]}]}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {task['api_key']}"}
        url = f"{task['base_url']}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        return float(said == task["kwargs"]["wanted"])


def misbehave(fault: str) -> Any:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        raise SystemExit(3)
    if fault == "hang":
        time.sleep(3600)
    if fault == "memory":
        return len(bytearray(8 << 30))
    if fault == "forge":
        answer = b'[1, 2, "ok", ["", 9.0, true], true]'
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and "socket" in os.readlink(f"/proc/self/fd/{name}"):
                os.write(int(name), len(answer).to_bytes(4, "big") + answer)
    if fault == "fork":
        os.fork()
        return "", 0.5, True
    if fault == "bug":
        raise TypeError("a list is no number")
    return {"nan": ("?", float("nan"), False), "none": (None, 1.0, False), "short": ("?", 1.0)}.get(fault, object())


class Pictures:
    """Shows a picture before each of two actions."""

    def reset(self, row):
        from PIL import Image

        return ["What", Image.new("RGB", (32, 16), "red")]

    def step(self, action):
        from PIL import Image

        return ["it", Image.new("RGB", (16, 16), "blue")], 0.5, action == "b"
