"""A random chat client and an engine that draws random tokens, for the tests of sessions.

The client does what agent frameworks do with a conversation between two requests: it sends everything again, rebuilt
from parsed objects, retries, branches, drops or summarises old messages, and now and then changes what the policy said.
The engine remembers every prompt and what it drew for it.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.openai.choice import Choice
from hybridrl.serving.openai.parameters import ServedModel
from hybridrl.serving.openai.requests import parse_request
from hybridrl.serving.sessions.matching import BranchKind
from hybridrl.serving.sessions.session import Session
from hybridrl.workers.rollout.requests import TokenOutput

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "find")]
CALLS = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": %d}}\n</tool_call>',
    "llama3": '{"name": "find", "parameters": {"what": "x%d"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": %d, "b": "é"}}]',
}
WORDS = ["Tom ", " pens", "\n", "  ", "é", "12", "<think>hm</think> ", "{", "<|im", "so\n\n", " </tool_call>"]


@dataclass
class Draw:
    """One request as the engine saw it."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


@dataclass
class RandomEngine:
    """Draws texts that look like answers, calls and nonsense, in tokens that no tokenizer would choose."""

    tokenizer: Any
    family: str
    random: random.Random
    draws: list[Draw] = field(default_factory=list)

    def draw(self, prompt_ids: tuple[int, ...], limit: int) -> TokenOutput:
        rng, encode = self.random, lambda text: self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for _ in range(rng.randint(1, 4)):
            ids += encode(rng.choice(WORDS)) if rng.random() < 0.7 else [rng.randrange(len(self.tokenizer))]
        if rng.random() < 0.4:
            call = encode(CALLS[self.family] % len(self.draws))
            ids = call if self.family == "llama3" else [*ids, *call]
        ids = ids[:limit]
        is_cut = len(ids) == limit or rng.random() < 0.15  # by its length, or by a stop text
        ids = ids if is_cut else [*ids, self.tokenizer.eos_token_id]
        log_probs = [-rng.random() for _ in ids]
        versions = tuple(rng.randint(1, 3) for _ in ids)
        self.draws.append(Draw(list(prompt_ids), ids, log_probs, list(versions)))
        return TokenOutput("r", ids, log_probs, "length" if is_cut else "stop", min(versions), mixed=versions)


@dataclass
class RandomClient:
    """One agent with its conversations."""

    session: Session
    engine: RandomEngine
    random: random.Random
    has_tools: bool = True
    conversations: list[list[dict]] = field(default_factory=list)
    expected: list[BranchKind] = field(default_factory=list)

    def ask(self, messages: list[dict], kind: BranchKind, *, n: int = 1) -> list[dict]:
        """Send a request, and return the answers as messages."""
        tokenizer = self.engine.tokenizer
        policy = ServedModel("m", tokenizer, max_length=4096, max_response_length=64, vocab_size=len(tokenizer))
        body = {"model": "m", "messages": [self._rebuilt(message) for message in messages], "n": n}
        body |= {"tools": TOOLS} if self.has_tools else {}
        body = json.loads(json.dumps(body))
        parsed = parse_request(body, is_chat=True, policy=policy, name="q", session=self.session)
        answers = []
        for index, request in enumerate(parsed.requests):
            choice = Choice(index, parsed)
            choice.add(self.engine.draw(request.prompt_ids, 40))
            answers.append(json.loads(json.dumps(choice.body()["message"])))
            self.expected.append(kind)
        return answers

    def step(self) -> None:
        """Do one random thing."""
        if not self.conversations:
            self._begin("Be brief.", BranchKind.FIRST)
            return
        choice = self.random.random()
        if choice < 0.55:
            self._continue()
        elif choice < 0.65:
            self._retry()
        elif choice < 0.75:
            self._fork()
        elif choice < 0.82:
            self._begin(f"You are helper {len(self.expected)}.", BranchKind.SEPARATE)
        elif choice < 0.91:
            self._compact()
        else:
            self._edit()

    def _begin(self, system: str, kind: BranchKind) -> None:
        messages = [{"role": "system", "content": system}, self._user()]
        self.conversations.append([*messages, self.ask(messages, kind)[0]])

    def _continue(self) -> None:
        """Extend the conversation whose answer came last: it has no continuation yet."""
        messages = [*self.conversations[-1], *self._next(self.conversations[-1])]
        self.conversations.append([*messages, self.ask(messages, BranchKind.CONTINUED)[0]])

    def _retry(self) -> None:
        messages = self.conversations[-1][:-1]
        n = self.random.randint(1, 2)
        self.conversations.append([*messages, self.ask(messages, BranchKind.RESAMPLED, n=n)[-1]])

    def _fork(self) -> None:
        messages = [*self.conversations[-1], *self._next(self.conversations[-1])]
        self.ask(messages, BranchKind.CONTINUED)
        other = [*self.conversations[-1], *self._next(self.conversations[-1])]
        self.conversations.append([*other, self.ask(other, BranchKind.FORKED)[0]])

    def _compact(self) -> None:
        """Replace the policy's first answers by a summary."""
        system, task, *rest = self.conversations[-1]
        summary = {"role": "user", "content": f"Summary {len(self.expected)} of {len(rest)} messages."}
        kept = self._next([summary]) if self.random.random() < 0.5 else []
        messages = [system, task, summary, *kept]
        self.conversations.append([*messages, self.ask(messages, BranchKind.COMPACTED)[0]])

    def _edit(self) -> None:
        *before, answer = self.conversations[-1]
        edited = {"role": "assistant", "content": f"Words {len(self.expected)} that the policy did not say."}
        messages = [*before, edited, self._user()]
        self.conversations.append([*messages, self.ask(messages, BranchKind.EDITED)[0]])

    def _next(self, conversation: list[dict]) -> list[dict]:
        calls = conversation[-1].get("tool_calls") or []
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{self.random.randint(0, 10**9)} é"}
            for call in calls
        ] or [self._user()]

    def _user(self) -> dict:
        return {"role": "user", "content": f" How many? {self.random.randint(0, 10**9)}\n"}

    def _rebuilt(self, message: dict) -> dict:
        """Return a message as another framework writes it."""
        rng, rebuilt = self.random, dict(message)
        if rng.random() < 0.3 and rebuilt.get("content"):
            rebuilt["content"] = [{"type": "text", "text": rebuilt["content"]}]
        elif message["role"] == "assistant" and rebuilt.get("content"):
            text = rebuilt["content"]
            rebuilt["content"] = rng.choice([text, text.strip(), text.split("</think>")[-1]])
        rebuilt.pop("refusal", None)
        if message.get("tool_calls"):
            rebuilt["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _respaced(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            rebuilt["content"] = rebuilt["content"] or rng.choice(["", None])
        return rebuilt


def _respaced(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), separators=(",", ":"))
