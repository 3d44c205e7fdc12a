"""Agents of PyPI, unchanged, at the endpoint: `make environments` installs them (requirements/agents.txt)."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import EpisodeLimits
from hybridrl.workers.rollout import SamplingParams
from tests.support.serving.scripted_policy import Script

PROGRAM = Path(__file__).parents[2] / "support" / "serving" / "pypi_agent.py"
PROMPT, RESPONSE = 40_000, 40_000  # tokens; the prompts of smolagents have eight thousand of the tiny tokenizer


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def code(line: str) -> str:
    return f"Thought: so\n<code>\n{line}\n</code>"


ADD, FIVE = call("add", a=2, b=3), "It is 5."
BASH = [call("bash", command="expr 2 + 3"), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 5")]


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("HYBRIDRL_AGENTS_PYTHON")
    if found is None:
        pytest.skip("the agents are in an environment of their own: run `make environments`")
    return found


@pytest.fixture
def play(site, python, monkeypatch):
    """Run an agent against scripted answers; return what it printed, and its session."""
    longer = dataclasses.replace(site.served, max_length=PROMPT + RESPONSE, max_response_length=RESPONSE)
    monkeypatch.setattr(site.endpoint, "served", longer)

    def play(agent: str, answers: list[str], *, prompt: int = PROMPT, response: int = RESPONSE):
        script = Script(site.served.tokenizer, [*answers])
        limits = EpisodeLimits(script, SamplingParams(response), 3, 1, prompt, response)
        session = site.endpoint.sessions.open_episode(limits)
        own = {"OPENAI_BASE_URL": f"{site.url(session.name)}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "tiny"}
        variables = os.environ | own | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
        variables.pop("PYTHONPATH", None)
        done = subprocess.run(
            [python, PROGRAM, agent], env=variables, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split("ANSWER ")[-1].strip(), session

    return play


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("agent", "answers", "said", "kinds"),
    [
        ("mini_swe_agent", BASH, "5", "first continued"),
        ("mini_swe_agent", ["no call", *BASH], "5", "first compacted continued"),  # it drops what has no call
        ("openai_agents:responses", [ADD, FIVE], FIVE, "first continued"),
        ("openai_agents:stream", [ADD, FIVE], FIVE, "first continued"),
        ("openai_agents:chat", [ADD, FIVE], FIVE, "first continued"),
        ("openai_agents:typed", ['{"number": 5}'], "number=5", "first"),
        ("openai_agents:handoff", [call("transfer_to_helper"), FIVE], FIVE, "first rewritten"),  # other instructions
        ("pydantic_ai:chat", [ADD, FIVE], FIVE, "first continued"),
        ("pydantic_ai:responses", [ADD, FIVE], FIVE, "first continued"),
        ("pydantic_ai:stream", [ADD, FIVE], FIVE, "first continued"),
        ("pydantic_ai:typed", [call("final_result", number=5)], "number=5", "first"),
        ("smolagents:tool", [ADD, call("final_answer", answer="5")], "5", "first edited"),  # it writes calls as text
        ("smolagents:code", [code("print(add(2, 3))"), code("final_answer(5)")], "5", "first edited"),
    ],
)
def test_an_agent_of_pypi_plays_and_its_rows_have_the_tokens_of_the_policy(play, site, agent, answers, said, kinds):
    printed, session = play(agent, answers)
    assert printed == said and [str(turn.kind) for turn in session.turns] == kinds.split()
    trained = [
        [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
        for row in session_rows(session.turns)
    ]
    sampled = sorted(token for turn in session.turns for token in turn.token_ids)
    assert sorted(token for row in trained for token in row) == sampled
    decode = site.served.tokenizer.decode
    assert [decode(turn.token_ids, skip_special_tokens=True) for turn in session.turns] == answers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_whose_row_is_full_ends_at_once(play):
    printed, session = play("mini_swe_agent", BASH, prompt=200, response=60)
    assert printed == "ContextWindowExceededError" and session.was_full  # litellm's, which mini-swe-agent never retries
