"""An endpoint in front of one replica, and OpenAI's client for it."""

import asyncio
import json
import threading
import urllib.error
import urllib.request

import openai

from hybridrl.serving.openai import Endpoint, ServedModel
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.sessions.session import EpisodeLimits, Session
from hybridrl.workers.rollout import SamplingParams
from hybridrl.workers.rollout.request_engine import SLICE_S
from tests.support.serving.local_replicas import LocalReplicas
from tests.support.serving.scripted_policy import PROMPT, RESPONSE, Script


class Site:
    """An endpoint with its router in a thread, and a client for it."""

    def __init__(self, rollout, served: ServedModel):
        self.rollout, self.served = rollout, served
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.router = self.run(self._open())
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.endpoint.port}/v1", api_key="none", max_retries=0, timeout=60
        )

    async def _open(self) -> ReplicaRouter:
        router = ReplicaRouter(LocalReplicas([self.rollout], slice_s=SLICE_S))
        await router.__aenter__()
        self.endpoint = Endpoint(router, self.served, host="127.0.0.1", port=0)
        await self.endpoint.start()
        return router

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def url(self, session: str) -> str:
        """Return the base URL of a session, without the version of an API."""
        return f"http://127.0.0.1:{self.endpoint.port}/sessions/{session}"

    def client_of(self, session: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url(session)}/v1", api_key="none", max_retries=0, timeout=60)

    def open_episode(self, answers: list[str], *, response: int = RESPONSE) -> tuple[Session, Script]:
        """Return a session as an agent loop opens it, and the policy that answers it with these texts."""
        script = Script(self.served.tokenizer, answers)
        limits = EpisodeLimits(script, SamplingParams(response, temperature=0.5), 3, 1, PROMPT, response)
        return self.endpoint.sessions.open_episode(limits), script

    async def _resume(self) -> None:
        self.router.resume()

    def resume(self) -> None:
        self.run(self._resume())

    def close(self) -> None:
        self.run(self.endpoint.stop())
        self.run(self.router.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)

    def post(self, path: str, body: bytes) -> tuple[int, dict, dict]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.endpoint.port}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), dict(error.headers)
