"""Many agents at once against `hybridrl serve`, one of whose replicas is killed every minute.

    python benchmarks/endpoint_soak.py --sessions 200 --minutes 10

Each agent has a session of its own, and talks to the policy in turns: by OpenAI's client (chat completions, responses)
and by Anthropic's (messages), streamed or not, at random. After some turns it reads its session and compares it with
what it has seen: one row, the text of every answer, the number of tokens of every request and answer, one version of
the weights. Then it begins again with a new session.

Printed: requests, those that failed, sessions with a difference by kind, and the memory of the serving process. The
model is tiny and random. Needs the clients openai and anthropic.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import make_tiny_qwen2

MAX_TOKENS = 8  # of an answer
TURNS = 4  # of a session, at most
WORDS = ["Tom buys pens", "how many", "and now", "count again", "é or e", "  twice ", "think\nagain"]
REQUEST_TIMEOUT_S = 120.0


@dataclass
class Turn:
    """What a client has seen of one request."""

    text: str
    num_read: int
    num_sampled: int


@dataclass
class Tally:
    """Counts of the whole soak."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, example: str = "") -> None:
        self.counts[name] += 1
        if example:
            self.examples.setdefault(name, example)


Ask = Callable[[list[dict], bool, int], Awaitable[Turn]]


@dataclass
class Agent:
    """One agent. url: of the endpoint, without a path."""

    url: str
    model: str
    tokenizer: Any
    tally: Tally
    rng: random.Random
    http: httpx.AsyncClient
    clients: tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]

    async def work(self, until: float) -> None:
        while time.monotonic() < until:
            await self.session()

    async def session(self) -> None:
        """Talk for some turns, and compare the session with them."""
        name = f"soak-{uuid.uuid4().hex}"
        asks = self._apis(f"{self.url}/sessions/{name}")
        messages, turns = [{"role": "system", "content": f"You are {name}."}], []
        try:
            for _ in range(self.rng.randint(1, TURNS)):
                messages.append({"role": "user", "content": f"{self.rng.choice(WORDS)} {self.rng.random()}"})
                api = self.rng.choice(sorted(asks))
                turns.append(await asks[api](messages, self.rng.random() < 0.5, self.rng.getrandbits(31)))
                messages.append({"role": "assistant", "content": turns[-1].text})
                self.tally.add(f"requests, {api}")
        except Exception as error:
            self.tally.add("requests lost", f"{type(error).__name__}: {error}"[:300])
            return
        found = (await self.http.get(f"{self.url}/sessions/{name}")).json()
        await self.http.delete(f"{self.url}/sessions/{name}")
        self.tally.add("sessions")
        for problem in self._problems(found, turns):
            self.tally.add(problem, str({"turns": turns, "found": found})[:1500])

    def _problems(self, found: dict, turns: list[Turn]) -> list[str]:
        """Return what differs between a session and what its agent has seen."""
        if len(found["rows"]) != 1 or found["counts"] != _counts(len(turns)):
            return ["sessions with other rows"]
        [row] = found["rows"]
        whole, place = row["prompt_ids"] + row["response_ids"], 0
        mask = [0] * len(row["prompt_ids"]) + row["response_mask"]
        for turn in turns:
            ids, own = whole[turn.num_read : turn.num_read + turn.num_sampled], mask[place : turn.num_read]
            place = turn.num_read + turn.num_sampled
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            if any(own) or not all(mask[turn.num_read : place]) or text != turn.text:
                return ["sessions with other tokens"]
        versions = {version for version in row["token_versions"] if version >= 0}
        return ["sessions with other tokens"] * (place != len(whole)) + ["sessions of several versions"] * (
            len(versions) > 1
        )

    def _apis(self, base: str) -> dict[str, Ask]:
        by_openai = self.clients[0].with_options(base_url=f"{base}/v1")  # they share their connections
        by_anthropic = self.clients[1].with_options(base_url=base)

        async def chat(messages: list[dict], is_streamed: bool, seed: int) -> Turn:
            asked = {"model": self.model, "messages": messages, "max_tokens": MAX_TOKENS, "seed": seed}
            create = by_openai.chat.completions.create
            if not is_streamed:
                answer = await create(**asked)
                text = answer.choices[0].message.content
                return Turn(text, answer.usage.prompt_tokens, answer.usage.completion_tokens)
            text = ""
            async for event in await create(**asked, stream=True, stream_options={"include_usage": True}):
                text += "".join(choice.delta.content or "" for choice in event.choices)
                usage = event.usage
            return Turn(text, usage.prompt_tokens, usage.completion_tokens)

        async def responses(messages: list[dict], is_streamed: bool, seed: int) -> Turn:
            asked = {"model": self.model, "input": messages, "max_output_tokens": MAX_TOKENS, "store": False}
            asked["extra_body"] = {"seed": seed}
            if is_streamed:
                async for event in await by_openai.responses.create(**asked, stream=True):
                    last = event
                answer = last.response
            else:
                answer = await by_openai.responses.create(**asked)
            return Turn(answer.output_text, answer.usage.input_tokens, answer.usage.output_tokens)

        async def anthropics(messages: list[dict], is_streamed: bool, seed: int) -> Turn:
            system, *others = messages
            asked = {"model": self.model, "messages": others, "max_tokens": MAX_TOKENS, "system": system["content"]}
            asked["extra_body"] = {"seed": seed}
            if is_streamed:
                async with by_anthropic.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await by_anthropic.messages.create(**asked)
            text = "".join(block.text for block in answer.content)
            return Turn(text, answer.usage.input_tokens, answer.usage.output_tokens)

        return {"chat completions": chat, "responses": responses, "messages": anthropics}


def _counts(num_turns: int) -> dict[str, int]:
    return {"first": 1} | ({"continued": num_turns - 1} if num_turns > 1 else {})


@dataclass
class Server:
    """`hybridrl serve` in a process group of its own."""

    process: subprocess.Popen
    mark: str  # in the environment of all of its processes
    url: str

    @classmethod
    def start(cls, model: Path, *, replicas: int) -> "Server":
        mark = f"SOAK={uuid.uuid4().hex}"
        command = [sys.executable, "-m", "hybridrl.cli", "serve", str(model), "--port", "0", "--device", "cpu"]
        environment = os.environ | dict([mark.split("=")])
        process = subprocess.Popen(
            [*command, "--replicas", str(replicas)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"serving \S+ at (http://127.0.0.1:\d+)/v1", line):
                return cls(process, mark, found[1])
        raise SystemExit(f"hybridrl serve ended with {process.wait()} before it answered")

    def replicas(self) -> list[int]:
        return [pid for pid in self._processes() if "WorkerHost" in _read(f"/proc/{pid}/cmdline")]

    def memory_mb(self) -> float:
        """Return the memory of the process that serves, which is the largest of those of the command."""
        pids = [pid for pid in self._processes() if "hybridrl.cli" in _read(f"/proc/{pid}/cmdline")]
        found = [re.search(r"VmRSS:\s+(\d+) kB", _read(f"/proc/{pid}/status")) for pid in pids]
        return max((int(match[1]) / 1024 for match in found if match), default=float("nan"))

    def _processes(self) -> list[int]:
        pids = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if self.mark in _read(f"/proc/{pid}/environ")]

    def stop(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(120)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended
        return ""


async def _kill(server: Server, tally: Tally, rng: random.Random, *, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        if running := server.replicas():
            os.kill(rng.choice(running), signal.SIGKILL)
            tally.add("replicas killed")


async def _soak(server: Server, model: str, tokenizer: Any, arguments: argparse.Namespace) -> Tally:
    tally, rng = Tally(), random.Random(arguments.seed)
    limits = httpx.Limits(max_connections=2 * arguments.sessions)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as http:
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": REQUEST_TIMEOUT_S}
        clients = openai.AsyncOpenAI(http_client=http, **settings), anthropic.AsyncAnthropic(**settings)
        agents = [
            Agent(server.url, model, tokenizer, tally, random.Random(rng.random()), http, clients)
            for _ in range(arguments.sessions)
        ]
        await agents[0].session()  # loads what is loaded once
        print(f"memory at the start, MB: {server.memory_mb():.0f}", flush=True)
        killer = asyncio.create_task(_kill(server, tally, rng, every_s=arguments.kill_every))
        until = time.monotonic() + 60 * arguments.minutes
        await asyncio.gather(*(agent.work(until) for agent in agents))
        killer.cancel()
    print(f"memory at the end, MB: {server.memory_mb():.0f}", flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200, help="agents at the same time")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoTokenizer

        model = make_tiny_qwen2(Path(folder))
        server = Server.start(model, replicas=arguments.replicas)
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
            tally = asyncio.run(_soak(server, model.name, tokenizer, arguments))
        finally:
            code = server.stop()
    wrong = ("requests lost", "sessions with other rows", "sessions with other tokens", "sessions of several versions")
    requests = sum(number for name, number in tally.counts.items() if name.startswith("requests, "))
    print(f"requests answered: {requests}")
    for name in sorted({*tally.counts, *wrong}):
        print(f"{name}: {tally.counts[name]}")
    for name in wrong:
        if name in tally.examples:
            print(f"{name}, for example: {tally.examples[name]}")
    return int(any(tally.counts[name] for name in wrong) or code != 0)


if __name__ == "__main__":
    raise SystemExit(main())
