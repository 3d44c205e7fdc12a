"""Episodes that a program outside claims and ends: rewards, deadlines, and who gets a row that was not ended."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybridrl.errors import AgentFailed, WorkerLost
from hybridrl.serving.agent_loop.base import AgentLoopContext
from hybridrl.serving.agent_loop.programs.session_agent import OutsideAgentLoop
from hybridrl.workers.rollout import SamplingParams
from hybridrl.workers.rollout.requests import Request
from tests.support.serving.scripted_policy import PROMPT, RESPONSE, Script

QUESTION = [{"role": "user", "content": "How many?"}]


class Loop:
    """The agent loop of one row, in a thread."""

    def __init__(self, site, client, timeout_s: float):
        sampling = SamplingParams(RESPONSE)
        self.context = AgentLoopContext(
            *(site.served.tokenizer, RESPONSE),
            max_prompt_length=PROMPT,
            agent_timeout_s=timeout_s,
            session_host=site.endpoint.session_host,
        )
        row = {"request": Request("r", (1, 2), sampling, 5), "extra_info": {"index": 4}, "client": client}
        self.result: object = None
        self._thread = threading.Thread(target=self._run, args=(sampling, row), daemon=True)

    def _run(self, sampling, row) -> None:
        try:
            self.result = asyncio.run(OutsideAgentLoop(self.context).run(sampling, **row))
        except Exception as error:
            self.result = error

    def get(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def offer(site):
    @contextmanager
    def offer(*answers: str, client=None, timeout_s: float = 60.0) -> Iterator[Loop]:
        loop = Loop(site, client or Script(site.served.tokenizer, [*answers]), timeout_s)
        loop._thread.start()
        yield loop
        loop._thread.join(60)

    return offer


def claim(site) -> dict:
    status, episode, _ = site.post("/v1/episodes", json.dumps({"wait_s": 60}).encode())
    assert status == 200
    return episode


def chat(site, episode: dict) -> int:
    body = json.dumps({"model": episode["model"], "messages": QUESTION}).encode()
    return site.post(f"/sessions/{episode['session']}/v1/chat/completions", body)[0]


def end(site, episode: dict, **body: object) -> tuple[int, dict]:
    return site.post(f"/v1/episodes/{episode['session']}/end", json.dumps(body).encode())[:2]


@pytest.mark.parametrize("reward", [0.5, None])
def test_a_program_plays_a_row_and_says_its_reward_or_leaves_it_to_the_run(site, offer, reward):
    with offer("yes") as loop:
        episode = claim(site)
        assert episode["row"] == {"extra_info": {"index": 4}} and episode["model"] == "tiny"
        assert episode["base_url"] == f"{site.url(episode['session'])}/v1" == f"{episode['anthropic_base_url']}/v1"
        assert chat(site, episode) == 200
        said = {} if reward is None else {"reward": reward}
        assert end(site, episode, **said) == (200, {"session": episode["session"], "reward": reward})
        output = loop.get()
    assert (output.reward, output.num_turns, output.version) == (reward, 2, 7) and all(output.response_mask)
    assert chat(site, episode) == end(site, episode)[0] == 410


def test_a_row_that_is_not_ended_in_time_has_failed_and_somebody_else_gets_it(site, offer):
    with offer("yes", timeout_s=0.2) as loop:
        late = claim(site)
        with pytest.raises(AgentFailed, match="did not end within 0.2 s") as failed:
            loop.get()
    assert failed.value.cause == "timeout" and end(site, late, reward=1)[0] == chat(site, late) == 410
    with offer("yes") as loop:
        other = claim(site)
        assert other["session"] != late["session"] and other["row"] == late["row"]
        assert chat(site, other) == 200 and end(site, other, reward=1)[0] == 200
        assert loop.get().reward == 1.0


@pytest.mark.parametrize(
    ("said", "asks", "cause"), [({"error": "no disk"}, True, "reported by the program"), ({}, False, "no request")]
)
def test_a_program_that_failed_or_asked_nothing_is_a_failure(site, offer, said, asks, cause):
    with offer("yes") as loop:
        episode = claim(site)
        assert not asks or chat(site, episode) == 200
        assert end(site, episode, **said)[0] == 200
        with pytest.raises(AgentFailed, match="the program outside") as failed:
            loop.get()
    assert failed.value.cause == cause


class LostPolicy:
    async def generate(self, request, *, conversation=None):
        raise WorkerLost("rollout", 0, "serve", "killed by SIGKILL")


def test_a_lost_policy_is_the_trainers_and_no_failure_of_the_program(site, offer):
    with offer(client=LostPolicy()) as loop:
        episode = claim(site)
        assert chat(site, episode) == 503
        end(site, episode, error="the server says 503")
        with pytest.raises(WorkerLost, match="killed by SIGKILL"):
            loop.get()


def test_bodies_that_say_nothing_are_refused_and_without_an_offer_there_is_no_episode(site):
    assert site.endpoint.episodes.claim() is None
    assert site.post("/v1/episodes", b'{"wait_s": 1000}')[0] == site.post("/v1/episodes", b"[]")[0] == 400
    rewards = (b'"good"', b"NaN", b"1e39", b"1" + b"0" * 4000)
    for body in (*(b'{"reward": %s}' % reward for reward in rewards), b'{"rewards": 1}', b'{"error": 3}'):
        status, answer, _ = site.post("/v1/episodes/none/end", body)
        assert status == 400 and "a finite one" in answer["error"]["message"]
    status, answer, _ = site.post("/v1/episodes/none/end", b"{}")
    assert status == 410 and "is not open" in answer["error"]["message"]
